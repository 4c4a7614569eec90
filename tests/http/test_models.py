from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from openai.types import Model

from helpers.api_world import CHAT, body_for, open_world

if TYPE_CHECKING:
    from trio.testing import MockClock


async def test_the_model_is_listed_with_what_computes_it(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        listed = (await world.api.get("/v1/models")).json
        (card,) = listed["data"]
        assert listed["object"] == "list"
        assert (card["id"], card["object"], card["max_model_len"]) == ("sim", "model", 1024)
        assert (card["runner"], card["simulated"]) == ("sim", True)
        assert (card["parent"], card["permission"]) == (None, [])
        Model.model_validate(card, strict=True)
        assert (await world.api.get("/v1/models/sim")).json == card


async def test_it_goes_by_its_served_names(autojump_clock: MockClock) -> None:
    names = ("gpt-x", "org/name")
    async with open_world(running=True, served_model_names=names) as world:
        listed = (await world.api.get("/v1/models")).json
        assert [card["id"] for card in listed["data"]] == list(names)
        assert {card["root"] for card in listed["data"]} == {"sim"}
        assert (await world.api.get("/v1/models/org/name")).json["id"] == "org/name"
        for name in names:
            call = await world.api.post(CHAT, body_for(CHAT, model=name, max_tokens=1))
            assert call.json["model"] == name
        nameless = await world.api.post(CHAT, body_for(CHAT, max_tokens=1))
        assert nameless.json["model"] == "gpt-x"
        refused = await world.api.post(CHAT, body_for(CHAT, model="sim", max_tokens=1))
        assert refused.status == 404


@pytest.mark.parametrize("name", ["nope", "", "SIM", "x" * 10_000])
async def test_an_unknown_model_is_a_404(name: str, autojump_clock: MockClock) -> None:
    async with open_world() as world:
        call = await world.api.post(CHAT, body_for(CHAT, model=name))
        assert (call.status, call.error["code"]) == (404, "model_not_found")
        assert call.error["param"] == "model"
        assert len(call.body) < 1000


async def test_before_the_model_is_known(autojump_clock: MockClock) -> None:
    async with open_world(ready=False) as world:
        call = await world.api.get("/v1/models")
        assert (call.status, call.error["code"]) == (503, "starting")


async def test_a_dead_engine_serves_no_model_and_a_draining_one_does(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        world.client.status.mark_draining()
        assert (await world.api.get("/v1/models")).status == 200
        world.engine.crash()
        world.client.status.report_exit("killed")
        call = await world.api.get("/v1/models")
        assert (call.status, call.error["code"]) == (503, "engine_dead")
