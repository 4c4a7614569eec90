"""Drives one client's connection: reads, keeps its deadlines, notices its end, closes it.

Takes the place of Hypercorn's trio ``TCPServer`` under its ``H11Protocol``. Nothing is inherited:
every method there waits somewhere without a bound. What is done instead:

- One deadline instead of an idle task: what the client owes us now (``Phase``) says how long the
  reader waits for it. Idle connections close, half a head or half a body is answered 408.
- ``lost`` is the one place where a disconnect is known, whoever saw it: the reader (end of input),
  a sender (broken pipe, too slow), the watcher (an end behind unread bytes), the server (shutdown).
  It is synchronous: the owner of the request in flight is told before anything else runs.
- Closing lingers where the client may still be sending: a reset would take our answer with it.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, Literal

import trio
from hypercorn.events import Closed, RawData, Updated
from hypercorn.typing import ConnectionState

from trioengine.http.h1 import Http1Protocol, Phase
from trioengine.http.inbox import AppTasks
from trioengine.http.request_head import too_slow

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypercorn.config import Config
    from hypercorn.events import Event
    from hypercorn.typing import AppWrapper

    from trioengine.http.disconnects import DisconnectWatcher
    from trioengine.http.h1 import ServerContext
    from trioengine.http.transport import ClientStream

__all__ = ["CONNECTION", "ClientConnection", "LossReason", "connection_of"]

logger = logging.getLogger(__name__)

LossReason = Literal["client_disconnect", "slow_client", "shutdown"]
CONNECTION = "trioengine.connection"  # key of the ASGI scope's ``state``


class ClientConnection:
    """One client, from its handshake to its close. ``await connection.run()``.

    Attributes:
        stream: Its bytes.
        protocol: Its HTTP.
        loss: Why it is lost to the requests on it; ``None`` while it is not.
    """

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: ServerContext,
        watcher: DisconnectWatcher,
        stream: ClientStream,
    ) -> None:
        self.stream = stream
        self.loss: LossReason | None = None
        self._context = context
        self._watcher = watcher
        self._tell_owner: Callable[[LossReason], None] | None = None
        self._scope = trio.CancelScope()
        self._wait = trio.CancelScope()  # around the reader's present wait
        self._close_idle = False
        self._phase = Phase.IDLE
        self._phase_began_s = trio.current_time()
        self._lingers_until_s: float | None = None
        self._tasks = AppTasks()
        self.protocol = Http1Protocol(
            app,
            config,
            context,
            self._tasks,
            ConnectionState({CONNECTION: self}),
            stream.secure,
            stream.peer,
            stream.name,
            self._act,
        )
        stream.on_stalled = self._on_stalled

    def __repr__(self) -> str:
        return f"<ClientConnection {self.stream.peer or 'unix'} {self._phase.name}>"

    async def run(self) -> None:
        """Serve until either side ends it. Bounded after ``abort``."""
        try:
            with self._scope:
                await self._serve()
        finally:
            self.detach()
            await self.stream.aclose()

    async def _serve(self) -> None:
        if self.stream.secure and not await self._shake_hands():
            return
        # A server that closes idle connections meanwhile is heard by the first read.
        async with self._tasks:
            await self._read_data()

    async def _shake_hands(self) -> bool:
        try:
            with trio.fail_after(self._context.limits.handshake_s), self._wait:
                await self.stream.do_handshake()
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            return False
        return True

    # Reading -------------------------------------------------------------------------------------

    async def _read_data(self) -> None:
        while await self._read_once():
            pass
        self.lost("client_disconnect")  # if a request is in flight; else nobody hears it
        await self.protocol.handle(Closed())

    async def _read_once(self) -> bool:
        """Wait for input and take it; False at the end of the connection."""
        if self._close_idle:
            return False
        self._wait = trio.CancelScope()
        self._arm()
        try:
            with self._wait:
                data = await self.stream.receive_some()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        if self._wait.cancelled_caught:
            return await self._on_deadline()
        if not data:
            return False
        if self._lingers_until_s is None:
            await self.protocol.handle(RawData(data))
        return True

    async def _on_deadline(self) -> bool:
        if self._lingers_until_s is not None or self._phase is Phase.IDLE:
            return False
        await self.protocol.refuse(too_slow("head" if self._phase is Phase.HEAD else "body"))
        return True  # lingers now

    def _arm(self) -> None:
        phase = self.protocol.phase
        if phase is not self._phase:
            self._phase, self._phase_began_s = phase, trio.current_time()
        self._wait.deadline = self._deadline_s()

    def _deadline_s(self) -> float:
        limits, since_s = self._context.limits, self._phase_began_s
        if self._lingers_until_s is not None:
            return self._lingers_until_s
        if self._phase is Phase.IDLE:
            return since_s + limits.keep_alive_s
        if self._phase is Phase.HEAD:
            return since_s + limits.head_s
        if self._phase is Phase.BODY:
            earned_s = self.protocol.body_bytes / limits.body_min_rate
            return since_s + limits.body_grace_s + earned_s
        return math.inf

    # What the protocol wants done ----------------------------------------------------------------

    async def _act(self, event: Event) -> None:
        """Send bytes, close, or note that a request has begun or ended."""
        if isinstance(event, RawData):
            await self._send(event.data)
        elif isinstance(event, Closed):
            await self._finish()
        elif isinstance(event, Updated):
            self._arm()

    async def _send(self, data: bytes) -> None:
        try:
            await self.stream.send(data)
        except trio.BrokenResourceError:
            self.lost("client_disconnect")
            self.stream.close()
            await self.protocol.handle(Closed())

    async def _finish(self) -> None:
        if self.protocol.has_unread_input and self._lingers_until_s is None:
            self.stream.finish_sending()
            self._lingers_until_s = trio.current_time() + self._context.limits.linger_s
            self._arm()
        else:
            self.detach()
            await self.stream.aclose()
        await self.protocol.handle(Closed())

    # The request in flight -----------------------------------------------------------------------

    def attach(self, tell_owner: Callable[[LossReason], None]) -> None:
        """Call ``tell_owner`` once, synchronously, when this connection is lost.

        At once if it is already. Until ``detach``: from then on the answer is complete, and a
        client may go as it likes.
        """
        self._tell_owner = tell_owner
        if self.loss is not None:
            self.lost(self.loss)
        else:
            self._watcher.watch(self.stream.fileno(), self._on_peer_gone)

    def detach(self) -> None:
        """Forget the request in flight. Idempotent."""
        self._tell_owner = None
        self._watcher.unwatch(self.stream.fileno())

    def _on_peer_gone(self) -> None:
        self.lost("client_disconnect")

    def lost(self, reason: LossReason) -> None:
        """The client is gone: tell the owner of the request in flight, and close.

        Where no request is in flight nothing happens: what is left of the last answer may go out.
        """
        self.loss = self.loss or reason
        tell_owner = self._tell_owner
        if tell_owner is None:
            return
        self.detach()
        try:
            tell_owner(self.loss)
        except Exception:
            logger.exception("the owner of a lost request failed to clean up")
        self._hang_up()

    def _hang_up(self) -> None:
        # A client that went gets what the kernel still holds (it may have closed one half only);
        # for one that we throw out the kernel need not hold anything.
        if self.loss == "client_disconnect":
            self.stream.close()
        else:
            self.stream.reset()

    def _on_stalled(self) -> None:
        self.lost("slow_client")

    def close_if_idle(self, for_s: float = 0.0) -> None:
        """Close if, for so long, no request has been under way nor begun to arrive."""
        idle = self.protocol.phase is Phase.IDLE and self._lingers_until_s is None
        if idle and trio.current_time() >= self._phase_began_s + for_s:
            self._close_idle = True
            self._wait.cancel(reason="server closes idle connections")

    def abort(self, reason: LossReason) -> None:
        """End it now: the request in flight is lost, the client sees a reset."""
        self.lost(reason)
        self.detach()
        self.stream.reset()
        self._scope.cancel(reason=reason)


def connection_of(scope: Any) -> ClientConnection | None:
    """Return the connection that carries the ASGI request of ``scope``, if one of ours does."""
    connection = scope.get("state", {}).get(CONNECTION)
    return connection if isinstance(connection, ClientConnection) else None
