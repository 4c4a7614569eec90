"""What may happen to a whole server: the operations of which Hypothesis draws histories."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from hypothesis.strategies import (
    DrawFn,
    SearchStrategy,
    booleans,
    builds,
    composite,
    floats,
    integers,
    just,
    lists,
    none,
    one_of,
    sampled_from,
)

from helpers.stepped_engine import PHASES

if TYPE_CHECKING:
    from helpers.wired_engine import Spoil

__all__ = [
    "CHAT",
    "COMPLETION",
    "Cancel",
    "Die",
    "Flit",
    "Hold",
    "Leave",
    "Nudge",
    "Operation",
    "Order",
    "Pass",
    "Probe",
    "Read",
    "Release",
    "Setup",
    "SpoilFrame",
    "Stall",
    "Step",
    "Stop",
    "Submit",
    "histories",
    "setups",
]

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

Operation = Any  # one of the below


@dataclasses.dataclass(frozen=True)
class Setup:
    """How the server was started.

    Attributes:
        restarts: ``--engine-restarts``.
        replay: ``--replay``.
        wakes: ``--wake-on-request``.
        start_s: How long each engine but the first takes to be ready.
        leave_s: How long each takes to hear that it is to leave.
        places: ``--max-queue``.
    """

    restarts: int = 0
    replay: bool = False
    wakes: bool = False
    start_s: float = 0.0
    leave_s: float = 0.0
    places: int = 12


@dataclasses.dataclass(frozen=True)
class Submit:
    """A client asks for something.

    Attributes:
        path: Which endpoint.
        stream: As in the body.
        num_choices: ``n``.
        prompt_size: Length of the prompt; prompts begin alike.
        max_tokens: As in the body.
        priority: As in the body.
        timeout_s: ``timeout`` of the body.
        lazy: It reads only when it is told to.
        late_body: The second half of the body is sent only when it is told to.
        keep: Over the connection of an earlier client whose answer is whole, if there is one.
    """

    path: str
    stream: bool
    num_choices: int
    prompt_size: int
    max_tokens: int
    priority: int
    timeout_s: float | None
    lazy: bool
    late_body: bool
    keep: bool


@dataclasses.dataclass(frozen=True)
class Leave:
    """A client goes, or sends nothing more.

    What that makes the server send reaches the engine at the end of ``phase`` of a step, if set.
    """

    victim: int
    half: bool
    phase: str | None


@dataclasses.dataclass(frozen=True)
class Flit:
    """A client asks and goes at once; both reach the engine at the end of ``phase`` of a step."""

    submit: Submit
    phase: str


@dataclasses.dataclass(frozen=True)
class Read:
    """A lazy client reads a little."""

    reader: int
    most: int


@dataclasses.dataclass(frozen=True)
class Nudge:
    """A client sends the rest of its body, or, where it has, a second request behind the first."""

    sender: int


@dataclasses.dataclass(frozen=True)
class Cancel:
    """Somebody cancels a stream by its id, over another connection."""

    victim: int


@dataclasses.dataclass(frozen=True)
class Probe:
    """A probe or a scrape."""

    path: str


@dataclasses.dataclass(frozen=True)
class Order:
    """An operator puts the engine to sleep, or wakes it up.

    Attributes:
        sleep: To sleep.
        patience_s: ``timeout`` of that: how long what runs may take to end.
    """

    sleep: bool
    patience_s: float


@dataclasses.dataclass(frozen=True)
class Step:
    """The engine runs some turns, the server runs after each."""

    turns: int


@dataclasses.dataclass(frozen=True)
class Pass:
    """Time passes."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class Hold:
    """Frames of one direction, or both, stay on their way until ``Release``, a death or the end."""

    to_engine: bool
    to_client: bool


@dataclasses.dataclass(frozen=True)
class Release:
    """Everything arrives: now, or at the end of ``phase`` of a step."""

    phase: str | None


@dataclasses.dataclass(frozen=True)
class Stall:
    """The heartbeat page says that a step does not end; or that it has."""

    on: bool


@dataclasses.dataclass(frozen=True)
class Die:
    """The engine dies: killed, or with a last word because a step raises."""

    phase: str | None
    last_word: bool
    exit_delay_s: float


@dataclasses.dataclass(frozen=True)
class SpoilFrame:
    """The wire drops, doubles, swaps or corrupts the next frame of one direction."""

    to_engine: bool
    how: Spoil


@dataclasses.dataclass(frozen=True)
class Stop:
    """The server is asked to stop; a second time, it is to leave at once."""


MOST_CHOICES: Final = 4  # also the fewest places: fewer would refuse some requests for ever

_submits = builds(
    Submit,
    path=sampled_from([COMPLETION, CHAT]),
    stream=booleans(),
    num_choices=sampled_from([1, 1, 2, MOST_CHOICES, MOST_CHOICES]),
    prompt_size=integers(1, 40),
    max_tokens=sampled_from([1, 2, 5, 20, 40]),
    priority=sampled_from([0, 0, -1, 1]),
    timeout_s=one_of(none(), none(), floats(0.5, 4.0)),
    lazy=sampled_from([False, False, True]),
    late_body=sampled_from([False, False, False, True]),
    keep=booleans(),
)
_who = integers(0, 5)
_phases = one_of(none(), sampled_from(PHASES))

# How often each is drawn. (``one_of`` would take a strategy that is given twice for one.)
_WEIGHTS: Final[dict[SearchStrategy[Operation], int]] = {
    _submits: 24,
    builds(Leave, _who, booleans(), _phases): 8,
    builds(Leave, _who, booleans(), sampled_from(PHASES)): 6,
    builds(Flit, _submits, sampled_from(PHASES)): 5,
    builds(Read, _who, sampled_from([1, 300, 5000])): 4,
    builds(Nudge, _who): 4,
    builds(Cancel, _who): 6,
    builds(Probe, sampled_from(["/health", "/health/live", "/health/ready", "/metrics"])): 3,
    builds(Order, booleans(), sampled_from([0.0, 0.5, 2.0])): 9,
    builds(Step, integers(1, 3)): 12,
    builds(Step, integers(1, 12)): 8,
    builds(Pass, floats(0.0, 3.0)): 6,
    builds(Hold, booleans(), booleans()): 4,
    builds(Release, _phases): 4,
    builds(Stall, booleans()): 2,
    builds(Die, _phases, booleans(), floats(0.0, 0.1)): 2,
    builds(SpoilFrame, booleans(), sampled_from(["drop", "duplicate", "swap", "corrupt"])): 2,
    just(Stop()): 3,
}
_lots = sampled_from([index for index, times in enumerate(_WEIGHTS.values()) for _ in range(times)])
_kinds = list(_WEIGHTS)


@composite
def _operations(draw: DrawFn) -> Operation:
    return draw(_kinds[draw(_lots)])


setups = builds(
    Setup,
    restarts=sampled_from([0, 0, 1, 2]),
    replay=booleans(),
    wakes=booleans(),
    start_s=sampled_from([0.0, 0.4]),
    leave_s=sampled_from([0.0, 0.2]),
    places=sampled_from([12, 12, 12, MOST_CHOICES]),
)
histories = lists(_operations(), min_size=3, max_size=25)
