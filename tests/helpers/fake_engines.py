"""A whole server over engines in memory, in virtual time, and how it ended.

Engines are launched one after the other from a list: the first starts with the server, the next
where one has died and may be started again.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import trio

from helpers.scripted_engine import ScriptedEngine
from trioengine.config import ServerConfig
from trioengine.heartbeat import Heartbeat
from trioengine.models.source import ModelSource
from trioengine.process.last_resort import LastResort
from trioengine.supervisor import Server, serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from trioengine.client.engine_client import Transport
    from trioengine.process.incarnation import Engine
    from trioengine.text.tokenizer import Tokenizer

__all__ = ["DRAIN_S", "FOREVER_S", "GRACE_S", "Ending", "FakeEngine", "World", "open_world"]

GRACE_S = 2.0
DRAIN_S = 30.0
FOREVER_S = 500.0


class FakeEngine:
    """Fulfils ``Engine`` over a scripted transport.

    Attributes:
        obedient: It leaves when it reads ``Shutdown``; otherwise only force helps.
        stop_grace_s: What ``stop`` was given.
        closed: ``close`` was called.
        killed: ``kill`` was called.
    """

    name = "engine in memory"

    def __init__(self, *, ready: bool = True, obedient: bool = True) -> None:
        self.scripted = ScriptedEngine(ready=ready)
        self.transport: Transport = self.scripted
        self.obedient = obedient
        self.stop_grace_s: float | None = None
        self.closed = self.killed = False
        self.read_heartbeat: Callable[[], Heartbeat] = lambda: Heartbeat("idle", 0, 0.0, 1e12)
        self._ended = trio.Event()
        self._cause = ""

    def die(self, cause: str) -> None:
        """End, as the operating system would tell it."""
        self._cause = cause
        self.scripted.leave()
        self._ended.set()

    async def watch(self) -> str:
        await self._ended.wait()
        return self._cause

    def heartbeat(self) -> Heartbeat:
        return self.read_heartbeat()

    async def stop(self, grace_s: float) -> None:
        self.stop_grace_s = grace_s
        if not self.obedient:
            await trio.sleep(grace_s)
        self.die("exited")
        await trio.lowlevel.checkpoint()

    def kill(self) -> None:
        self.killed = True
        self.die("the engine process was killed by SIGKILL")

    def close(self) -> None:
        self.closed = True


class Ending(LastResort):
    """A last resort that only takes notes."""

    def __init__(self) -> None:
        super().__init__()
        self.armed: list[float] = []

    def arm(self, after_s: float, *, code: int | None = None, cause: str | None = None) -> None:
        super().arm(after_s, code=code, cause=cause)
        self.armed.append(after_s)


class World:
    """A server that runs, and how it ended.

    Attributes:
        server: The server.
        launched: Every engine so far.
        last_resort: What was due.
        error: What ``serve`` raised.
        ended: Set when it has returned.
        ended_s: How long it ran.
    """

    server: Server

    def __init__(self, *engines: FakeEngine) -> None:
        """Launch these, one after the other; where there are no more, launching fails."""
        self.engines = engines
        self.launched: list[FakeEngine] = []
        self.last_resort = Ending()
        self.error: BaseException | None = None
        self.ended = trio.Event()
        self.ended_s = 0.0

    @property
    def engine(self) -> FakeEngine:
        """The one that was launched last, or will be launched first."""
        return (self.launched or self.engines)[-1 if self.launched else 0]

    def launch(self, *_: object) -> Engine:
        """Start the next engine."""
        if len(self.launched) == len(self.engines):
            raise OSError("there are no more engines")
        self.launched.append(self.engines[len(self.launched)])
        return self.engine

    async def run(
        self,
        config: ServerConfig,
        *,
        with_signals: bool,
        source: ModelSource,
        task_status: trio.TaskStatus[Server],
    ) -> None:
        """Serve, and note how it ends."""
        began_s = trio.current_time()
        try:
            await serve(
                config,
                source,
                launch=self.launch,
                with_http=False,
                with_signals=with_signals,
                last_resort=self.last_resort,
                task_status=task_status,
            )
        except Exception as error:
            self.error = error
        self.ended_s = trio.current_time() - began_s
        self.ended.set()


@asynccontextmanager
async def open_world(
    *engines: FakeEngine,
    with_signals: bool = False,
    source: ModelSource | None = None,
    **options: Any,
) -> AsyncIterator[World]:
    """Run a server until the end of the block; its engine is ready unless it is told otherwise."""
    world = World(*(engines or (FakeEngine(),)))
    config = ServerConfig(death_grace_s=GRACE_S, drain_timeout_s=DRAIN_S, **options)
    source = source or ModelSource("sim", None, simulated=True)
    with trio.fail_after(FOREVER_S), mock.patch("trioengine.process.start._in_thread", _inline):
        async with trio.open_nursery() as nursery:
            run = partial(world.run, config, with_signals=with_signals, source=source)
            world.server = await nursery.start(run)
            if world.engines[0].scripted.is_ready:
                assert await world.server.wait_ready()
            yield world
            nursery.cancel_scope.cancel()
    assert all(engine.closed for engine in world.launched)


async def _inline(load: Callable[[], Tokenizer]) -> Tokenizer:
    """Load in this thread: virtual time would jump while another one works."""
    await trio.lowlevel.checkpoint()
    return load()
