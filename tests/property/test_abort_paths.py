"""Whatever clients do to a living engine, every history ends clean."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from hypothesis import given
from trio.testing import MockClock

from helpers.client_history import open_world
from helpers.client_invariants import (
    check_counts,
    check_ends,
    check_engine,
    check_nothing_is_left,
    check_refusals,
    check_texts,
)
from helpers.client_operations import histories

if TYPE_CHECKING:
    from helpers.client_operations import Operation


@given(histories)
def test_any_history_without_a_death_ends_clean(history: list[Operation]) -> None:
    trio.run(run_history, history, clock=MockClock(autojump_threshold=0))


async def run_history(history: list[Operation]) -> None:
    async with open_world() as world:
        for operation in history:
            await world.apply(operation)
        await world.finish()
        check_texts(world)
        check_ends(world)
        check_refusals(world)
        check_nothing_is_left(world)
        check_engine(world)
        check_counts(world)
