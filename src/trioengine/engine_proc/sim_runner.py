"""A model runner that computes nothing: tokens from a hash, step time and faults from a script.

It stands where a model would, behind the same seam, so scheduler, cache, detokeniser, wire and
front end are the real ones. A token is a hash of (seed, request id, position): whatever shares the
batch, was cached or was preempted, the answer of a request can be foretold (``sim_tokens``). It
never ends a sequence by itself unless the script says so.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np

from trioengine.engine_proc.runner import NO_TOKEN, StepResult
from trioengine.engine_proc.sim_logits import edit_row, edited_rows, sim_logits
from trioengine.engine_proc.sim_logprobs import sim_logprobs
from trioengine.errors import ConfigError
from trioengine.protocol import ModelInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy.typing as npt

    from trioengine.config import EngineOptions
    from trioengine.engine_proc.runner import SamplingRows, StepBatch

__all__ = ["SimModelRunner", "SimScript", "sim_tokens"]

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_ID: Final = np.uint64(0xD1B54A32D192ED03)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_EOS_SALT: Final = np.uint64(0x2545F4914F6CDD1D)
_LOAD_SLICES: Final = 10


class SimScript(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the simulated engine does; the keys of ``--engine-args``. Steps count from 1.

    Attributes:
        vocab_size: Size of the vocabulary where no checkpoint gives one.
        num_blocks: Size of the pretended cache.
        max_model_len: Length that the pretended model supports.
        tokens_from: ``request``: tokens depend on (seed, request id, position). ``seed``: on (seed,
            position) alone, so that two requests with one seed get one answer.
        eos_probability: Chance of each token to be the end of the sequence.
        step_time_ms: How long a step takes.
        slow_step: Number of a step that takes ``slow_step_ms`` instead.
        slow_step_ms: See ``slow_step``.
        load_time_ms: How long loading takes, with progress.
        fail_on_load: Loading raises with this message.
        hang_on_load: Loading never ends; as a path, once, where there is such a file, which goes.
        exit_on_load: Loading ends the process with this exit code.
        fail_at_step: That step raises.
        hang_at_step: That step never ends.
        exit_at_step: That step ends the process with code 70.
        bad_token_at_step: That step samples an impossible token for its first row.
    """

    vocab_size: int = 49_152
    num_blocks: int = 8192
    max_model_len: int = 8192
    tokens_from: Literal["request", "seed"] = "request"
    eos_probability: float = 0.0
    step_time_ms: float = 0.0
    slow_step: int | None = None
    slow_step_ms: float = 0.0
    load_time_ms: float = 0.0
    fail_on_load: str | None = None
    hang_on_load: bool | str = False
    exit_on_load: int | None = None
    fail_at_step: int | None = None
    hang_at_step: int | None = None
    exit_at_step: int | None = None
    bad_token_at_step: int | None = None

    @classmethod
    def from_args(cls, engine_args: Mapping[str, Any]) -> SimScript:
        """Read ``EngineOptions.engine_args``.

        Raises:
            ConfigError: A key or a value's type is unknown.
        """
        try:
            return msgspec.convert(dict(engine_args), cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"engine_args of the simulated engine: {error}") from error


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64 bits. Source: SplitMix64, Steele, Lea, Flood 2014, OOPSLA, figure 17."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def sim_tokens(
    seeds: npt.ArrayLike,
    request_ids: npt.ArrayLike,
    positions: npt.ArrayLike,
    speakable: npt.NDArray[np.int32],
) -> npt.NDArray[np.int32]:
    """Return the simulated tokens, ``[num_rows]``, all of ``speakable``; arguments broadcast."""
    return _say(_hash(seeds, request_ids, positions), speakable)


