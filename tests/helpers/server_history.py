"""A history of a whole server: from its drawing to the verdict on its end.

A history is a list of operations, drawn by Hypothesis and carried out one after the other in a Trio
run of its own under a mock clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from trio.testing import MockClock

from helpers.memory_server import in_memory
from helpers.server_invariants import check_end
from helpers.server_operations import Setup
from helpers.server_world import open_world

if TYPE_CHECKING:
    from helpers.server_operations import Operation

__all__ = ["run_history"]


def run_history(history: list[Operation], setup: Setup | None = None) -> None:
    """Carry a history out and check how it ends; raises ``AssertionError``."""
    with in_memory():
        trio.run(_run_history, setup or Setup(), history, clock=MockClock(autojump_threshold=0))


async def _run_history(setup: Setup, history: list[Operation]) -> None:
    async with open_world(setup) as world:
        for operation in history:
            await world.apply(operation)
        await world.finish()
    check_end(world)
