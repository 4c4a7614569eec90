"""A scheduler small enough to be believed, and transformers' own answer to compare with.

``MiniScheduler`` drives any ``ModelRunner`` from lists of token ids: random block allocator, chunks
of any size, shared prefix blocks, preemption. It shares no code with the engine's scheduler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from typing import TYPE_CHECKING, Any

import numpy as np

from trioengine.engine_proc.runner import SamplingRows, StepBatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from trioengine.engine_proc.runner import ModelRunner
    from trioengine.engine_proc.torch_runner.model_runner import TorchModelRunner

__all__ = [
    "GREEDY",
    "LogitsTap",
    "MiniScheduler",
    "Sampling",
    "Seq",
    "load_reference",
    "reference_generate",
    "reference_logits",
    "sampling_rows",
    "tap_logits",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How one sequence is sampled."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    masked: tuple[int, ...] = ()


GREEDY = Sampling()


@dataclasses.dataclass(slots=True)
class Seq:
    """One sequence. ``tokens`` is prompt and output, ``computed`` of them are in the cache."""

    tokens: list[int]
    sampling: Sampling
    prompt_len: int
    request_id: int
    blocks: list[int] = dataclasses.field(default_factory=list)
    owned: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    logits: list[npt.NDArray[np.float32]] = dataclasses.field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class LogitsTap:
    """Holds the logits of the last step, ``[num_rows, vocab]`` float32."""

    def __init__(self) -> None:
        self.last: npt.NDArray[np.float32] = np.empty((0, 0), np.float32)


@contextlib.contextmanager
def tap_logits(runner: TorchModelRunner) -> Iterator[LogitsTap]:
    """Let a tap see what ``runner`` samples from."""
    tap, compute = LogitsTap(), runner.logits

    def logits(batch: StepBatch) -> Any:
        result = compute(batch)
        tap.last = result.float().cpu().numpy().copy()
        return result

    runner.logits = logits  # type: ignore[method-assign]
    try:
        yield tap
    finally:
        del runner.logits


class MiniScheduler:
    """Builds ``StepBatch`` from token lists. Blocks are handed out in random order."""

    def __init__(self, runner: ModelRunner, *, seed: int = 0, tap: LogitsTap | None = None) -> None:
        self.runner = runner
        self.random = random.Random(seed)
        self._free = list(range(runner.num_blocks))
        self._tap = tap
        self._next_id = 0

    def add(
        self,
        prompt: Sequence[int],
        sampling: Sampling = GREEDY,
        *,
        share: Seq | None = None,
        shared_blocks: int = 0,
        request_id: int | None = None,
    ) -> Seq:
        """Take a prompt, whose first ``shared_blocks`` blocks ``share`` has computed already."""
        self._next_id += 1
        number = self._next_id if request_id is None else request_id
        sequence = Seq(list(prompt), sampling, len(prompt), number)
        if share is not None:
            sequence.blocks = share.blocks[:shared_blocks]
            sequence.computed = shared_blocks * self.runner.block_size
        return sequence

    def preempt(self, sequence: Seq) -> None:
        """Free its blocks; what was computed will be computed again, elsewhere."""
        self._free += sequence.owned
        sequence.blocks, sequence.owned, sequence.computed = [], [], 0

    def run(self, sequences: Sequence[Seq], num_tokens: int, chunk: int | None = None) -> None:
        """Step until each has ``num_tokens`` output tokens, prompts in chunks of ``chunk``."""
        while todo := [seq for seq in sequences if len(seq.output) < num_tokens]:
            self.step(todo, [chunk] * len(todo))

    def step(self, sequences: Sequence[Seq], limits: Sequence[int | None]) -> None:
        """Run one step with at most ``limits[i]`` tokens of each sequence, in this order."""
        lens = [
            len(seq.tokens) - seq.computed
            if limit is None
            else min(limit, len(seq.tokens) - seq.computed)
            for seq, limit in zip(sequences, limits, strict=True)
        ]
        batch, sampled = self._batch(sequences, lens)
        tokens = self.runner.execute(batch).tokens
        assert tokens.dtype == np.int32
        assert tokens.shape == (len(sampled),)
        for seq, length in zip(sequences, lens, strict=True):
            seq.computed += length
        for row, (seq, token) in enumerate(zip(sampled, tokens.tolist(), strict=True)):
            seq.tokens.append(token)
            if self._tap is not None:
                seq.logits.append(self._tap.last[row])

    def _batch(self, sequences: Sequence[Seq], lens: list[int]) -> tuple[StepBatch, list[Seq]]:
        starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        ends = [seq.computed + length for seq, length in zip(sequences, lens, strict=True)]
        for seq, end in zip(sequences, ends, strict=True):
            self._allocate(seq, end)
        tables = np.zeros((len(sequences), max(len(s.blocks) for s in sequences)), np.int32)
        for row, seq in enumerate(sequences):
            tables[row, : len(seq.blocks)] = seq.blocks
        rows = [i for i, seq in enumerate(sequences) if ends[i] == len(seq.tokens)]
        sampled = [sequences[i] for i in rows]
        batch = StepBatch(
            token_ids=_flat(
                [s.tokens[s.computed : e] for s, e in zip(sequences, ends, strict=True)]
            ),
            positions=_flat([range(s.computed, e) for s, e in zip(sequences, ends, strict=True)]),
            query_start=starts,
            seq_lens=np.array(ends, np.int32),
            block_tables=tables,
            logits_rows=np.array([starts[i + 1] - 1 for i in rows], np.int32),
            sampling=sampling_rows(
                [seq.sampling for seq in sampled],
                positions=[len(seq.tokens) for seq in sampled],
                request_ids=[seq.request_id for seq in sampled],
            ),
        )
        return batch, sampled

    def _allocate(self, seq: Seq, end: int) -> None:
        while len(seq.blocks) * self.runner.block_size < end:
            block = self._free.pop(self.random.randrange(len(self._free)))
            seq.blocks.append(block)
            seq.owned.append(block)


def _flat(parts: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    return np.array([value for part in parts for value in part], np.int32)


def sampling_rows(
    rows: Sequence[Sampling],
    *,
    positions: Sequence[int] | None = None,
    request_ids: Sequence[int] | None = None,
) -> SamplingRows:
    """Lay out one ``Sampling`` per row as the runner wants them."""
    count = len(rows)
    return SamplingRows(
        temperature=np.array([row.temperature for row in rows], np.float32),
        top_p=np.array([row.top_p for row in rows], np.float32),
        top_k=np.array([row.top_k for row in rows], np.int32),
        min_p=np.array([row.min_p for row in rows], np.float32),
        seeds=np.array([row.seed for row in rows], np.uint64),
        positions=np.array(range(count) if positions is None else positions, np.int64),
        request_ids=np.array(range(count) if request_ids is None else request_ids, np.int64),
        all_greedy=all(row.temperature == 0.0 for row in rows),
        masked_token_ids=[(i, list(row.masked)) for i, row in enumerate(rows) if row.masked],
    )


def reference_logits(model: Any, tokens: Sequence[int], num_rows: int) -> npt.NDArray[np.float32]:
    """Return transformers' logits for the last ``num_rows`` of ``tokens``, float32."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([list(tokens)]), use_cache=False).logits[0, -num_rows:]
    result: npt.NDArray[np.float32] = logits.float().numpy()
    return result


def reference_generate(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the greedy output of transformers' own ``generate``, which ends at the end token."""
    import torch

    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def load_reference(model_dir: Path) -> Any:
    """Load a checkpoint the plain way: transformers' own attention, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()
