"""What tests of the client over the real core in memory have in common."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from helpers.stepped_engine import SteppedEngine
from trioengine.errors import PeerGoneError
from trioengine.outputs import FinishReason

if TYPE_CHECKING:
    from trioengine.client.request_stream import RequestStream
    from trioengine.engine_proc.sim_runner import SimScript
    from trioengine.errors import TrioEngineError

PATIENCE_S = 1000.0  # of mock time: who would wait for ever fails instead

__all__ = ["engine_runs", "fails_with", "read_all", "stepped"]


def stepped(script: SimScript | None = None, *, max_num_seqs: int = 8) -> SteppedEngine:
    """Return a stepped engine whose death the client understands."""
    return SteppedEngine(
        script, send_error=partial(PeerGoneError, "gone"), max_num_seqs=max_num_seqs
    )


async def read_all(stream: RequestStream) -> list[int]:
    """Return the number of tokens of each sequence, having checked that all ended by length."""
    counts = [0] * len(stream.sequences)
    with trio.fail_after(PATIENCE_S):
        while not stream.finished:
            for index, output in await stream.receive():
                counts[index] += len(output.token_ids)
                assert output.finish_reason in (None, FinishReason.LENGTH)
    return counts


async def fails_with(stream: RequestStream, kind: type[TrioEngineError]) -> TrioEngineError:
    """Return the error that ends the stream, which must be of exactly this kind."""
    with pytest.raises(kind) as caught:
        await read_all(stream)
    assert type(caught.value) is kind
    return caught.value


async def engine_runs(engine: SteppedEngine) -> None:
    """Let both sides work until neither has anything to do."""
    while True:
        await wait_all_tasks_blocked()
        if not engine.has_something_to_do():
            return
        engine.turn()
