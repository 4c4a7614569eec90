"""Many requests at once over the real core in memory: all exact, nothing left behind."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from helpers.client_tools import read_all, stepped
from helpers.scripted_engine import ask, open_client, open_stream
from trioengine.client.engine_client import EngineClient, SequenceRequest
from trioengine.engine_proc.sim_runner import SimScript
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trio.testing import MockClock

    from trioengine.client.request_stream import RequestStream


# In company ---------------------------------------------------------------------------------


async def test_one_of_21_is_aborted_and_the_others_get_all_their_tokens(
    autojump_clock: MockClock,
) -> None:
    """vLLM's test_abort, which never asserted that the engine freed anything."""
    engine = stepped(SimScript(num_blocks=1024, max_model_len=1024))
    counts: list[list[int]] = []

    async def request(stream: RequestStream) -> None:
        counts.append(await read_all(stream))

    async with open_client(engine) as client, trio.open_nursery() as nursery:
        await nursery.start(engine.run_freely)
        streams = [open_stream(client, ask(1, max_tokens=250)) for _ in range(21)]
        async with trio.open_nursery() as requests:
            for stream in streams[:10] + streams[11:]:
                requests.start_soon(request, stream)
            await trio.sleep(0.5)
            victim = streams[10]
            victim.close("cancelled")
            with trio.fail_after(0.02):
                await victim.ended.wait()
            assert victim.sequences[0].request_id not in engine.live
        assert counts == [[250]] * 20
        await client.wait_idle()
        assert engine.free_blocks == 1024
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_10_000_concurrent_requests_of_10_tokens(autojump_clock: MockClock) -> None:
    """vLLM's test_load; the wire's part of it is in test_zmq_channel."""
    engine = stepped(SimScript(num_blocks=2048, max_model_len=64), max_num_seqs=256)
    done = 0

    async def request(client: EngineClient) -> None:
        nonlocal done
        sequences = ask(1, max_tokens=10)
        slot = client.admission.reserve()
        with slot, client.open_stream(sequences, slot=slot) as stream:
            assert await read_all(stream) == [10]
        done += 1

    async with (
        open_client(engine, max_queue_sequences=10_000) as client,
        trio.open_nursery() as nursery,
    ):
        async with trio.open_nursery() as requests:
            for _ in range(10_000):
                requests.start_soon(request, client)
            await wait_all_tasks_blocked()
            assert client.admission.full
            assert client._table.num_sent == 512
            await nursery.start(engine.run_freely)
        assert done == 10_000
        assert client.metrics.generation_tokens.value == 100_000
        assert client.metrics.time_to_first_token.count == 10_000
        assert (client.admission.in_use, len(client._table)) == (0, 0)
        nursery.cancel_scope.cancel()


async def test_500_opens_cancelled_at_random_points_leave_nothing(
    autojump_clock: MockClock,
) -> None:
    """There is no point between register and send at which a cancel could strike."""
    engine = stepped(SimScript(num_blocks=4096, max_model_len=1024))
    draw = random.Random(1)
    prompt = [5] * 300

    async def request(client: EngineClient) -> None:
        with trio.move_on_after(draw.random() * 0.3):
            await trio.sleep(draw.random() * 0.2)  # the body comes, is parsed, is tokenised
            with client.admission.reserve() as slot:
                await trio.lowlevel.checkpoint()
                params = SamplingParams(max_tokens=draw.randint(1, 40))
                sequences = [SequenceRequest(prompt, params)] * draw.randint(1, 2)
                with client.open_stream(sequences, slot=slot) as stream:
                    await stream.wait_accepted()
                    await read_all(stream)

    async with open_client(engine) as client, trio.open_nursery() as nursery:
        await nursery.start(engine.run_freely)
        async with trio.open_nursery() as requests:
            for _ in range(500):
                requests.start_soon(request, client)
        with trio.fail_after(0.02):  # one step
            await client.wait_idle()
        assert (len(client._table), client.admission.in_use) == (0, 0)
        assert (len(client._timers), engine.live) == (0, frozenset())
        assert engine.free_blocks == engine.core.limits.num_blocks
        metrics = client.metrics
        assert metrics.requests_aborted.total == metrics.abort_latency.count > 50
        nursery.cancel_scope.cancel()
