"""``GET /openapi.json`` and ``/docs``: the API described by the very types that check it.

What the description names is honoured: parameters that are known and refused are left out.
"""

from __future__ import annotations

import functools
import html
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import NODEFAULT
from quart import Blueprint, Response

from trioengine.http import embeddings
from trioengine.http.embeddings import EmbeddingRequest
from trioengine.http.errors import ErrorEnvelope
from trioengine.http.operations import OPERATIONS
from trioengine.http.ranges import TokenId, in_range
from trioengine.http.responses.request import REFUSED, ResponseRequest
from trioengine.http.schemas import UNSUPPORTED, ChatMessage, CompletionRequest
from trioengine.http.tokenize import DetokenizeRequest
from trioengine.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trioengine.http.operations import Operation

__all__ = ["describe", "openapi_routes"]

Schema = dict[str, Any]

_JSON: Final = "application/json"
_REF: Final = "#/components/schemas/{name}"

# Fields that are refused where they are no ``UNSUPPORTED``.
_REFUSED: Final[dict[type[msgspec.Struct], dict[str, tuple[Any, ...]]]] = {
    ResponseRequest: REFUSED,
    EmbeddingRequest: embeddings.REFUSED,
}
# Fields that stay undecoded until their size has been looked at, and what they have to be.
_REQUIRED: Final[dict[tuple[type[msgspec.Struct], str], Any]] = {
    (CompletionRequest, "prompt"): str | list[str | TokenId | list[TokenId]],
    (DetokenizeRequest, "tokens"): list[TokenId],
    (EmbeddingRequest, "input"): str | list[str | TokenId | list[TokenId]],
}
_OPTIONAL: Final[dict[str, Any]] = {
    "messages": list[ChatMessage],
    "chat_template_kwargs": dict[str, Any],
}


def openapi_routes(*, admin: bool, keys: bool) -> Blueprint:
    """Return both routes. What they say is put together when it is first asked for.

    Args:
        admin: The administrative routes are served.
        keys: API keys are asked for.
    """
    routes = Blueprint("openapi", __name__)
    operations = [operation for operation in OPERATIONS if admin or not operation.admin]

    @functools.cache
    def description() -> bytes:
        return msgspec.json.encode(describe(operations, keys=keys))

    @functools.cache
    def page() -> str:
        return _page(operations)

    @routes.get("/openapi.json")
    async def openapi() -> Response:
        return Response(description(), content_type=_JSON)

    @routes.get("/docs")
    async def docs() -> Response:
        return Response(page(), content_type="text/html; charset=utf-8")

    return routes


def describe(operations: Iterable[Operation], *, keys: bool) -> Schema:
    """Return the OpenAPI 3.1 document of these operations."""
    operations = list(operations)
    bodies = {op.body: _documented(op.body) for op in operations if op.body is not None}
    answers = [op.answer for op in operations if not isinstance(op.answer, str)]
    types = [*bodies.values(), *answers, ErrorEnvelope]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    refs = dict(zip(map(_hashable, types), schemas, strict=True))
    paths: dict[str, Schema] = {}
    for op in operations:
        body = refs[_hashable(bodies[op.body])] if op.body is not None else None
        entry = _operation(op, body, refs, keys=keys)
        paths.setdefault(op.path, {})[op.method] = entry
    security = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if keys else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "trioengine", "version": __version__},
        "paths": paths,
        "components": {"schemas": components} | security,
    }


def _hashable(kind: Any) -> str:
    return str(kind)


def _operation(
    op: Operation, body: Schema | None, refs: dict[str, Schema], *, keys: bool
) -> Schema:
    if isinstance(op.answer, str):
        content: Schema = {op.answer: {"schema": {"type": "string"}}}
    else:
        content = {_JSON: {"schema": refs[_hashable(op.answer)]}}
    if op.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    failure = {_JSON: {"schema": refs[_hashable(ErrorEnvelope)]}}
    responses = {"200": {"description": "OK", "content": content}} | {
        str(int(status)): {"description": status.phrase, "content": failure}
        for status in _failures(op)
    }
    entry: Schema = {
        "summary": op.summary,
        "operationId": op.method + op.path.replace("/", "_").replace("{", "").replace("}", ""),
        "responses": responses,
    }
    names = [part[1:-1] for part in op.path.split("/") if part.startswith("{")]
    if names:
        entry["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if body is not None:
        entry["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
    if keys and not op.open:
        entry["security"] = [{"key": []}]
    return entry


def _failures(op: Operation) -> list[HTTPStatus]:
    statuses = [HTTPStatus.UNAUTHORIZED, HTTPStatus.SERVICE_UNAVAILABLE]
    if op.body is not None:
        statuses += [
            HTTPStatus.BAD_REQUEST,
            HTTPStatus.REQUEST_TIMEOUT,
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            HTTPStatus.TOO_MANY_REQUESTS,
        ]
    if op.body is not None or "{" in op.path:
        statuses.append(HTTPStatus.NOT_FOUND)
    if op.streams:
        statuses += [
            HTTPStatus.CONFLICT,
            HTTPStatus.INTERNAL_SERVER_ERROR,
            HTTPStatus.GATEWAY_TIMEOUT,
        ]
    return sorted(statuses)


def _documented(body: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return ``body`` as a type without undecoded fields and without those that are refused."""
    fields: list[tuple[str, Any, Any]] = []
    for field in msgspec.structs.fields(body):
        if field.name in _REFUSED.get(body, UNSUPPORTED):
            continue
        if field.type is msgspec.Raw:
            kind = _REQUIRED.get((body, field.name))
            optional = _OPTIONAL.get(field.name, Any) | None
            fields.append((field.name, kind or optional, None if kind is None else NODEFAULT))
        else:
            fields.append((field.name, in_range(field.name, field.type), field.default))
    documented = msgspec.defstruct(body.__name__, fields, kw_only=True)
    documented.__doc__ = body.__doc__
    return documented


def _page(operations: Iterable[Operation]) -> str:
    """Return a page that needs nothing from elsewhere."""
    rows = "".join(
        f"<tr><td><code>{op.method.upper()} {html.escape(op.path)}</code></td>"
        f"<td>{html.escape(op.summary)}</td><td>{html.escape(_fields(op))}</td></tr>"
        for op in operations
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>trioengine</title>'
        "<style>body{font:16px system-ui;margin:2rem;max-width:70rem}td{padding:.4rem;"
        "vertical-align:top;border-top:1px solid #ccc}</style>"
        f"<h1>trioengine {html.escape(__version__)}</h1>"
        '<p>The full description is <a href="openapi.json">openapi.json</a>.</p>'
        f"<table>{rows}</table></html>"
    )


def _fields(op: Operation) -> str:
    if op.body is None:
        return ""
    return ", ".join(field.name for field in msgspec.structs.fields(_documented(op.body)))
