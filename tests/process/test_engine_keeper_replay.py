"""What nobody has seen an answer to goes to the next engine too, once."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from helpers.fake_engines import FakeEngine, open_world
from helpers.keeper_steps import KILLED, SETTLED_S, STOP, engines, finish, wait_ready
from helpers.scripted_engine import delta, open_stream
from trioengine.errors import EngineDeadError, QueueTimeoutError


async def test_what_nobody_has_seen_an_answer_to_is_sent_once_more(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world(*engines(2), engine_restarts=1, replay=True) as world:
        unseen, untaken, seen, later = (open_stream(world.server.client) for _ in range(4))
        await trio.testing.wait_all_tasks_blocked()
        sent = world.engine.scripted.sent[:2]
        world.engine.scripted.say_outputs(delta(2, "lost"), delta(3, "a"))
        await trio.testing.wait_all_tasks_blocked()
        assert (await seen.receive())[0][1].text == "a"
        later.close()
        world.engine.die(KILLED)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await seen.receive()
        await wait_ready(world, 2)
        after = open_stream(world.server.client)
        await trio.testing.wait_all_tasks_blocked()
        assert world.engine.scripted.sent[:2] == sent  # the same, prompt and id and order
        assert world.engine.scripted.added == [1, 2, 5]
        assert await finish(world, untaken, "whole") == "whole"
        assert await finish(world, unseen) == "all"
        assert await finish(world, after) == "all"


async def test_a_poison_request_kills_twice_and_never_thrice(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world(*engines(5), engine_restarts=4, replay=True) as world:
        poison = open_stream(world.server.client)
        for number in (1, 2):
            await wait_ready(world, number)
            await trio.testing.wait_all_tasks_blocked()
            assert world.engine.scripted.added == [1]
            world.engine.die(KILLED)
        with pytest.raises(EngineDeadError):
            await poison.receive()
        await wait_ready(world, 3)
        await trio.sleep(10.0)
        assert world.engine.scripted.added == []
        assert len(world.launched) == 3


async def test_replayed_requests_go_before_those_that_wait(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world(*engines(2), engine_restarts=1, replay=True) as world:
        for _ in range(10):
            open_stream(world.server.client)
        await trio.testing.wait_all_tasks_blocked()
        assert world.engine.scripted.added == [1, 2, 3, 4, 5, 6, 7, 8]
        world.engine.die(KILLED)
        await wait_ready(world, 2)
        await trio.testing.wait_all_tasks_blocked()
        assert world.engine.scripted.added == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_the_time_in_the_queue_begins_anew_with_a_replay(
    autojump_clock: trio.testing.MockClock,
) -> None:
    crew = [FakeEngine(), FakeEngine(ready=False)]
    async with open_world(*crew, engine_restarts=1, replay=True, max_queue_time_s=5.0) as world:
        streams = [open_stream(world.server.client) for _ in range(9)]
        await trio.testing.wait_all_tasks_blocked()
        world.engine.scripted.say_outputs(delta(1, "a", STOP))  # the ninth gets its place
        await trio.sleep(4.0)
        world.engine.die(KILLED)
        await trio.sleep(SETTLED_S)
        began_s = trio.current_time()
        with pytest.raises(QueueTimeoutError):
            await streams[8].receive()
        assert trio.current_time() - began_s == pytest.approx(5.0, abs=0.1)


async def test_a_deadline_holds_through_a_restart(autojump_clock: trio.testing.MockClock) -> None:
    crew = [FakeEngine(), FakeEngine(ready=False)]
    async with open_world(*crew, engine_restarts=1, replay=True) as world:
        deadline_s = trio.current_time() + 0.3  # within the wait before the start
        stream = open_stream(world.server.client, deadline_s=deadline_s)
        await trio.testing.wait_all_tasks_blocked()
        world.engine.die(KILLED)
        await stream.ended.wait()
        assert trio.current_time() == pytest.approx(deadline_s)
        assert stream.error is not None
        assert stream.error.code == "deadline_exceeded"