def _say(hashes: npt.NDArray[np.uint64], speakable: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    tokens: npt.NDArray[np.int32] = speakable[hashes % np.uint64(len(speakable))]
    return tokens


def _hash(
    seeds: npt.ArrayLike, request_ids: npt.ArrayLike, positions: npt.ArrayLike
) -> npt.NDArray[np.uint64]:
    ids = np.atleast_1d(np.asarray(request_ids, np.uint64))
    places = np.atleast_1d(np.asarray(positions, np.uint64))
    return _mix(np.asarray(seeds, np.uint64) ^ (ids * _MIX_ID) ^ (places * _GOLDEN))


class SimModelRunner:
    """Fulfils ``ModelRunner``.

    Attributes:
        script: What it was told to do.
        speakable: int32, the ids that it says (beside a scripted end of the sequence).
    """

    def __init__(
        self,
        script: SimScript,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        speakable: Iterable[int] | None = None,
        block_size: int = 16,
        max_model_len: int | None = None,
    ) -> None:
        self.script = script
        self.model = ModelInfo(
            name="sim",
            runner="sim",
            simulated=True,
            max_model_len=min(script.max_model_len, max_model_len or script.max_model_len),
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
        )
        self.block_size = block_size
        self.num_blocks = script.num_blocks
        ids = range(vocab_size) if speakable is None else speakable
        self.speakable = np.array([i for i in ids if i not in eos_token_ids], np.int32)
        self._step = 0

    @classmethod
    def load(
        cls,
        options: EngineOptions,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        speakable: Iterable[int] | None,
        progress: Callable[[str, float], None],
    ) -> SimModelRunner:
        """Pretend to load, as the script in ``options.engine_args`` says.

        Raises:
            ConfigError: The script is not one.
            RuntimeError: The script says ``fail_on_load``.
        """
        script = SimScript.from_args(options.engine_args)
        _act_out_load(script, progress)
        return cls(
            script,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            speakable=speakable,
            block_size=options.block_size_tokens,
            max_model_len=options.max_model_len_tokens,
        )

    def execute(self, batch: StepBatch) -> StepResult:
        """Take the scripted time, commit the scripted fault, or return the hashed tokens."""
        self._step += 1
        self._act_out_step()
        rows = batch.sampling
        ids = rows.request_ids if self.script.tokens_from == "request" else np.uint64(0)
        hashes = _hash(rows.seeds, ids, rows.positions)
        tokens = _say(hashes, self.speakable)
        if self.script.eos_probability:
            self._end_some(tokens, hashes)
        first = (hashes % np.uint64(len(self.speakable))).astype(np.int64)
        self._edit(rows, first, tokens)
        if self._step == self.script.bad_token_at_step and len(tokens):
            tokens[0] = self.model.vocab_size
        if rows.targets is not None:
            tokens = np.where(rows.targets >= 0, rows.targets, tokens)
        if rows.logprobs_k is None:
            return StepResult(tokens)
        width = max(0, int(rows.logprobs_k.max(initial=0)))
        return StepResult(tokens, sim_logprobs(tokens, first, self.speakable, width))

    def _act_out_step(self) -> None:
        script, step = self.script, self._step
        if step == script.fail_at_step:
            raise RuntimeError(f"scripted failure of step {step}")
        if step == script.exit_at_step:
            os._exit(70)
        if step == script.hang_at_step:
            _hang()
        pause_ms = script.slow_step_ms if step == script.slow_step else script.step_time_ms
        if pause_ms:
            time.sleep(pause_ms / 1000)

    def _end_some(self, tokens: npt.NDArray[np.int32], hashes: npt.NDArray[np.uint64]) -> None:
        chance = _mix(hashes ^ _EOS_SALT) / np.float64(2**64)
        tokens[chance < self.script.eos_probability] = self.model.eos_token_ids[0]

    def _edit(
        self, rows: SamplingRows, first: npt.NDArray[np.int64], tokens: npt.NDArray[np.int32]
    ) -> None:
        """Put other tokens in place of those that masks, biases and penalties rule out."""
        if rows.allow is not None:
            rows.allow.wait()
        edited = edited_rows(rows)
        for row in edited:
            logits = sim_logits(
                int(tokens[row]), int(first[row]), self.speakable, self.model.vocab_size
            )
            tokens[row] = edit_row(logits, rows, row)
        masked: dict[int, set[int]] = {}
        for row, ids in rows.masked_token_ids:
            masked.setdefault(row, set()).update(ids)
        for row in masked.keys() - set(edited):
            tokens[row] = self._unmasked(int(tokens[row]), int(first[row]), masked[row])

    def _unmasked(self, token: int, index: int, masked: set[int]) -> int:
        """Say the next speakable word instead of a masked one."""
        for _ in range(len(self.speakable) + 1):
            if token not in masked:
                return token
            index += 1
            token = int(self.speakable[index % len(self.speakable)])
        return NO_TOKEN

    def call(self, method: str, args: dict[str, object]) -> object:
        """Raise ``KeyError``: it has no arithmetic to control."""
        raise KeyError(method)

    def close(self) -> None:
        """There is nothing to free."""


def _act_out_load(script: SimScript, progress: Callable[[str, float], None]) -> None:
    if script.fail_on_load is not None:
        raise RuntimeError(script.fail_on_load)
    if script.exit_on_load is not None:
        os._exit(script.exit_on_load)
    if _hangs(script.hang_on_load):
        progress("load", 0.0)
        _hang()
    for done in range(_LOAD_SLICES if script.load_time_ms else 0):
        progress("load", done / _LOAD_SLICES)
        time.sleep(script.load_time_ms / 1000 / _LOAD_SLICES)
    progress("load", 1.0)


def _hangs(when: bool | str) -> bool:
    if isinstance(when, bool):
        return when
    try:
        Path(when).unlink()
    except FileNotFoundError:
        return False
    return True


def _hang() -> None:
    threading.Event().wait()  # for ever, with the GIL released: as a stuck kernel would
