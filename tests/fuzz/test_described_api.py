"""Requests made from the API's own description, and against it: an answer of one shape to each.

schemathesis makes them of ``/openapi.json``: of the types that it names, and of others.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from helpers.fuzzing import Toll, check_answer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.server_process import ServerProcess

requests = pytest.importorskip("requests")
schemathesis = pytest.importorskip("schemathesis")

pytestmark = [pytest.mark.ecosystem, pytest.mark.process, pytest.mark.slow]

PATIENCE_S = 60.0  # for one answer, on a machine that is busy otherwise
REPEATABLE = 2000
PLAIN_CASES = 5  # of a route that takes nothing
TAIL_LINES = 40
MAX_TOKEN_ID = 2**31 - 1
SMALL_VOCABULARY = 2048
# Almost every value of these is refused, and so would be almost every request.
SELDOM = {"model", "response_format", "structured_outputs", "guided_json", "guided_regex",
          "guided_choice", "guided_grammar", "chat_template", "chat_template_kwargs",
          "reasoning_effort", "previous_response_id", "conversation", "background"}  # fmt: skip
TEXT = {"type": "string", "minLength": 1}
TOKEN = {"type": "integer", "minimum": 0, "maximum": SMALL_VOCABULARY - 1}
TOKENS = {"type": "array", "items": TOKEN, "minItems": 1}
SMALL = {"max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "best_of"}
SMALL_VALUE = 20


@pytest.fixture(scope="module")
def document(server: ServerProcess) -> dict[str, Any]:
    described: dict[str, Any] = server.get("/openapi.json")[1]
    for schema in described["components"]["schemas"].values():
        narrow(schema.get("properties", {}))
    return described


def narrow(properties: dict[str, Any]) -> None:
    """Say what this server has, which no description of any server can."""
    for name in SELDOM & properties.keys():
        del properties[name]
    for name in SMALL & properties.keys():
        for kind in properties[name].get("anyOf", [properties[name]]):
            if kind.get("type") == "integer":
                kind["maximum"] = min(kind.get("maximum", SMALL_VALUE), SMALL_VALUE)
    if "prompt" in properties and "messages" not in properties:
        properties["prompt"] = {"anyOf": [TEXT, *({"type": "array", "items": kind, "minItems": 1}
                                                  for kind in (TEXT, TOKEN, TOKENS))]}  # fmt: skip
    for kind in nested(properties):
        if kind.get("maximum") == MAX_TOKEN_ID:
            kind["maximum"] = SMALL_VOCABULARY - 1


def nested(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from nested(inner)


def operations(document: dict[str, Any]) -> list[Any]:
    schema = schemathesis.openapi.from_dict(document)
    return [result.ok() for result in schema.get_all_operations()]


def shares(document: dict[str, Any], cases: int) -> Iterator[tuple[Any, Any, int]]:
    """Yield each operation with how many requests it gets of each kind."""
    found = operations(document)
    with_body = [operation for operation in found if operation.body]
    each = (cases - PLAIN_CASES * (len(found) - len(with_body))) // (2 * len(with_body))
    positive, negative = schemathesis.GenerationMode
    for operation in found:
        if operation in with_body:
            yield operation, positive, each
            yield operation, negative, each
        else:  # nothing is wrong in a path's variable
            yield operation, positive, PLAIN_CASES


def test_no_request_of_the_described_kind_or_beside_it_does_harm(
    server: ServerProcess, document: dict[str, Any], cases: int
) -> None:
    toll = Toll.of(server)
    with requests.Session() as session:
        for operation, mode, count in shares(document, cases):
            fuzz(server, session, operation, mode, count, repeatable=cases == REPEATABLE, toll=toll)
    print(json.dumps(toll.counted, indent=1))  # noqa: T201  # shown by `-s`
    assert toll.total >= cases * 0.9
    assert toll.share_of(200) > 0.1  # it gets beyond the checks
    toll.check_paid(server)


def fuzz(
    server: ServerProcess, session: Any, operation: Any, mode: Any, count: int, *,
    repeatable: bool, toll: Toll,
) -> None:  # fmt: skip
    base_url = f"http://127.0.0.1:{server.port}"

    @settings(
        max_examples=count, derandomize=repeatable, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        arguments = case.as_transport_kwargs(base_url=base_url)
        answer = session.request(**arguments, timeout=PATIENCE_S, allow_redirects=False)
        if b'"engine_dead"' in answer.content:
            tail = "\n".join(server.lines[-TAIL_LINES:])
            pytest.exit(f"the engine died of {toll.latest} or {arguments}; the server:\n{tail}", 1)
        toll.latest = arguments
        toll.count(f"{operation.method} {operation.path}", answer.status_code)
        check_answer(answer.status_code, dict(answer.headers), answer.content)

    send()
