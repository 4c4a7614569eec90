from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from helpers.api_world import CHAT, World, body_for, open_world
from trioengine import __version__

if TYPE_CHECKING:
    from trio.testing import MockClock

PATHS = ("/health/live", "/health/ready", "/health")


async def statuses(world: World) -> tuple[int, ...]:
    return tuple([(await world.api.get(path)).status for path in PATHS])


async def test_ready(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        await trio.sleep(5)
        assert await statuses(world) == (200, 200, 200)
        call = await world.api.get("/health")
        assert call.json == {"status": "ready", "reason": "", "since_s": 5.0}


async def test_starting_tells_phase_and_progress(autojump_clock: MockClock) -> None:
    async with open_world(ready=False) as world:
        assert await statuses(world) == (200, 503, 503)
        world.engine.report_progress("load", 0.25)
        await world.settle()
        call = await world.api.get("/health/ready")
        assert call.json["status"] == "starting"
        assert (call.json["phase"], call.json["progress"]) == ("load", 0.25)
        world.engine.become_ready()
        await world.settle()
        world.client.status.mark_ready()
        assert await statuses(world) == (200, 200, 200)


async def test_a_full_queue_is_not_ready_but_healthy(autojump_clock: MockClock) -> None:
    async with open_world(max_queue_sequences=1) as world:
        call = world.start("POST", CHAT, body_for(CHAT))
        await world.settle()
        assert await statuses(world) == (200, 503, 200)
        assert (await world.api.get("/health/ready")).json["status"] == "full"
        call.disconnect()
        await world.run_until_idle()
        assert await statuses(world) == (200, 200, 200)


async def test_stalled_is_neither_live_nor_ready_until_it_moves(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        world.client.status.mark_stalled("no beat for 5 s")
        assert await statuses(world) == (503, 503, 503)
        body = (await world.api.get("/health")).json
        assert (body["status"], body["reason"]) == ("stalled", "no beat for 5 s")
        world.client.status.mark_recovered()
        assert await statuses(world) == (200, 200, 200)


async def test_draining_is_live(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        world.client.status.mark_draining()
        assert await statuses(world) == (200, 503, 503)
        assert (await world.api.get("/health")).json["status"] == "draining"


async def test_a_stall_is_told_beside_what_it_delays(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        world.client.status.mark_stalled("no beat for 5 s")
        world.client.status.mark_draining()
        assert await statuses(world) == (503, 503, 503)
        body = (await world.api.get("/health")).json
        assert body["status"] == "draining"
        assert body["reason"] == (
            "the server is shutting down; the engine is stalled: no beat for 5 s"
        )
        world.client.status.mark_recovered()
        assert await statuses(world) == (200, 503, 503)


async def test_a_death_that_has_just_been_seen_is_told_with_its_cause(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world, trio.open_nursery() as nursery:

        async def learn() -> None:
            await trio.sleep(0.01)
            world.client.status.report_exit("killed by SIGKILL")

        world.client.status.report_peer_gone()
        nursery.start_soon(learn)
        call = await world.api.get("/health")
        assert (call.status, call.json["reason"]) == (503, "killed by SIGKILL")


async def test_health_does_not_wait_for_a_process_that_takes_its_time(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        world.client.status.report_peer_gone()
        began_s = trio.current_time()
        call = await world.api.get("/health")
        assert (call.status, call.json["status"]) == (503, "dead")
        assert trio.current_time() - began_s <= 0.05 + 1e-6


async def test_dead_says_why(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        world.engine.crash()
        world.client.status.report_exit("killed by SIGKILL")
        assert await statuses(world) == (503, 503, 503)
        body = (await world.api.get("/health")).json
        assert (body["status"], body["reason"]) == ("dead", "killed by SIGKILL")
        metrics = await world.api.get("/metrics")
        assert metrics.status == 200
        assert b'trioengine_engine_state{state="dead"} 1.0' in metrics.body


async def test_health_needs_no_place_and_no_engine(autojump_clock: MockClock) -> None:
    """The engine takes no turn and the queue is full: all of it answers at once."""
    async with open_world(max_queue_sequences=1) as world:
        blocker = world.start("POST", CHAT, body_for(CHAT))
        await world.settle()
        began_s = trio.current_time()
        for path in (*PATHS, "/metrics", "/version"):
            await world.api.get(path)
        assert trio.current_time() - began_s < 1.0
        blocker.disconnect()


async def test_metrics_are_what_prometheus_reads(autojump_clock: MockClock) -> None:
    async with open_world(running=True) as world:
        await world.api.post(CHAT, body_for(CHAT, max_tokens=3))
        call = await world.api.get("/metrics")
        assert call.headers["content-type"].startswith("text/plain")
        requests = 'trioengine_requests_total{endpoint="/v1/chat/completions",outcome="ok"} 1.0'
        assert requests in call.body.decode()


async def test_version(autojump_clock: MockClock) -> None:
    async with open_world(ready=False) as world:
        assert (await world.api.get("/version")).json == {"version": __version__}


@pytest.mark.parametrize("path", [*PATHS, "/version", "/metrics"])
async def test_head_is_answered_too(path: str, autojump_clock: MockClock) -> None:
    async with open_world() as world:
        assert (await world.api.call("HEAD", path).run()).status == 200
