"""A whole server in memory, but for sockets and processes: app, client, stepped engine, tokenizer.

``world.engine`` moves when the test says so (``turn``, ``run_until_idle``) or by itself, one step
every 10 ms of mock time (``open_world(running=True)``). After each test's block nothing may be
left: no sequence in the engine, no place taken, every block free.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio
import trio.testing

from helpers.asgi_client import AsgiClient
from helpers.sim_core import VOCAB_SIZE
from helpers.stepped_engine import SteppedEngine
from trioengine.client.engine_client import EngineClient
from trioengine.client.restart_budget import RestartBudget
from trioengine.config import ServerConfig
from trioengine.errors import PeerGoneError
from trioengine.http.app import create_app
from trioengine.http.offload import InlineOffload
from trioengine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from helpers.asgi_client import Call
    from trioengine.engine_proc.sim_runner import SimScript
    from trioengine.http.offload import Offload

__all__ = ["CHAT", "COMPLETION", "PATHS", "TOKENIZER", "World", "body_for", "open_world"]

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PATHS = (COMPLETION, CHAT)
TOKENIZER = Tokenizer.simulated(VOCAB_SIZE)


def body_for(path: str, text: str = "hello", **fields: Any) -> dict[str, Any]:
    """Return a body that asks ``path`` to go on from ``text``."""
    if path == COMPLETION:
        return {"prompt": text, **fields}
    return {"messages": [{"role": "user", "content": text}], **fields}


class World:
    """What a test can look at and push.

    Attributes:
        api: Makes calls.
        client: The real engine client.
        engine: The real loop and core over the simulated runner.
    """

    def __init__(
        self, config: ServerConfig, engine: SteppedEngine, offload: Offload, nursery: trio.Nursery
    ) -> None:
        self.client = EngineClient(
            max_queue_sequences=config.max_queue_sequences,
            max_queue_time_s=config.max_queue_time_s,
            restarts=RestartBudget(config.engine_restarts),
            replay=config.replay,
            wakes_on_request=config.wake_on_request,
        )
        self.engine = engine
        self.app = create_app(self.client, lambda: TOKENIZER, config, offload=offload)
        self.api = AsgiClient(self.app)
        self.num_blocks = engine.free_blocks
        self._nursery = nursery

    def start(self, method: str, path: str, body: object = None, **kwargs: Any) -> Call:
        """Start a call in the background and return it."""
        call = self.api.call(method, path, body, **kwargs)
        self._nursery.start_soon(call.run)
        return call

    async def settle(self) -> None:
        """Let everything happen that can without the engine taking a turn."""
        await trio.testing.wait_all_tasks_blocked()

    async def turn(self, times: int = 1) -> None:
        """Let the engine take a turn, and everything happen that follows from it."""
        await self.settle()
        for _ in range(times):
            self.engine.turn()
            await self.settle()

    async def replace_engine(self, engine: SteppedEngine) -> None:
        """Put another engine in the place of one that died and may be followed."""
        await self.client.status.death.wait_settled()
        await self.settle()
        self.client.status.begin_again()
        self.engine = engine
        await self._nursery.start(_run_incarnation, self)
        self.client.status.mark_ready()

    async def run_until_idle(self) -> None:
        """Turn until nothing is left to do."""
        await self.settle()
        while self.engine.has_something_to_do():
            await self.turn()

    def counted(self, counter: str, *labels: str) -> float:
        """Return a labelled counter's value."""
        values: dict[tuple[str, ...], float] = getattr(self.client.metrics, counter).values
        return values.get(labels, 0.0)

    async def check_nothing_is_left(self) -> None:
        """Raise unless every request is gone without a trace."""
        await self.run_until_idle()
        assert self.client.admission.in_use == 0
        if not self.engine.dead:
            assert self.engine.live == frozenset()
            assert self.engine.free_blocks == self.num_blocks


@asynccontextmanager
async def open_world(
    *,
    running: bool = False,
    ready: bool = True,
    script: SimScript | None = None,
    max_num_seqs: int = 8,
    engine: SteppedEngine | None = None,
    offload: Offload | None = None,
    **config: Any,
) -> AsyncIterator[World]:
    """Open a world whose engine is ready.

    Args:
        running: The engine takes its turns by itself, every 10 ms of (mock) time.
        ready: ``False`` leaves it STARTING.
        script: What the simulated model does.
        max_num_seqs: Of the engine.
        engine: The engine itself, instead of the three above.
        offload: Where text is worked on; at once by default.
        config: Fields of ``ServerConfig``.
    """
    engine = engine or SteppedEngine(
        script,
        starting=not ready,
        max_num_seqs=max_num_seqs,
        send_error=lambda: PeerGoneError("the engine is gone"),
    )
    async with trio.open_nursery() as nursery:
        world = World(ServerConfig(**config), engine, offload or InlineOffload(), nursery)
        if ready:
            await nursery.start(_run_incarnation, world)
            world.client.status.mark_ready()
        else:
            nursery.start_soon(_run_incarnation, world)
        if running:
            await nursery.start(engine.run_freely)
        yield world
        await world.check_nothing_is_left()
        world.client.status.mark_stopped()
        nursery.cancel_scope.cancel(reason="the test has ended")


async def _run_incarnation(
    world: World, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED
) -> None:
    await world.client.run_incarnation(world.engine, task_status=task_status)
