"""The description names every route, every parameter that is honoured and nothing else."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from helpers.api_world import CHAT, COMPLETION, body_for, open_world
from trioengine.http import embeddings
from trioengine.http.embeddings import EmbeddingRequest
from trioengine.http.openapi import describe
from trioengine.http.operations import OPERATIONS
from trioengine.http.responses import request
from trioengine.http.responses.request import ResponseRequest
from trioengine.http.schemas import UNSUPPORTED, ChatCompletionRequest, CompletionRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio.testing import MockClock


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


@pytest.mark.parametrize("admin", [False, True])
async def test_it_names_exactly_the_routes_there_are(
    admin: bool, autojump_clock: MockClock
) -> None:
    async with open_world(enable_admin=admin) as world:
        document = (await world.api.get("/openapi.json")).json
        described = {
            (path, method.upper()) for path, ops in document["paths"].items() for method in ops
        }
        assert described == {
            (re.sub(r"<(?:path:)?([^>]+)>", r"{\1}", rule.rule), method)
            for rule in world.app.url_map.iter_rules()
            for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
        }


def test_every_reference_leads_somewhere_and_every_schema_is_used() -> None:
    document = describe(OPERATIONS, keys=True)
    prefix = "#/components/schemas/"
    used = {ref.removeprefix(prefix) for ref in references(document)}
    assert used == set(document["components"]["schemas"])


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        (ChatCompletionRequest, UNSUPPORTED),
        (CompletionRequest, UNSUPPORTED),
        (ResponseRequest, request.REFUSED),
        (EmbeddingRequest, embeddings.REFUSED),
    ],
)
def test_a_body_has_the_fields_that_are_honoured(
    body: type[msgspec.Struct], refused: dict[str, object]
) -> None:
    schemas = describe(OPERATIONS, keys=False)["components"]["schemas"]
    fields = set(schemas[body.__name__]["properties"])
    assert fields == {field.name for field in msgspec.structs.fields(body)} - set(refused)
    assert {"model", "timeout"} < fields


def bounds() -> Iterator[tuple[str, str, Any, bool]]:
    """Each bound that is described: body, field, a value on it or just beyond, whether it fits."""
    schemas = describe(OPERATIONS, keys=False)["components"]["schemas"]
    for body in ("ChatCompletionRequest", "CompletionRequest"):
        for name, schema in schemas[body]["properties"].items():
            for kind in schema.get("anyOf", [schema]):
                step = 1 if kind.get("type") == "integer" else 0.01
                for word, sign in (("minimum", -1), ("maximum", 1)):
                    if word in kind:
                        yield body, name, kind[word], True
                        yield body, name, kind[word] + sign * step, False
                if "exclusiveMinimum" in kind:
                    yield body, name, kind["exclusiveMinimum"], False


# What else such a value needs.
COMPANIONS: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "max_tokens": {"echo": True, "prompt_logprobs": 0},  # 0 is for scoring a prompt
}


@pytest.mark.parametrize(("body", "name", "value", "fits"), list(bounds()))
async def test_the_bounds_that_are_described_are_those_that_are_checked(
    body: str, name: str, value: Any, fits: bool, autojump_clock: MockClock
) -> None:
    async with open_world(running=True, max_queue_sequences=256) as world:
        path = CHAT if body.startswith("Chat") else COMPLETION
        fields = {"max_tokens": 1} | COMPANIONS.get(name, {}) | {name: value}
        call = await world.api.post(path, body_for(path, **fields))
        refused = call.status == 400 and call.error["param"] == name
        assert refused is not fits, call.body


def test_what_is_required_says_so() -> None:
    schemas = describe(OPERATIONS, keys=False)["components"]["schemas"]
    assert schemas["ChatCompletionRequest"]["required"] == ["messages"]
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    assert schemas["DetokenizeRequest"]["required"] == ["tokens"]
    assert (
        "required" not in schemas["TokenizeRequest"] or not schemas["TokenizeRequest"]["required"]
    )


def test_keys_are_described_where_they_are_asked_for() -> None:
    secured = describe(OPERATIONS, keys=True)
    assert secured["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert "security" not in secured["paths"]["/health"]["get"]
    assert "securitySchemes" not in describe(OPERATIONS, keys=False)["components"]


async def test_the_page_stands_by_itself(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        page = await world.api.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        text = page.body.decode()
        assert "/v1/chat/completions" in text
        assert "/start_profile" not in text
        assert "http" not in text.replace("http://www.w3.org", "")
