"""One Trio nursery over everything that a server is made of: one fate.

Theory of operation
-------------------
``serve`` binds HTTP first and serves 503 ``starting`` while the model is fetched and the engine
loads; the engine itself is started before that where the command line could. From then on there are
many sensors and one raiser for each way to end:

- *The engine dies for good.* A sensor marks the status; streams fail and ``/health`` is 503 at
  once. The deathwatch gives clients and probes ``death_grace_s`` to hear of it and then raises, and
  the nursery falls: ``EngineDeadError``, or at once ``EngineStartError`` if it was never ready.
  A death after which another engine is started is no end: that is the keeper's business.
- *Somebody asks us to stop.* ``Server.stop`` refuses new requests and returns; ``serve`` drains
  what runs within ``drain_timeout_s``, aborts the rest, sees the engine out and returns. The second
  signal cancels the nursery.
- *Something unexpected is raised.* The nursery falls with it.

Each of them arms the last resort first, so that an end is bounded whatever clients, libraries or
the kernel do. What the process leaves behind is closed synchronously when the nursery has ended.

Signals and HTTP are optional parts: the offline library runs the same supervisor in a thread.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from trioengine import log
from trioengine.api_keys import key_shares
from trioengine.bare_errors import bare_errors
from trioengine.client.engine_client import EngineClient
from trioengine.client.engine_status import EngineState
from trioengine.client.restart_budget import RestartBudget
from trioengine.errors import (
    ConfigError,
    EngineDeadError,
    EngineStartError,
    PeerGoneError,
    TrioEngineError,
    UnavailableError,
)
from trioengine.exit_codes import ExitCode, judge_end
from trioengine.metrics import watch_event_loop
from trioengine.process.engine_keeper import EngineKeeper
from trioengine.process.last_resort import LastResort
from trioengine.process.start import EngineStart, Launch, adopt_process, launch_process
from trioengine.progress_display import Narrator, show_progress, terminal_drawer
from trioengine.protocol import Shutdown

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trioengine.config import ServerConfig
    from trioengine.http.server import HttpServer
    from trioengine.models.source import ModelSource
    from trioengine.process.spawn import SpawnedEngine
    from trioengine.text.tokenizer import Tokenizer

__all__ = ["Server", "serve"]

STOP_MARGIN_S: Final = 4.5  # of the 5 s that a stop may take beyond the drain
TEARDOWN_S: Final = 3.0  # from the fall of the nursery to the end of the process
TOLD_S: Final = 1.0  # for aborted requests to tell their clients
CUT_S: Final = 0.3  # for connections that were cut to end
LEAVE_S: Final = 1.0  # for the engine to leave after Shutdown
AT_ONCE_S: Final = 1.0  # what "at once" may take, after a second signal

logger = logging.getLogger(__name__)


async def serve(
    config: ServerConfig,
    source: ModelSource,
    *,
    spawned: SpawnedEngine | None = None,
    launch: Launch = launch_process,
    with_http: bool = True,
    with_signals: bool = True,
    last_resort: LastResort | None = None,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until asked to stop.

    Args:
        config: Everything that the user chose.
        source: Where the model comes from.
        spawned: The engine, where it has been started already; ours from now on.
        launch: Starts an engine otherwise.
        with_http: Listen for clients.
        with_signals: SIGINT and SIGTERM ask us to stop; only possible in the main thread.
        last_resort: Armed at the beginning of each end.
        task_status: Started with the ``Server`` when it listens; it may not be ready yet.

    Raises:
        ConfigError: The port is taken, the model cannot be had, or the engine cannot be what its
            options say.
        EngineStartError: The engine did not start.
        EngineDeadError: The engine died.
    """
    client = EngineClient(
        max_queue_sequences=config.max_queue_sequences,
        max_queue_time_s=config.max_queue_time_s,
        key_shares=key_shares(config),
        restarts=RestartBudget(config.engine_restarts),
        replay=config.replay,
        wakes_on_request=config.wake_on_request,
    )
    engine = None if spawned is None else adopt_process(spawned)
    start = EngineStart(config, source, client, launch=launch, engine=engine)
    server = Server(config, client, start, last_resort or LastResort())
    signals = (
        trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM)
        if with_signals
        else contextlib.nullcontext()
    )
    try:
        with bare_errors(), contextlib.closing(server), signals as received:
            async with trio.open_nursery() as nursery:
                if received is not None:
                    nursery.start_soon(server.heed_signals, received, nursery.cancel_scope)
                await server.run(nursery, with_http=with_http, task_status=task_status)
                nursery.cancel_scope.cancel(reason="the server has stopped")
    except EngineStartError as error:
        raise server.death() or error from error.__cause__
    if (death := server.death()) is not None:
        raise death


