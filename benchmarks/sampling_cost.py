"""What sampling parameters cost a decode step of the native runner, all rows asking for them.

    python benchmarks/sampling_cost.py MODEL_DIR
    python benchmarks/sampling_cost.py MODEL_DIR --cases greedy logprobs-5 --rounds 20

Every case runs the engine's own step (schedule, build, execute, apply) over the same prompts, whose
full blocks stay in the prefix cache. Cases take turns of a few steps, so that a machine that
changes its speed does so for all of them. What is told is the median of each case's steps, and the
median over the rounds of its ratio to the plain greedy steps of that round. On a busy machine,
`--cpu-time` with `--threads 1` counts the work and not the waiting.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trioengine.config import EngineOptions
from trioengine.engine_proc import native_runner
from trioengine.engine_proc.core import EngineCore
from trioengine.engine_proc.structured_output.compilations import Compilations
from trioengine.engine_proc.structured_output.guidance import GuidanceCompiler
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams
from trioengine.structured import StructuredOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trioengine.protocol import ModelInfo

PENALTIES: Final = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
FILTERS: Final = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 1}
# Neither can end within a case's few steps.
LIST: Final = StructuredOutput(
    "json", '{"type": "array", "items": {"type": "object"}, "minItems": 100}'
)
LETTERS: Final = StructuredOutput("regex", "[a-z ]{2000}")
CASES: Final[dict[str, dict[str, Any]]] = {
    "greedy": {},
    "greedy-again": {},
    "temperature": {"temperature": 0.8, "seed": 1},
    "top_p": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    "top_p-top_k": FILTERS,
    "penalties": PENALTIES,
    "logit_bias": {"logit_bias": dict.fromkeys(range(0, 3000, 10), 1.0)},
    "allowed": {"allowed_token_ids": tuple(range(0, 49_000, 3))},
    "json": {"structured": LIST},
    "regex": {"structured": LETTERS},
    "json-temp": {"structured": LIST, "temperature": 0.8, "seed": 1},
    "logprobs-0": {"logprobs": 0},
    "logprobs-5": {"logprobs": 5},
    "logprobs-20": {"logprobs": 20},
    "all": {**FILTERS, **PENALTIES, "logprobs": 5},
}


class _NoText:
    """A detokenizer that does nothing: it would cost the same in every case."""

    def append(self, token_ids: Sequence[int], /) -> tuple[str, str | None, int]:
        return "", None, len(token_ids)

    def flush(self) -> str:
        return ""


class Bench:
    """One engine, and a batch that is run again and again."""

    def __init__(
        self, core: EngineCore, clock: Callable[[], float], batch: int, context: int, steps: int
    ) -> None:
        vocab = core.model.vocab_size
        self._prompts = [
            [(i * 131 + j * 17) % (vocab - 100) + 50 for j in range(context)] for i in range(batch)
        ]
        self._core = core
        self._clock = clock
        self._steps = steps
        self._next_id = 0

    def seconds(self, case: str) -> float:
        """Return the median step of a batch that asks for what the case says."""
        return statistics.median(self.run(case)[2:])  # the first two warm up

    def run(self, case: str) -> list[float]:
        """Run a batch to its end; return the seconds of the steps that gave every row a token."""
        params = SamplingParams(
            **{"temperature": 0.0, **CASES[case]}, ignore_eos=True, max_tokens=self._steps + 2
        )
        for prompt in self._prompts:
            self._core.add_request(Add(self._next_id, prompt, params))
            self._next_id += 1
        self._core.settle()  # grammars, which are compiled at once here
        taken: list[float] = []
        while self._core.has_work():
            before = self._core.stats().generation_tokens
            begin_s = self._clock()
            self._core.step(list)
            step_s = self._clock() - begin_s
            if self._core.stats().generation_tokens - before == len(self._prompts):
                taken.append(step_s)
        return taken


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=257)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--steps", type=int, default=12, help="of a case before the next one's turn"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="of this process, not of the wall")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    args = parser.parse_args()
    options = EngineOptions(
        quantization="none",
        kv_cache_memory_gib=2.0,
        threads=args.threads,
        max_num_seqs=args.batch,
    )
    runner = native_runner.load(args.model_dir, options, lambda phase, fraction: None)
    core = EngineCore(
        runner,
        lambda params: _NoText(),
        max_num_seqs=args.batch,
        prefill_tokens_beside_decodes=2048,
        grammars=Compilations(compiler(args.model_dir, runner.model), start=lambda work: work()),
    )
    clock = time.process_time if args.cpu_time else time.perf_counter
    bench = Bench(core, clock, args.batch, args.context, args.steps)
    bench.run("greedy")  # computes the prompts
    print(f"{runner.model.runner}, batch {args.batch}, context {args.context}")
    rounds = []
    for _ in range(args.rounds):
        rounds.append({case: bench.seconds(case) for case in args.cases})
        report(rounds)


def compiler(model_dir: Path, model: ModelInfo) -> GuidanceCompiler:
    """Return the model's compiler of grammars."""
    return GuidanceCompiler(
        lambda: (model_dir / "tokenizer.json").read_text(),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
    )


def report(rounds: list[dict[str, float]]) -> None:
    """Print the medians of the rounds so far: a run may be cut short."""
    plain = next(iter(rounds[0]))
    print(f"{len(rounds)} rounds")
    for case in rounds[0]:
        step_ms = statistics.median(each[case] for each in rounds) * 1000
        ratios = [each[case] / each[plain] for each in rounds]
        print(
            f"{case:14} {step_ms:7.2f} ms  {statistics.median(ratios):.3f} of {plain}"
            f"  ({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
