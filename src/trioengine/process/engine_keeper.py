"""Keep an engine up: start it, watch it, and start it again as often as its deaths allow.

Theory of operation
-------------------
Each incarnation has a nursery of its own: the reader of its wire, the watch over its process, the
look at its heartbeat page. When it has died and the cause is settled, its process is seen to its
end, the nursery falls, and with it everything that could still speak of that incarnation; only then
may the next begin. What is told to clients, and which requests wait for the next, is the client's
business and has happened by then.

An engine that is put to sleep leaves in good order once what runs has ended; the next is started
when somebody wants it awake. So everything that it held is the operating system's again.

Whether there is a next is for the status to say (RESTARTING or DEAD). Nothing is raised because of
a death: that is the supervisor's.
"""

from __future__ import annotations

import contextlib
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from trioengine.bare_errors import bare_errors
from trioengine.client.engine_status import EngineState
from trioengine.errors import InvalidRequestError, PeerGoneError, TrioEngineError
from trioengine.process.heartbeat_watch import watch_heartbeat
from trioengine.protocol import Shutdown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trioengine.client.engine_client import EngineClient
    from trioengine.config import ServerConfig
    from trioengine.process.incarnation import Engine
    from trioengine.process.start import EngineStart

__all__ = ["EngineKeeper"]

_COMING: Final = (EngineState.STARTING, EngineState.RESTARTING, EngineState.SLEEPING)
_AWAY: Final = (EngineState.RESTARTING, EngineState.SLEEPING)
LEAVE_S: Final = 1.0  # for an engine to leave after Shutdown
AT_ONCE_S: Final = 0.05  # for a process that is dying anyway to end before it is made to

logger = logging.getLogger(__name__)


