"""A client that leaves costs the engine nothing more, whenever it leaves."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import trio

from helpers.answers import MODES
from helpers.api_world import CHAT, COMPLETION, PATHS, body_for, open_world
from helpers.stepped_engine import SteppedEngine
from trioengine.errors import PeerGoneError
from trioengine.protocol import Abort

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock


Result = TypeVar("Result")


# Clients leave ------------------------------------------------------------------------------------


PHASES = ["wire", "queued", "prefill", "decode"]


SHAPES: dict[str, dict[str, Any]] = {
    "one": {},
    "n": {"n": 3},
    "batch": {"prompt": ["hello", "world"]},
    "both": {"prompt": [[1] * 40, [2] * 40], "n": 2},
}


LEAVERS = [
    (path, phase, shape)
    for path, phase, shape in itertools.product(PATHS, PHASES, SHAPES)
    if path == COMPLETION or "prompt" not in SHAPES[shape]
]


@pytest.mark.parametrize("stream", MODES)
@pytest.mark.parametrize(("path", "phase", "shape"), LEAVERS)
async def test_a_client_that_leaves_is_aborted_at_once(
    path: str,
    phase: str,
    shape: str,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: MockClock,
) -> None:
    caplog.set_level("INFO", "trioengine.http.access_log")
    engine = SteppedEngine(
        max_num_seqs=2 if phase == "queued" else 8,
        max_num_batched_tokens=16,
        send_error=lambda: PeerGoneError("gone"),
    )
    async with open_world(engine=engine) as world:
        # Two run and two wait in the engine: as many as it holds.
        others = [
            world.start("POST", path, body_for(path, max_tokens=900))
            for _ in range(4 if phase == "queued" else 0)
        ]
        await world.settle()
        body = body_for(path, "hello " * 10, stream=stream, max_tokens=500) | SHAPES[shape]
        call = world.start("POST", path, body)
        await world.settle()
        await world.turn({"wire": 0, "queued": 1, "prefill": 1, "decode": 30}[phase])
        call.disconnect()
        await world.settle()
        assert call.finished.is_set()
        assert not call.complete
        aborts = [message for message in world.engine.sent if isinstance(message, Abort)]
        assert len(aborts) == (0 if phase == "queued" else 1)  # one frame, or never sent at all
        assert world.client.admission.in_use == len(others)
        await world.turn()
        assert len(world.engine.live) == len(others)
        assert world.counted("requests", path, "client_disconnect") == 1
        assert world.counted("requests_aborted", "client_disconnect") == 1
        assert "status=499 outcome=client_disconnect" in caplog.text
        for other in others:
            other.disconnect()


@pytest.mark.parametrize("stream", MODES)
async def test_a_client_that_leaves_after_its_answer_has_not_left(
    stream: bool, autojump_clock: MockClock
) -> None:
    async with open_world(running=True) as world:
        call = await world.api.post(CHAT, body_for(CHAT, max_tokens=2, stream=stream))
        assert call.complete
        assert world.counted("requests", CHAT, "ok") == 1
        assert world.counted("requests_aborted", "client_disconnect") == 0


async def test_a_client_that_leaves_while_it_sends_its_body_gives_its_place_back(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        call = world.api.open_call("POST", CHAT)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call.run)
            call.send_body(b'{"messages": [', more=True)
            await world.settle()
            assert world.client.admission.in_use == 1
            call.disconnect()
        assert world.client.admission.in_use == 0
        assert not world.engine.sent


class SlowOffload:
    """Work on text that cannot be interrupted, until the test says so."""

    def __init__(self) -> None:
        self.release = trio.Event()

    async def __call__(self, work: Callable[[], Result], *, num_chars: int) -> Result:
        with trio.CancelScope(shield=True):
            await self.release.wait()
        return work()


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_while_its_text_is_tokenised_costs_the_engine_nothing(
    path: str, autojump_clock: MockClock
) -> None:
    offload = SlowOffload()
    async with open_world(offload=offload) as world:
        call = world.start("POST", path, body_for(path))
        await world.settle()
        call.disconnect()
        await world.settle()
        assert world.client.admission.in_use == 0
        offload.release.set()
        await call.finished.wait()
        assert not world.engine.sent
        assert world.counted("requests", path, "client_disconnect") == 1
