"""What every engine promises on its wire, asked of each kind of it in the same words.

In memory under the virtual clock, as a process that simulates, and as a process that computes: a
client's tests against the first are worth something only where all three answer alike.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

import pytest
import trio

from helpers import tiny_tokenizers
from helpers.stepped_engine import SteppedEngine
from trioengine.config import EngineOptions
from trioengine.outputs import FinishReason, RequestOutput
from trioengine.process.incarnation import ProcessEngine
from trioengine.process.spawn import spawn_engine
from trioengine.protocol import (
    Abort,
    Accepted,
    Add,
    Call,
    CallResult,
    EngineMessage,
    EngineStats,
    Outputs,
    Ready,
    Shutdown,
)
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from trioengine.client.engine_client import Transport

Message = TypeVar("Message", bound=EngineMessage)

PATIENCE_S = 60.0
PROMPT = [65, 66, 67]
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


class World:
    """A ready engine, and what it has said."""

    def __init__(self, transport: Transport, ended: trio.Event) -> None:
        self.send = transport.send
        self.ended = ended
        self.ready: Ready | None = None
        self.said: list[EngineMessage] = []
        self._receive = transport.receive
        self._next = 0

    async def until(self, kind: type[Message]) -> Message:
        """Return the next message of this kind; what came before it stays in ``said``."""
        while True:
            while self._next < len(self.said):
                message = self.said[self._next]
                self._next += 1
                if isinstance(message, kind):
                    return message
            self.said += await self._receive()

    async def terminal(self, request_id: int) -> RequestOutput:
        """Return all deltas of a request in one, up to its terminal."""
        merged = RequestOutput(request_id)
        while merged.finish_reason is None:
            for delta in (await self.until(Outputs)).deltas:
                if delta.request_id == request_id:
                    merged.merge(delta)
        return merged

    async def stats(self) -> EngineStats:
        """Run one more request and return the gauges that come with its end."""
        self.send(Add(999, PROMPT, SHORT))
        last = EngineStats()
        while True:
            outputs = await self.until(Outputs)
            last = outputs.stats
            if any(delta.request_id == 999 and delta.finish_reason for delta in outputs.deltas):
                return last


@contextlib.asynccontextmanager
async def in_memory() -> AsyncIterator[World]:
    engine, ended = SteppedEngine(), trio.Event()

    async def run() -> None:
        await engine.run_freely(0.0)
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        yield World(engine, ended)
        nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def as_process(backend: str, model_dir: Path | None) -> AsyncIterator[World]:
    options = EngineOptions(
        backend=backend,  # type: ignore[arg-type]  # a parameter of the test
        device="cpu",
        threads=1,
        kv_cache_memory_gib=None if backend == "sim" else 0.01,
        max_num_seqs=8,
    )
    engine = ProcessEngine(
        spawn_engine(options, model_dir=model_dir, model_name="m"), pass_through=lambda line: None
    )
    ended = trio.Event()

    async def watch() -> None:
        assert "exited with status 0" in await engine.watch()
        ended.set()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            yield World(engine.transport, ended)
            nursery.cancel_scope.cancel()
    finally:
        engine.close()


@pytest.fixture(scope="session")
def model_dir(extension: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny random model with a tokenizer."""
    from helpers.tiny_models import save_tiny

    directory = tmp_path_factory.mktemp("served")
    save_tiny(directory, "llama-gqa2-hd64-tied", vocab_size=512)
    return tiny_tokenizers.save(tiny_tokenizers.byte_level(), directory)


@pytest.fixture(
    params=[
        "memory",
        pytest.param("sim", marks=[pytest.mark.process]),
        pytest.param("native", marks=[pytest.mark.process, pytest.mark.model, pytest.mark.slow]),
    ]
)
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Return a ready engine of each kind."""
    if request.param == "memory":
        opened = in_memory()
    elif request.param == "sim":
        opened = as_process("sim", None)
    else:
        opened = as_process("native", request.getfixturevalue("model_dir"))
    with trio.fail_after(PATIENCE_S):
        async with opened as world:
            world.ready = await world.until(Ready)
            yield world


async def test_a_request_is_accepted_then_answered_to_one_terminal(world: World) -> None:
    world.send(Add(1, PROMPT, SHORT))
    answer = await world.terminal(1)
    assert answer.finish_reason is FinishReason.LENGTH
    assert len(answer.token_ids) == SHORT.max_tokens
    kinds = [type(message) for message in world.said]
    assert kinds.index(Accepted) < kinds.index(Outputs)
    last = await world.stats()
    deltas = [delta for m in world.said if isinstance(m, Outputs) for delta in m.deltas]
    assert [d.request_id for d in deltas if d.finish_reason] == [1, 999]
    assert last.num_running == last.num_waiting == 0


async def test_an_abort_is_confirmed_and_gives_every_block_back(world: World) -> None:
    assert world.ready is not None
    world.send(Add(1, PROMPT, LONG))
    await world.until(Outputs)
    world.send(Abort([1]))
    assert (await world.terminal(1)).finish_reason is FinishReason.ABORT
    stats = await world.stats()
    assert stats.free_blocks + stats.evictable_blocks == world.ready.limits.num_blocks
    assert stats.aborts_ignored == 0


async def test_an_abort_right_behind_its_request_is_not_lost(world: World) -> None:
    world.send(Add(1, PROMPT, LONG))
    world.send(Abort([1]))
    assert (await world.terminal(1)).finish_reason is FinishReason.ABORT


async def test_an_abort_of_nobody_is_counted_and_not_answered(world: World) -> None:
    world.send(Abort([77]))
    assert (await world.stats()).aborts_ignored == 1
    said = [delta for m in world.said if isinstance(m, Outputs) for delta in m.deltas]
    assert all(delta.request_id != 77 for delta in said)


async def test_a_request_that_cannot_be_served_hurts_nobody_else(world: World) -> None:
    world.send(Add(1, PROMPT, LONG))
    world.send(Add(2, [10**6], SHORT))
    refused = await world.terminal(2)
    assert refused.finish_reason is FinishReason.ERROR
    assert refused.error
    world.send(Abort([1]))
    assert (await world.terminal(1)).finish_reason is FinishReason.ABORT


async def test_every_call_has_one_result(world: World) -> None:
    world.send(Call(5, "check_integrity"))
    assert await world.until(CallResult) == CallResult(5)
    world.send(Call(6, "no_such_method"))
    unknown = await world.until(CallResult)
    assert (unknown.call_id, unknown.refused) == (6, True)
    assert "no_such_method" in (unknown.error or "")


async def test_it_leaves_when_told_to(world: World) -> None:
    world.send(Add(1, PROMPT, LONG))
    await world.until(Outputs)
    world.send(Shutdown())
    await world.ended.wait()