class EngineKeeper:
    """Runs one engine after the other.

    Attributes:
        given_up: No engine will be ready any more.
    """

    def __init__(
        self,
        config: ServerConfig,
        client: EngineClient,
        start: EngineStart,
        on_ready: Callable[[], None],
    ) -> None:
        """Keep what ``start`` brings up; ``on_ready`` is called when the first is ready."""
        self.given_up = False
        self._config = config
        self._client = client
        self._status = client.status
        self._start = start
        self._on_ready = on_ready
        self._scope = trio.CancelScope()
        client.metrics.watch("engine_step_age_seconds", self._step_age_s)

    def give_up_unless_serving(self) -> None:
        """Begin the end: start no engine, and wait for none that is not there. Synchronous."""
        self._client.nap.fail(_cannot("the server is shutting down"))
        status = self._status
        falling_asleep = status.state is EngineState.SLEEPING and self._client.has_engine
        if status.state not in _AWAY or falling_asleep:
            return
        self.given_up = True
        self._scope.cancel(reason="no engine is wanted any more")

    async def run(self) -> None:
        """Keep an engine up until it is dead for good.

        Raises:
            ConfigError: The first one cannot be what its options say.
            EngineStartError: The first one did not start.
        """
        with bare_errors(), self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._client.keep_time)
                await self._live(self._start_first)
                while self._status.state in _AWAY:
                    await self._wait_before_next()
                    await self._live(self._start_next)
                if self._status.dead.is_set():
                    self._client.fail_all(self._status.loss())
                nursery.cancel_scope.cancel(reason="the engine is dead for good")

    async def _live(self, begin: Callable[[trio.Nursery], Awaitable[None]]) -> None:
        """See one incarnation from its start to its end."""
        async with trio.open_nursery() as nursery:
            await begin(nursery)
            await self._wait_for_end()
            if self._status.state is EngineState.RESTARTING and self._start.engine is not None:
                await self._start.engine.stop(AT_ONCE_S)
            nursery.cancel_scope.cancel(reason="this engine is dead")
        if self._status.state in _AWAY:
            self._start.discard()
        self._client.nap.asleep = self._status.state is EngineState.SLEEPING
        self._client.nap.note_change()

    async def _start_first(self, nursery: trio.Nursery) -> None:
        if self._welcome(await self._start.bring_up(nursery), nursery):
            self._on_ready()

    async def _start_next(self, nursery: trio.Nursery) -> None:
        """Start another; where that fails, it is the death of that one."""
        if self._status.state is EngineState.RESTARTING:
            self._client.metrics.engine_restarts.inc()
        self._client.nap.asleep = False
        self._status.begin_again()
        began_s = trio.current_time()
        try:
            if self._welcome(await self._start.bring_up(nursery), nursery):
                logger.info("ready again after %.1f s", trio.current_time() - began_s)
        except (TrioEngineError, OSError) as error:
            self._status.mark_dead(f"the engine could not be started again: {error}")

    def _welcome(self, engine: Engine, nursery: trio.Nursery) -> bool:
        """Say that requests are welcome, and watch for stalls; False where they are not."""
        nursery.start_soon(
            partial(
                watch_heartbeat,
                engine.heartbeat,
                self._status,
                beat_timeout_s=self._config.beat_timeout_s,
                stall_timeout_s=self._config.stall_timeout_s,
                on_stall=partial(self._act_on_stall, engine),
            )
        )
        status = self._status
        if status.state not in _COMING or status.death.seen.is_set():
            return False
        status.mark_ready()
        self._client.nap.note_change()
        return True

    def _act_on_stall(self, engine: Engine, reason: str) -> None:
        """Do about a stalled engine what the user wants done."""
        wanted = self._config.on_stall
        logger.warning("the engine is stalled: %s", reason)
        if wanted != "report":
            self._status.mark_dead(f"the engine stalled: {reason}", final=wanted == "exit")
            engine.kill()

    def _step_age_s(self) -> float:
        """Age of the step that runs, 0 where none does."""
        engine = self._start.engine
        if engine is None or self._status.state is EngineState.DEAD:
            return 0.0
        beat = engine.heartbeat()
        return time.monotonic() - beat.step_started_s if beat.phase == "step" else 0.0

    # Sleep ----------------------------------------------------------------------------------

    async def _wait_for_end(self) -> None:
        """Wait until the engine is dead, or asleep."""
        nap = self._client.nap
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def sleep_when_asked() -> None:
                await self._put_to_sleep()
                nursery.cancel_scope.cancel(reason="the engine sleeps")

            await self._status.death.wait_settled()
            nursery.cancel_scope.cancel(reason="the engine is dead")
        if not nap.wanted and self._status.death.seen.is_set():
            nap.call_off(self._status.loss())

    async def _put_to_sleep(self) -> None:
        """Wait until the engine is to sleep and nothing runs, and see it out."""
        nap, engine = self._client.nap, self._start.engine
        while True:
            await nap.wait_wanted(awake=False)
            if self._status.state is not EngineState.READY:
                nap.call_off(_cannot("the engine is not ready"))
                continue
            self._status.mark_sleeping()
            if await self._falls_quiet():
                break
        logger.info("the engine goes to sleep")
        self._status.dismiss()
        if engine is not None:
            with contextlib.suppress(PeerGoneError):
                engine.transport.send(Shutdown())
            await engine.stop(LEAVE_S)

    async def _falls_quiet(self) -> bool:
        """Wait for what runs to end; False where it does not, or it was called off."""
        nap, status = self._client.nap, self._status
        idle = self._client.idle
        with trio.move_on_after(nap.patience_s):
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def watch_for_orders() -> None:
                    await nap.wait_wanted(awake=True)
                    nursery.cancel_scope.cancel(reason="it is wanted awake")

                await self._client.wait_idle()
                idle = True
                nursery.cancel_scope.cancel(reason="nothing runs")
        if idle and not nap.wanted and status.state is EngineState.SLEEPING:
            return True
        if not nap.wanted:
            nap.call_off(_cannot(f"requests still ran after {nap.patience_s:g} s"))
        if status.state is EngineState.SLEEPING and not status.death.seen.is_set():
            status.mark_ready()
        nap.note_change()
        return False

    async def _wait_before_next(self) -> None:
        if self._status.state is EngineState.SLEEPING:
            await self._client.nap.wait_wanted(awake=True)
            logger.info("the engine is woken up")
            return
        budget = self._status.restarts
        logger.error(
            "the engine died: %s; starting it again in %g s (death %d, the server ends with number "
            "%d within 10 minutes of service)",
            self._status.reason,
            budget.wait_s,
            budget.num_deaths,
            budget.limit + 1,
        )
        await trio.sleep(budget.wait_s)


def _cannot(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"it does not sleep: {why}", code="busy", http_status=409)
