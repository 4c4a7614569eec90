"""Two keys over HTTP: a key that asks for much does not make another wait behind all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helpers.api_world import COMPLETION, open_world

if TYPE_CHECKING:
    from trio.testing import MockClock

    from helpers.asgi_client import Call

GREEDY, MODEST = "sk-greedy", "sk-modest"
NUM_GREEDY = 30


async def test_the_modest_key_is_served_in_turn(autojump_clock: MockClock) -> None:
    order: list[str] = []
    async with open_world(max_num_seqs=1, api_keys=(GREEDY, MODEST)) as world:

        def ask(key: str, prompt: str) -> None:
            body = {"prompt": prompt, "max_tokens": 3, "ignore_eos": True}
            headers = {"Authorization": f"Bearer {key}"}
            calls.append((key, world.start("POST", COMPLETION, body, headers=headers)))

        calls: list[tuple[str, Call]] = []
        for number in range(NUM_GREEDY):
            ask(GREEDY, f"greedy {number}")
        await world.settle()
        for number in range(3):
            ask(MODEST, f"modest {number}")
        await world.settle()
        waiting = dict(enumerate(calls))
        while waiting:
            await world.turn()
            done = [index for index, (_, call) in waiting.items() if call.body]
            order += [waiting.pop(index)[0] for index in done]
    places = [place for place, key in enumerate(order) if key == MODEST]
    assert len(order) == NUM_GREEDY + 3
    assert places[-1] <= 8, order  # two were with the engine already; then they take turns
