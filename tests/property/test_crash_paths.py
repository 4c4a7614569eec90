"""Whenever and however the engine dies, everybody is told why within 50 ms of its end."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import trio
from hypothesis import given
from hypothesis.strategies import booleans, builds, floats, lists, none, one_of, sampled_from
from trio.testing import MockClock, wait_all_tasks_blocked

from helpers.client_history import World, open_world
from helpers.client_invariants import (
    check_counts,
    check_ends,
    check_nothing_is_left,
    check_refusals,
    check_texts,
)
from helpers.client_operations import histories, operation
from helpers.stepped_engine import PHASES

if TYPE_CHECKING:
    from helpers.client_operations import Operation

SETTLE_S = 0.05  # the contract
KILLED = "the engine process was killed by SIGKILL"
FAILED = "RuntimeError: the step failed"


@dataclasses.dataclass(frozen=True)
class Death:
    """The engine dies between two turns, or at a phase boundary of the next one.

    With ``last_word`` a step raises and the engine says so; otherwise it is killed. Either way its
    process ends ``exit_after_s`` later.
    """

    phase: str | None
    last_word: bool
    exit_after_s: float


deaths = builds(Death, one_of(none(), sampled_from(PHASES)), booleans(), floats(0.0, 0.9))


@given(histories, deaths, lists(operation, max_size=10))
def test_any_history_with_a_death_ends_clean(
    before: list[Operation], death: Death, after: list[Operation]
) -> None:
    trio.run(run_history, before, death, after, clock=MockClock(autojump_threshold=0))


async def run_history(before: list[Operation], death: Death, after: list[Operation]) -> None:
    async with open_world() as world:
        for step in before:
            await world.apply(step)
        died_s = trio.current_time()
        die(world, death)
        await wait_all_tasks_blocked()
        for step in after:
            await world.apply(step)
        await finish(world, died_s + death.exit_after_s)
        check_end(world, death, died_s)


def die(world: World, death: Death) -> None:
    if death.phase is None and not death.last_word:
        world.engine.crash()
    else:
        world.engine.at(death.phase or "commands", fail if death.last_word else world.engine.crash)
        world.engine.turn()
    if not world.engine.dead:  # there was no such phase in an idle turn
        world.engine.crash()
    world.nursery.start_soon(report_exit, world, death.exit_after_s)


def fail() -> None:
    raise RuntimeError("the step failed")


async def report_exit(world: World, after_s: float) -> None:
    await trio.sleep(after_s)
    world.client.status.report_exit(KILLED)


async def finish(world: World, exit_s: float) -> None:
    """Let everybody read to the end, at the latest 50 ms after the process has ended."""
    with trio.fail_after(max(0.0, exit_s - trio.current_time()) + SETTLE_S + 1e-6):
        await world.client.status.wait_settled()
        for request in world.requests:
            request.hurry()
        for request in world.requests:
            await request.over.wait()
        await world.client.wait_idle()


def check_end(world: World, death: Death, died_s: float) -> None:
    status, engine = world.client.status, world.engine
    assert status.reason == (FAILED if status.traceback else KILLED)
    assert status.since_s <= died_s + death.exit_after_s
    check_texts(world)
    check_refusals(world)
    check_ends(world, death=True)
    check_counts(world, death=True)
    check_nothing_is_left(world)
    for request in world.requests:
        if not request.submit_was_lazy and request.over_s > died_s:
            assert request.over_s <= died_s + death.exit_after_s + SETTLE_S + 1e-6
        # What the engine had said before it died was delivered, unless nobody wanted it.
        if request.stream.aborted_s is None and not request.hung_up:
            ids = [sequence.request_id for sequence in request.stream.sequences]
            assert request.texts == [engine.said[request_id] for request_id in ids]
            ended = [finish is not None for finish in request.finishes]
            assert ended == [engine.terminals[request_id] == 1 for request_id in ids]
