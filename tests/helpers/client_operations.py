"""What can happen to a client of the engine: operations, and how Hypothesis draws them."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from hypothesis.strategies import (
    booleans,
    builds,
    floats,
    integers,
    just,
    lists,
    none,
    one_of,
    sampled_from,
)

from helpers.stepped_engine import PHASES

__all__ = [
    "Drain",
    "HangUp",
    "HangUpWithin",
    "Operation",
    "Pass",
    "Read",
    "Step",
    "Submit",
    "histories",
    "operation",
]


@dataclasses.dataclass(frozen=True)
class Submit:
    """A client asks for something; a lazy one reads only when it is told to."""

    num_sequences: int
    prompt_tokens: int
    max_tokens: int
    priority: int
    timeout_s: float | None
    lazy: bool


@dataclasses.dataclass(frozen=True)
class HangUp:
    """A client leaves, or is cut off: its owner closes the stream, or its task is cancelled."""

    victim: int
    how: Literal["client_disconnect", "slow_client", "cancel"]


@dataclasses.dataclass(frozen=True)
class HangUpWithin:
    """A client leaves at a phase boundary of the next step."""

    victim: int
    phase: str


@dataclasses.dataclass(frozen=True)
class Read:
    """A lazy client reads once."""

    reader: int


@dataclasses.dataclass(frozen=True)
class Pass:
    """Time passes."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class Step:
    """The engine runs some turns before anybody else gets to run."""

    turns: int


class Drain:
    """The server begins to drain; the second time it has no patience left."""

    def __repr__(self) -> str:
        return "Drain()"


Operation = Any  # one of the above, or one of a test's own

_submits = builds(
    Submit,
    integers(1, 4),
    integers(1, 30),
    one_of(integers(1, 3), integers(10, 60)),
    integers(-1, 1),
    one_of(none(), floats(0.5, 8.0)),
    booleans(),
)
operation = one_of(
    _submits,
    _submits,
    builds(HangUp, integers(0, 9), sampled_from(["client_disconnect", "slow_client", "cancel"])),
    builds(HangUpWithin, integers(0, 9), sampled_from(PHASES)),
    builds(Read, integers(0, 9)),
    builds(Pass, floats(0.0, 4.0)),
    builds(Step, integers(1, 4)),
    builds(Step, integers(1, 12)),
    just(Drain()),
)
histories = lists(operation, min_size=10, max_size=50)
