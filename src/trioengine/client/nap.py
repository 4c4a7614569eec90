"""Whether the engine is wanted awake: asked by many, carried out by whoever keeps it.

Falling asleep takes as long as what runs; until it is done it can be called off, by an order to
wake up or, where requests may wake it, by a request.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import trio

from trioengine.client.engine_status import EngineState
from trioengine.errors import InvalidRequestError, TrioEngineError, UnavailableError

if TYPE_CHECKING:
    from trioengine.client.engine_status import EngineStatus

__all__ = ["Nap"]


class Nap:
    """Orders to sleep and to wake.

    Attributes:
        wanted: The engine is wanted awake.
        asleep: It has gone.
        patience_s: How long what runs may take to end before it sleeps.
    """

    def __init__(self, status: EngineStatus) -> None:
        """Begin awake."""
        self.wanted = True
        self.asleep = False
        self.patience_s = 0.0
        self._status = status
        self._changed = trio.Event()
        self._error: TrioEngineError | None = None

    # Orders ---------------------------------------------------------------------------------

    async def sleep(self, patience_s: float) -> None:
        """Put the engine to sleep once what runs has ended; return when it sleeps.

        Raises:
            InvalidRequestError: 409, something still runs, or it was called off.
            UnavailableError: There is no engine that could, or it has died meanwhile.
        """
        if self._status.state not in (EngineState.READY, EngineState.SLEEPING):
            state = self._status.state.value
            raise self._status.refusal() or UnavailableError(f"the engine is {state}", code=state)
        if self.wanted:
            self.wanted, self.patience_s, self._error = False, patience_s, None
            self.note_change()
        while not self.asleep:
            if self._error is not None:
                raise copy.copy(self._error)
            await self._changed.wait()

    async def wake_up(self) -> None:
        """Have the engine awake; return when it takes requests.

        Raises:
            InvalidRequestError: 409, it was called off by an order to sleep.
            UnavailableError: It cannot be, now.
        """
        self.want_awake()
        while self._status.state is EngineState.SLEEPING:
            await self._changed.wait()
            if not self.wanted:  # it may be awake for no more than an instant, or not at all
                raise _called_off("asleep")
        if (refusal := self._status.refusal()) is not None:
            raise refusal

    def want_awake(self) -> None:
        """Want the engine awake. Synchronous, idempotent."""
        if not self.wanted:
            self.call_off(_called_off("awake"))

    # For the keeper -------------------------------------------------------------------------

    async def wait_wanted(self, *, awake: bool) -> None:
        """Wait until the engine is wanted ``awake``, or not."""
        while self.wanted is not awake:
            await self._changed.wait()

    def call_off(self, error: TrioEngineError) -> None:
        """Want the engine awake; whoever waits for it to sleep gets ``error``."""
        self.wanted = True
        self.fail(error)

    def fail(self, error: TrioEngineError) -> None:
        """Raise ``error`` in whoever waits for the engine to sleep."""
        self._error = error
        self.note_change()

    def note_change(self) -> None:
        """Let everybody who waits look again."""
        changed, self._changed = self._changed, trio.Event()
        changed.set()


def _called_off(wanted: str) -> InvalidRequestError:
    return InvalidRequestError(f"the engine is wanted {wanted}", code="called_off", http_status=409)