class Server:
    """A running server: what its tasks share, and what the library holds.

    Attributes:
        config: As given.
        client: The engine.
        status: The engine's state.
        ready: Set when requests are welcome for the first time.
        binds: Where it listens, for people.
    """

    def __init__(
        self,
        config: ServerConfig,
        client: EngineClient,
        start: EngineStart,
        last_resort: LastResort,
    ) -> None:
        """Begin STARTING. Must be made within a Trio run."""
        self.config = config
        self.client = client
        self.status = self.client.status
        self.ready = trio.Event()
        self.binds: tuple[str, ...] = ()
        self._start = start
        self._keeper = EngineKeeper(config, client, start, self._note_ready)
        self._last_resort = last_resort
        self._decided = trio.Event()  # ready, or never to be
        self._stop_asked = trio.Event()
        self._http: HttpServer | None = None
        self._http_ended = trio.Event()
        self._narrator = Narrator(terminal_drawer(log.sink().show_status), clock=trio.current_time)
        self._started_s = trio.current_time()

    # For the library and the front end ------------------------------------------------------

    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer.

        Raises:
            UnavailableError: It is not loaded yet.
        """
        if self._start.tokenizer is None:
            raise self.status.refusal() or UnavailableError("starting", code="starting")
        return self._start.tokenizer

    def death(self) -> TrioEngineError | None:
        """Return what a dead engine makes the server end with; ``None`` where it is not dead."""
        if self.status.state is not EngineState.DEAD:
            return None
        if self.status.was_ready:
            return EngineDeadError(self.status.reason)
        kind = ConfigError if self.status.refused else EngineStartError
        return kind(self.status.reason)

    def stop(self) -> None:
        """Refuse new requests and begin to drain. Synchronous, idempotent."""
        if self._stop_asked.is_set():
            return
        self._stop_asked.set()
        code = None if self.status.dead.is_set() else ExitCode.ASKED
        self._last_resort.arm(self.config.drain_timeout_s + STOP_MARGIN_S, code=code)
        self._keeper.give_up_unless_serving()
        if self.status.state not in (EngineState.STOPPED, EngineState.DEAD):
            self.status.mark_draining()
        if self._http is not None:
            self._http.begin_drain()

    # For serve ------------------------------------------------------------------------------

    async def wait_ready(self) -> bool:
        """Wait until requests are welcome for the first time; False where they never will be."""
        await self._decided.wait()
        return self.ready.is_set()

    def close(self) -> None:
        """Leave nothing of the engine behind. Idempotent."""
        self._decided.set()
        if self._start.engine is not None:
            self._start.engine.close()

    async def run(
        self, nursery: trio.Nursery, *, with_http: bool, task_status: trio.TaskStatus[Server]
    ) -> None:
        """Start everything in ``nursery``; return when it has been asked to stop and has drained.

        Raises:
            ConfigError: It cannot listen.
        """
        self._last_resort.code = ExitCode.UNEXPECTED  # until somebody knows better
        nursery.start_soon(self._note_fall)
        nursery.start_soon(self._deathwatch)
        nursery.start_soon(watch_event_loop, self.client.metrics)
        if with_http:
            await nursery.start(self._serve_http)
        task_status.started(self)
        nursery.start_soon(show_progress, self.status, self._narrator)
        nursery.start_soon(self._keeper.run)
        await self._stop_asked.wait()
        await self._drain()

    async def heed_signals(self, received: AsyncIterator[int], scope: trio.CancelScope) -> None:
        """The first signal drains, the second cancels."""
        async for number in received:
            name = signal.Signals(number).name
            if self._stop_asked.is_set():
                logger.info("%s again: leaving at once", name)
                self._last_resort.arm(AT_ONCE_S)
                scope.cancel(reason=f"second signal, {name}")
                return
            logger.info("%s: finishing what runs within %g s", name, self.config.drain_timeout_s)
            self.stop()

    # The beginning --------------------------------------------------------------------------

    async def _serve_http(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        # Here, because the engine's own imports run beside these 0.4 s.
        from trioengine.http.app import create_app
        from trioengine.http.server import ServerHooks, serve_http

        app = create_app(self.client, self.tokenizer, self.config)
        hooks = ServerHooks(
            refused=self.client.metrics.requests_rejected.inc, turnstile=app.turnstile.refusal
        )
        try:
            async with trio.open_nursery() as nursery:
                http = await nursery.start(partial(serve_http, app, self.config, hooks=hooks))
                self.client.metrics.watch("open_connections", lambda: http.open_connections)
                self._http, self.binds = http, http.binds
                for bind in http.binds:
                    logger.info("listening on %s", bind)
                task_status.started()
        finally:
            self._http_ended.set()

    def _note_ready(self) -> None:
        """Requests are welcome for the first time."""
        self.ready.set()
        self._decided.set()
        model = self.client.model
        if model is not None:
            logger.info(
                "ready after %.1f s: %s on %s, up to %d tokens",
                trio.current_time() - self._started_s,
                *(model.name, model.runner, model.max_model_len),
            )

    # The end --------------------------------------------------------------------------------

    async def _deathwatch(self) -> None:
        """The one place that raises because the engine died; every sensor only marks the status."""
        await self.status.wait_settled()
        death = self.death() or EngineDeadError(self.status.reason)
        grace_s = self.config.death_grace_s if self.status.was_ready else 0.0
        code, _ = judge_end(death)
        self._last_resort.arm(grace_s + TEARDOWN_S, code=code, cause=death.message)
        logger.error("the engine is dead: %s", death.message)
        await trio.sleep(grace_s)
        raise death

    async def _note_fall(self) -> None:
        """When the nursery falls, whyever it does, see that the process follows."""
        try:
            await trio.sleep_forever()
        finally:
            self._last_resort.arm(TEARDOWN_S)

    async def _drain(self) -> None:
        """End what runs, in the order that costs the least, each step with its bound."""
        if not self.ready.is_set():
            return
        if self.status.dead.is_set():
            await self._tell_of_death()
            return
        # Without an engine nothing runs, and what waits for one waits in vain.
        with trio.move_on_after(0.0 if self._keeper.given_up else self.config.drain_timeout_s):
            await self._end_http()
        self.client.abort_all("shutdown")
        with trio.move_on_after(TOLD_S):
            await self._end_http()
        if self._http is not None:
            self._http.abort_connections()
            with trio.move_on_after(CUT_S):
                await self._http_ended.wait()
        await self._see_engine_out()

    async def _tell_of_death(self) -> None:
        """Asked to stop just when the engine has died: its requests are told of that first."""
        await self.status.wait_settled()
        with trio.move_on_after(TOLD_S):
            await self.client.wait_idle()
            if self._http is not None:
                self._http.begin_shutdown()
                await self._http_ended.wait()

    async def _end_http(self) -> None:
        """Wait until nothing runs, then until every client has its answer."""
        await self.client.wait_idle()
        if self.status.dead.is_set():
            await trio.sleep_forever()  # the deathwatch ends this; until then probes are answered
        if self._http is not None:
            self._http.begin_shutdown()
            await self._http_ended.wait()

    async def _see_engine_out(self) -> None:
        engine = self._start.engine
        if engine is None or self.status.dead.is_set():
            return
        self.status.mark_stopped()  # before it is asked, or its end would be taken for a death
        if self._keeper.given_up:
            return  # nobody watches it any more; ``close`` ends it
        with contextlib.suppress(PeerGoneError):
            engine.transport.send(Shutdown())
        await engine.stop(LEAVE_S)
