"""Puts the faults of a plan around what is written to clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from trioengine.http.transport import ClientStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.fault_plan import FaultPlan

__all__ = ["stream_maker"]


def stream_maker(plan: FaultPlan) -> Callable[..., ClientStream]:
    """Return what makes streams to which a write is refused, as if their client had gone."""
    triggers = plan.triggers("client")
    if not triggers:
        return ClientStream

    class FaultyStream(ClientStream):
        """Counts the writes of all clients together."""

        def _send_some(self, data: bytes | memoryview) -> int:
            for trigger in triggers:
                if trigger.is_due():
                    raise trio.BrokenResourceError(str(trigger.error()))
            return super()._send_some(data)

    def make(*args: Any, **options: Any) -> ClientStream:
        return FaultyStream(*args, **options)

    return make
