"""Control calls (profile, prefix-cache reset, …) that wait for the engine's answer."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import trio

from trioengine.errors import InternalError, InvalidRequestError
from trioengine.protocol import Call

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.errors import TrioEngineError
    from trioengine.protocol import CallResult, ClientMessage

__all__ = ["ControlCalls"]


@dataclasses.dataclass(slots=True)
class _Pending:
    done: trio.Event = dataclasses.field(default_factory=trio.Event)
    result: Any = None
    error: TrioEngineError | None = None


class ControlCalls:
    """Matches results to calls by id; ids are never used twice."""

    def __init__(self, send: Callable[[ClientMessage], None]) -> None:
        """Send through ``send``, which neither waits nor raises."""
        self._send = send
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}

    def __len__(self) -> int:
        """Calls that wait."""
        return len(self._pending)

    async def call(self, method: str, args: dict[str, Any]) -> Any:
        """Run ``method`` in the engine and return its result.

        Raises:
            InvalidRequestError: The engine says that there is no such thing to do now.
            InternalError: The engine says that it failed.
            TrioEngineError: ``fail_all`` was called meanwhile.
        """
        call_id, call = next(self._ids), _Pending()
        self._pending[call_id] = call
        try:
            self._send(Call(call_id, method, args))
            await call.done.wait()
        finally:
            self._pending.pop(call_id, None)
        if call.error is not None:
            raise copy.copy(call.error)
        return call.result

    def answer(self, result: CallResult) -> None:
        """Wake the caller; one that did not wait for its result gets none."""
        call = self._pending.pop(result.call_id, None)
        if call is not None:
            call.result = result.result
            if result.error is not None:
                kind = InvalidRequestError if result.refused else InternalError
                call.error = kind(result.error)
            call.done.set()

    def fail_all(self, error: TrioEngineError) -> None:
        """Raise a copy of ``error`` in every caller."""
        pending, self._pending = self._pending, {}
        for call in pending.values():
            call.error = error
            call.done.set()
