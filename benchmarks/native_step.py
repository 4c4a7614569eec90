"""Steps of the native runner against the floor of this machine, measured on the spot.

    python benchmarks/native_step.py MODEL_DIR [--isa ISA] [--quantization KIND] [--json FILE]

Each case is one step, repeated; the shortest time counts, since whatever else runs can only make
one longer. The floor is that of ``trioengine bench`` (weights and cache at the memory's rate,
products at the rate of torch's): above 1.0 means that ours multiplies faster than torch.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from trioengine.bench.floor import Rates, decode_step_s, prefill_s
from trioengine.bench.machine import measure
from trioengine.bench.model_cost import read_model_cost
from trioengine.config import EngineOptions
from trioengine.engine_proc import native_runner
from trioengine.engine_proc.runner import SamplingRows, StepBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioengine.bench.model_cost import ModelCost
    from trioengine.engine_proc.native_runner.model_runner import NativeModelRunner

PATIENCE_S = 1.5  # for each case, five steps at least
BLOCK = 16


class Case(msgspec.Struct, frozen=True):
    """One step: ``batch`` decodes behind ``context`` tokens, or a prompt of ``prompt`` tokens."""

    name: str
    batch: int = 1
    context: int = 0
    shared: int = 0
    prompt: int = 0

    def floor_s(self, cost: ModelCost, rates: Rates) -> float:
        if self.prompt:
            return prefill_s(cost, rates, num_tokens=self.prompt)
        own = self.context - self.shared
        return decode_step_s(cost, rates, batch=self.batch, context=own, shared=self.shared)

    def step(self) -> StepBatch:
        if self.prompt:
            return _step([(self.prompt, 0, list(range(-(-self.prompt // BLOCK))))])
        common = list(range(self.shared // BLOCK))
        own = -(-(self.context + 1) // BLOCK) - len(common)
        firsts = [len(common) + own * i for i in range(self.batch)]
        return _step([(1, self.context, [*common, *range(at, at + own)]) for at in firsts])


CASES = (
    Case("decode 1, context 256", 1, 256),
    Case("decode 16, context 256", 16, 256),
    Case("decode 64, context 256", 64, 256),
    Case("decode 16, context 1100", 16, 1100),
    Case("the same, 1024 shared", 16, 1100, 1024),
    Case("prefill 64", prompt=64),
    Case("prefill 256", prompt=256),
    Case("prefill 1024", prompt=1024),
)


class Result(msgspec.Struct, frozen=True):
    """What one case took, at best."""

    name: str
    step_ms: float
    floor_ms: float

    @property
    def fraction(self) -> float:
        return self.floor_ms / self.step_ms


def _step(parts: Sequence[tuple[int, int, list[int]]]) -> StepBatch:
    """Build a greedy step of (tokens, first position, blocks) parts; token ids are arbitrary."""
    starts = np.cumsum([0, *(count for count, _, _ in parts)], dtype=np.int32)
    tables = np.zeros((len(parts), max(len(blocks) for _, _, blocks in parts)), np.int32)
    for row, (_, _, blocks) in zip(tables, parts, strict=True):
        row[: len(blocks)] = blocks
    ends = np.array([position + count for count, position, _ in parts], np.int32)
    zeros = np.zeros(len(parts), np.float32)
    return StepBatch(
        token_ids=np.arange(starts[-1], dtype=np.int32) * 37 % 997,
        positions=np.concatenate([np.arange(p, p + n, dtype=np.int32) for n, p, _ in parts]),
        query_start=starts,
        seq_lens=ends,
        block_tables=tables,
        logits_rows=starts[1:] - np.int32(1),
        sampling=SamplingRows(
            temperature=zeros,
            top_p=zeros + np.float32(1),
            top_k=np.zeros(len(parts), np.int32),
            min_p=zeros,
            seeds=np.zeros(len(parts), np.uint64),
            positions=ends.astype(np.int64),
            request_ids=np.arange(len(parts), dtype=np.int64),
            all_greedy=True,
            masked_token_ids=[],
        ),
    )


def best_step_s(runner: NativeModelRunner, batch: StepBatch) -> float:
    """Return the shortest of many steps."""
    runner.execute(batch)
    times: list[float] = []
    deadline = time.perf_counter() + PATIENCE_S
    while len(times) < 5 or time.perf_counter() < deadline:
        begin = time.perf_counter()
        runner.execute(batch)
        times.append(time.perf_counter() - begin)
    return min(times)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model_dir", type=Path, help="a converted checkpoint")
    parser.add_argument("--isa", default="", help="instruction set; the best by default")
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "q4", "gguf"))
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--weight-bytes", type=int, default=None, help="of quantised weights")
    parser.add_argument("--json", type=Path, default=None, help="write the results there")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Measure and print a table."""
    args = _arguments(argv)
    cost = read_model_cost(args.model_dir).stored_as(
        weight_bytes=args.weight_bytes, kv_element_bytes=2
    )
    machine = measure(cost.weight_bytes)
    rates = Rates(
        bytes_per_s=machine.weights.best,
        flops=None if machine.gemm is None else machine.gemm.bfloat16,
    )
    options = EngineOptions(
        backend="native",
        threads=args.threads,
        kv_cache_memory_gib=1.0,
        quantization=args.quantization,
        engine_args={"isa": args.isa} if args.isa else {},
    )
    runner = native_runner.load(args.model_dir, options, lambda phase, fraction: None)
    tflops = 0.0 if rates.flops is None else rates.flops / 1e12
    print(f"{runner.model.runner}: {rates.bytes_per_s / 1e9:.1f} GB/s, {tflops:.2f} TFLOP/s")
    results = []
    for case in CASES:
        step_s = best_step_s(runner, case.step())
        results.append(Result(case.name, step_s * 1e3, case.floor_s(cost, rates) * 1e3))
        last = results[-1]
        figures = f"{last.step_ms:8.2f} ms  floor {last.floor_ms:7.2f} ms  {last.fraction:5.0%}"
        print(f"{last.name:26} {figures}")
    runner.close()
    if args.json is not None:
        report = {"runner": runner.model.runner, "machine": machine, "steps": results}
        args.json.write_bytes(msgspec.json.encode(report))


if __name__ == "__main__":
    main(sys.argv[1:])
