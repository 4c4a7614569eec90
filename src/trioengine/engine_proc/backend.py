"""What the engine loop needs from an engine: six methods, all synchronous."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trioengine.outputs import RequestOutput
    from trioengine.protocol import Add, EngineLimits, EngineStats, ModelInfo

__all__ = ["LATER", "EngineBackend", "Later"]


class Later(enum.Enum):
    """What ``add_request`` says where it is not known yet whether the request can be served."""

    LATER = enum.auto()


LATER: Final = Later.LATER


class EngineBackend(Protocol):
    """Fulfilled by ``EngineCore`` over any runner, and by adapters over foreign engines."""

    model: ModelInfo
    limits: EngineLimits

    def add_request(self, add: Add) -> RequestOutput | Later | None:
        """Take a sequence into WAITING.

        Returns its terminal error where this one request cannot be served; never raises for
        anything that a request contains. ``LATER``: ``settle`` will say.
        """

    def settle(self) -> tuple[list[int], list[RequestOutput]]:
        """Return which of those added ``LATER`` are in WAITING now, and the errors of others."""

    def has_news(self) -> bool:
        """True where ``settle`` would return something."""

    def when_settled(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, from any thread, when there is news."""

    def abort(self, request_ids: Sequence[int]) -> list[RequestOutput]:
        """Free the blocks of these sequences now; return one ``abort`` terminal per live id.

        Unknown and finished ids are counted in ``stats().aborts_ignored`` and skipped.
        """

    def step(self, poll_aborts: Callable[[], Sequence[int]]) -> list[RequestOutput]:
        """Schedule, execute, sample, apply; return the deltas of this step.

        ``poll_aborts`` is called once between sampling and applying: ids it returns end with
        ``abort`` in this same step, even if the tokens just sampled would have finished them.
        """

    def has_work(self) -> bool:
        """True while a sequence waits or runs."""

    def stats(self) -> EngineStats:
        """Gauges and counters, cheap enough for every step."""

    def call(self, method: str, args: dict[str, object]) -> object:
        """Run a control method; whatever it raises becomes the call's error."""

    def shutdown(self) -> None:
        """Free everything."""
