"""What penalties, biases, masks and logprobs must come to, in plain loops over float64."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from trioengine.engine_proc.core import EngineCore
from trioengine.engine_proc.runner import NO_TOKEN, AllowMasks, LogitBias, Penalties
from trioengine.protocol import Add

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from trioengine.engine_proc.runner import ModelRunner, RowLogprobs, SamplingRows
    from trioengine.outputs import RequestOutput
    from trioengine.sampling_params import SamplingParams

__all__ = [
    "Extras",
    "check_row",
    "edited",
    "extras_of_a_row",
    "give_extras",
    "log_softmax",
    "run_core",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Extras:
    """What one row asks for, and what came before it."""

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    masked: tuple[int, ...] = ()
    logprobs: int = -1
    target: int = -1
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()

    @property
    def counts(self) -> dict[int, int]:
        """How often each token that has been seen is in the output."""
        return dict.fromkeys(self.prompt, 0) | dict(Counter(self.output))


def extras_of_a_row(vocab_size: int) -> st.SearchStrategy[Extras]:
    """Return any extras, of which most rows have several."""
    ids = st.integers(0, vocab_size - 1)
    penalty = st.sampled_from([0.0, 0.0, -2.0, 0.7, 2.0])
    biases = st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 0.5, 100.0]), max_size=6)
    allowed = st.sets(ids, max_size=80).map(lambda allowed: tuple(sorted(allowed)))
    return st.builds(
        Extras,
        presence=penalty,
        frequency=penalty,
        repetition=st.sampled_from([1.0, 1.0, 0.5, 1.3, 2.0]),
        bias=biases.map(lambda bias: tuple(bias.items())),
        allowed=st.none() | allowed,
        masked=st.sets(ids, max_size=80).map(tuple),
        logprobs=st.integers(-1, 20),
        prompt=st.lists(ids, max_size=40).map(tuple),
        output=st.lists(ids, max_size=40).map(tuple),
    )


def check_row(
    token: int,
    found: RowLogprobs,
    row: int,
    logits: npt.NDArray[np.float32],
    extras: Extras,
) -> None:
    """Compare one row with the plain reference; the token was sampled greedily."""
    expected = edited(logits, extras)
    best = expected.max()
    if best == -np.inf:
        assert token == NO_TOKEN
        return
    # Two that are equals in float32 may not be in float64.
    assert expected[token] >= best - 1e-4 * max(1.0, abs(best))
    if extras.logprobs < 0:
        return
    logprobs = log_softmax(logits)
    np.testing.assert_allclose(found.chosen[row], logprobs[token], atol=1e-5)
    assert found.ranks[row] == 1 + int((logits > logits[token]).sum())
    order = np.argsort(-logits, kind="stable")[: extras.logprobs]
    assert found.top_ids[row, : extras.logprobs].tolist() == order.tolist()
    np.testing.assert_allclose(found.top[row, : extras.logprobs], logprobs[order], atol=1e-5)


def edited(logits: npt.NDArray[np.float32], extras: Extras) -> npt.NDArray[np.float64]:
    """Return one row's logits as they must be sampled from."""
    row = logits.astype(np.float64)
    if extras.allowed is not None:
        for token in set(range(len(row))) - set(extras.allowed):
            row[token] = -np.inf
    for token in extras.masked:
        row[token] = -np.inf
    for token, value in extras.bias:
        row[token] += value
    for token, count in extras.counts.items():
        row[token] *= 1 / extras.repetition if row[token] > 0 else extras.repetition
        row[token] -= extras.frequency * count
        row[token] -= extras.presence if count else 0.0
    return row


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return one row's logprobs."""
    row = logits.astype(np.float64)
    row = row - row.max()
    logprobs: npt.NDArray[np.float64] = row - np.log(np.exp(row).sum())
    return logprobs


def give_extras(rows: SamplingRows, asked: Sequence[Extras], vocab_size: int) -> None:
    """Lay out what rows ask for as the runner wants it."""
    starts = np.cumsum([0, *(len(extras.counts) for extras in asked)]).astype(np.int32)
    rows.penalties = Penalties(
        presence=np.array([extras.presence for extras in asked], np.float32),
        frequency=np.array([extras.frequency for extras in asked], np.float32),
        repetition=np.array([extras.repetition for extras in asked], np.float32),
        starts=starts,
        token_ids=np.array([t for extras in asked for t in extras.counts], np.int32),
        counts=np.array([n for extras in asked for n in extras.counts.values()], np.int32),
    )
    rows.bias = LogitBias(
        starts=np.cumsum([0, *(len(extras.bias) for extras in asked)]).astype(np.int32),
        token_ids=np.array([t for extras in asked for t, _ in extras.bias], np.int32),
        values=np.array([value for extras in asked for _, value in extras.bias], np.float32),
    )
    masks = [extras.allowed for extras in asked if extras.allowed is not None]
    words = np.zeros((len(masks), -(-vocab_size // 32)), np.uint32)
    for mask, allowed in enumerate(masks):
        for token in allowed:
            words[mask, token // 32] |= np.uint32(1 << token % 32)
    numbers = iter(range(len(masks)))
    row_masks = [-1 if extras.allowed is None else next(numbers) for extras in asked]
    rows.allow = AllowMasks(words, np.array(row_masks, np.int32)) if masks else None
    rows.masked_token_ids = [(i, list(e.masked)) for i, e in enumerate(asked) if e.masked]
    rows.logprobs_k = np.array([extras.logprobs for extras in asked], np.int32)
    rows.targets = np.array([extras.target for extras in asked], np.int32)


def run_core(
    runner: ModelRunner,
    requests: Mapping[int, tuple[Sequence[int], SamplingParams]],
    make_text: Any,
    **options: Any,
) -> tuple[dict[int, RequestOutput], EngineCore]:
    """Run requests side by side to their ends; return all that each was told, and the engine."""
    core = EngineCore(runner, make_text, **options)
    told: dict[int, RequestOutput] = {}
    for request_id, (prompt, params) in requests.items():
        refused = core.add_request(Add(request_id, list(prompt), params))
        assert refused is None, refused
    while core.has_work():
        for delta in core.step(list):
            if (earlier := told.setdefault(delta.request_id, delta)) is not delta:
                earlier.merge(delta)
    core.check_integrity()
    return told, core
