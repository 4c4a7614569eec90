"""What the tests of the engine's keeper wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
import trio.testing

from helpers.fake_engines import FakeEngine, World
from helpers.scripted_engine import delta
from trioengine.client.engine_status import EngineState
from trioengine.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.client.request_stream import RequestStream

__all__ = [
    "KILLED",
    "SETTLED_S",
    "STOP",
    "engines",
    "finish",
    "wait_launched",
    "wait_ready",
    "wait_until",
]


KILLED = "the engine process was killed by SIGKILL"
STOP = FinishReason.STOP
SETTLED_S = 0.06


def engines(number: int, **options: bool) -> list[FakeEngine]:
    return [FakeEngine(**options) for _ in range(number)]


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - virtual time costs nothing
        await trio.sleep(0.01)


async def wait_launched(world: World, number: int) -> FakeEngine:
    """Return the engine of that number once it has been launched."""
    await wait_until(lambda: len(world.launched) >= number)
    return world.launched[number - 1]


async def wait_ready(world: World, number: int) -> None:
    await wait_launched(world, number)
    await wait_until(lambda: world.server.status.state is EngineState.READY)


async def finish(world: World, stream: RequestStream, text: str = "all") -> str:
    """Let the present engine end the stream's only sequence; return what its client gets."""
    await trio.testing.wait_all_tasks_blocked()
    world.engine.scripted.say_outputs(delta(stream.sequences[0].request_id, text, STOP))
    return (await stream.receive())[0][1].text


# Stall --------------------------------------------------------------------------------------------
