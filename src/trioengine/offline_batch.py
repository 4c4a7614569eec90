"""One offline batch in the supervisor's thread: one stream, all its sequences, whole results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import trio

from trioengine.errors import CancelledByUserError
from trioengine.outputs import RequestOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.client.engine_client import EngineClient, SequenceRequest

__all__ = ["Completion", "OfflineBatch", "Tick"]

Tick: TypeAlias = "Callable[[], object]"


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sequence.

    Attributes:
        text: Without the stop string.
        token_ids: A stop token or end-of-sequence token is included.
        finish_reason: ``stop`` or ``length``.
        stop_reason: The stop string or stop token that ended it, if one did.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None


class OfflineBatch:
    """Runs once."""

    def __init__(self, client: EngineClient, sequences: list[SequenceRequest], tick: Tick) -> None:
        """Run ``sequences`` on ``client``; ``tick`` is called when one has finished."""
        self._client = client
        self._sequences = sequences
        self._tick = tick
        self._scope = trio.CancelScope()

    async def run(self) -> list[Completion]:
        """Return the completions in the order of the sequences.

        Raises:
            CancelledByUserError: ``cancel`` was called; the engine has confirmed the aborts.
            TrioEngineError: As of ``RequestStream.receive``.
        """
        outputs = [RequestOutput(0) for _ in self._sequences]
        with self._client.admission.reserve() as slot:
            stream = self._client.open_stream(self._sequences, slot=slot)
            with stream, self._scope:
                while not stream.finished:
                    for index, delta in await stream.receive():
                        outputs[index].merge(delta)
                        if delta.finish_reason is not None:
                            self._tick()
            await stream.ended.wait()
        if self._scope.cancelled_caught:
            raise CancelledByUserError("the batch was cancelled")
        return [_completion(output) for output in outputs]

    def cancel(self) -> None:
        """End it now."""
        self._scope.cancel(reason="the batch was cancelled")


def _completion(output: RequestOutput) -> Completion:
    reason = "" if output.finish_reason is None else output.finish_reason.value
    return Completion(output.text, output.token_ids, reason, output.stop_reason)
