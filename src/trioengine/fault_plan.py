"""Faults on purpose, as data: what goes wrong, where, and when. For tests and drills only.

A plan is a TOML (or JSON) file, or the object in a test:

    [[fault]]
    at = "forward"     # where
    do = "raise"       # what
    step = 3           # when: step, request and message have to fit,
    nth = 1            # for the nth time

``PLACES`` says what can go wrong where. Each fault happens once in every incarnation of the engine.
Whoever builds a part asks for the plan once and puts a wrapper around the part where the plan names
it; without a plan there is none, and nothing is asked on the way of a token.

What a fault costs: one request's data (``detokenizer``, ``grammar``, ``tokenizer``, and a sampler
that spoils one row) costs that request a 500. Everything else is shared state, and fatal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "PLACES",
    "Fault",
    "FaultPlan",
    "FrameSpoiler",
    "InjectedError",
    "Trigger",
    "decode_plan",
]

Place = Literal[
    "load", "forward", "sampler", "abort", "grammar", "detokenizer",
    "commands", "schedule", "build", "execute", "poll aborts", "apply", "send",
    "to_engine", "to_server", "reader", "client", "tokenizer", "clock",
]  # fmt: skip
Action = Literal[
    "raise", "hang", "exit", "kill", "stop", "allocate", "spoil",
    "drop", "duplicate", "swap", "corrupt", "pause", "refuse", "jump",
]  # fmt: skip

_PROCESS: Final = frozenset({"raise", "hang", "exit", "kill", "stop", "allocate"})
_FRAMES: Final = frozenset({"drop", "duplicate", "swap", "corrupt"})
_RAISE: Final = frozenset({"raise"})
_NOT_MSGPACK: Final = b"\xc1"  # the one byte that msgpack never uses

PLACES: Final[dict[str, frozenset[str]]] = {
    # The engine, by step. A phase's fault happens when it ends.
    "load": _PROCESS,
    "forward": _PROCESS,
    "sampler": _PROCESS | {"spoil"},
    "abort": _PROCESS,
    **dict.fromkeys(
        ("commands", "schedule", "build", "execute", "poll aborts", "apply", "send"), _PROCESS
    ),
    # One request of the engine's.
    "grammar": _RAISE,
    "detokenizer": _RAISE,
    # The wire, by frame.
    "to_engine": _FRAMES,
    "to_server": _FRAMES,
    # The server.
    "reader": frozenset({"pause"}),
    "client": frozenset({"refuse"}),
    "tokenizer": _RAISE,
    "clock": frozenset({"jump"}),
}


class InjectedError(Exception):
    """What a fault raises that is to raise."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that goes wrong, once.

    Attributes:
        at: Where; a key of ``PLACES``.
        do: What; one of that place's.
        step: Only in this step of the engine; they count from 1.
        request: Only for the sequence with this number; they count from 1.
        message: Only a frame with this message: its tag in ``protocol.py``.
        nth: The how-many-eth time that all of that fits.
        seconds: Of a pause or a jump.
        code: Of an exit.
    """

    at: Place
    do: Action
    step: int | None = None
    request: int | None = None
    message: str | None = None
    nth: int = 1
    seconds: float = 0.0
    code: int = 70

    def __post_init__(self) -> None:
        if self.do not in PLACES[self.at]:
            raise ValueError(f"{self.at} cannot {self.do}; it can {', '.join(PLACES[self.at])}")
        if self.nth < 1 or self.seconds < 0.0:
            raise ValueError("nth counts from 1, and seconds are not negative")


class FaultPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that goes wrong."""

    fault: tuple[Fault, ...] = ()

    def triggers(self, *places: str) -> tuple[Trigger, ...]:
        """Return a fresh trigger for each fault at any of these places."""
        return tuple(Trigger(fault) for fault in self.fault if fault.at in places)


class Trigger:
    """Counts how often its fault's conditions were met, and says when it is to happen."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._left = fault.nth

    def __repr__(self) -> str:
        return f"<Trigger {self.fault.do} at {self.fault.at}>"

    def is_due(
        self, *, step: int | None = None, request: int | None = None, message: bytes | None = None
    ) -> bool:
        """Take note of one occasion; True where this is the one."""
        fault = self.fault
        if self._left == 0 or not (
            fault.step in (None, step)
            and fault.request in (None, request)
            and (fault.message is None or (message and fault.message.encode() in message[:24]))
        ):
            return False
        self._left -= 1
        return self._left == 0

    def error(self) -> InjectedError:
        """Return what it raises."""
        return InjectedError(f"injected fault: {self.fault.do} at {self.fault.at}")


class FrameSpoiler:
    """What becomes of each frame of one direction, before it is sent."""

    def __init__(self, triggers: Iterable[Trigger]) -> None:
        self._triggers = tuple(triggers)
        self._overtaken: list[bytes] = []

    def __call__(self, frame: bytes) -> list[bytes]:
        """Return what is sent now in place of ``frame``."""
        due = [trigger.fault.do for trigger in self._triggers if trigger.is_due(message=frame)]
        how = due[0] if due else None
        if how == "drop":
            return []
        if how == "swap":
            self._overtaken.append(frame)  # by the next one
            return []
        if how == "corrupt":
            frame = frame[:1] + _NOT_MSGPACK + frame[2:]
        overtaken, self._overtaken = self._overtaken, []
        return [frame] * (2 if how == "duplicate" else 1) + overtaken


def decode_plan(text: str, decode: Callable[[str], object]) -> FaultPlan:
    """Return the plan that ``text`` holds.

    Raises:
        ConfigError: It is none.
    """
    try:
        return msgspec.convert(decode(text), FaultPlan)
    except (ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"this is no fault plan: {error}") from error
