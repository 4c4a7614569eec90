"""What one request contains hurts it alone; what is everybody's is fatal, and says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from helpers.api_world import COMPLETION, body_for, open_world
from helpers.stepped_engine import SteppedEngine
from trioengine.errors import PeerGoneError
from trioengine.fault_plan import Fault, FaultPlan
from trioengine.protocol import Fatal

if TYPE_CHECKING:
    from helpers.api_world import World
    from helpers.asgi_client import Call
    from trioengine.fault_plan import Place

SHAPE = {"response_format": {"type": "json_object"}}
CONTAINED = {
    "detokenizer, first token": Fault(at="detokenizer", do="raise", request=2),
    "detokenizer, later": Fault(at="detokenizer", do="raise", request=2, nth=3),
    "sampler": Fault(at="sampler", do="spoil", request=2, nth=2),
}
STEP_PLACES: tuple[Place, ...] = (
    "forward", "sampler", "commands", "schedule", "build", "execute", "poll aborts", "apply",
    "send",
)  # fmt: skip


def engine(*faults: Fault) -> SteppedEngine:
    return SteppedEngine(
        plan=FaultPlan(faults), send_error=lambda: PeerGoneError("the engine is gone")
    )


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return body_for(COMPLETION, text, max_tokens=6, seed=4, **fields)


async def start_all(world: World, bodies: list[dict[str, Any]]) -> list[Call]:
    """Start calls one after the other, so that the nth is the engine's nth request."""
    calls = []
    for body in bodies:
        calls.append(world.start("POST", COMPLETION, body))
        await world.settle()
    return calls


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", CONTAINED.values(), ids=CONTAINED.keys())
async def test_a_fault_of_one_requests_data_costs_that_request(
    fault: Fault, stream: bool, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_world(engine=engine()) as world:
        alone = await start_all(world, [ask(text) for text in "abc"])
        await world.run_until_idle()
    async with open_world(engine=engine(fault)) as world:
        calls = await start_all(world, [ask("a"), ask("b", stream=stream), ask("c")])
        await world.run_until_idle()
        assert not world.engine.dead
        head_was_out = stream and fault.nth > 1
        assert [call.status for call in calls] == [200, 200 if head_was_out else 500, 200]
        assert '"internal_error"' in calls[1].body.decode()
        assert "[DONE]" not in calls[1].body.decode()
        for call, other in zip(calls[::2], alone[::2], strict=True):
            assert call.json["choices"] == other.json["choices"]
        assert world.counted("requests", COMPLETION, "internal_error") == 1


async def test_a_grammar_that_fails_fails_its_request(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world(engine=engine(Fault(at="grammar", do="raise"))) as world:
        broken = world.start("POST", COMPLETION, ask("a", **SHAPE))
        well = world.start("POST", COMPLETION, ask("b"))
        await world.run_until_idle()
        assert (broken.status, well.status) == (500, 200)
        again = world.start("POST", COMPLETION, ask("a", **SHAPE))
        await world.run_until_idle()
        assert again.status == 200


@pytest.mark.parametrize("place", STEP_PLACES)
async def test_a_fault_of_a_step_is_fatal_and_says_so(
    place: Place, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_world(engine=engine(Fault(at=place, do="raise", step=2))) as world:
        calls = [world.start("POST", COMPLETION, ask(text)) for text in "ab"]
        await world.run_until_idle()
        await trio.sleep(0.1)
        await world.settle()
        assert [call.status for call in calls] == [503, 503]
        cause = f"InjectedError: injected fault: raise at {place}"
        assert all(call.json["error"]["message"].endswith(cause) for call in calls)
        assert world.client.status.reason == cause
        assert isinstance(world.engine.history[-1], Fatal)


async def test_a_fault_of_an_abort_is_fatal(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(engine=engine(Fault(at="abort", do="raise", request=1))) as world:
        leaver, stayer = await start_all(world, [ask("a"), ask("b")])
        await world.turn()
        leaver.disconnect()
        await world.turn()
        await trio.sleep(0.1)
        await world.settle()
        assert stayer.status == 503
        assert "raise at abort" in world.client.status.reason
