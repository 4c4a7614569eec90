"""``response_format``, ``structured_outputs`` and vLLM's older ``guided_*`` → a shape for the text.

Pure. Schemas, expressions and grammars pass as text: the engine compiles them, and says what is
wrong with one under the name that the client used. One request has one of them at most.

A schema with ``strict`` true, or without ``strict``, is followed to the letter or refused. With
``strict`` false it is followed as far as a grammar can, as OpenAI's best effort is: what cannot be
enforced is passed over because the client has said that it may be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw

from trioengine.errors import InvalidRequestError
from trioengine.structured import MAX_SCHEMA_CHARS, StructuredKind, StructuredOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.http.schemas import GenerationRequest

__all__ = ["read_structured", "schema_shape"]

_KINDS: Final[tuple[StructuredKind, ...]] = ("json", "regex", "choice", "grammar")
_MAX_BYTES: Final = 8 * MAX_SCHEMA_CHARS  # of JSON; what it spells is bounded by its own limits
# Keys of `structured_outputs` that say how vLLM is to work, and change nothing of the answer.
_HINTS: Final = frozenset(
    {"disable_fallback", "disable_any_whitespace", "disable_additional_properties", "_backend"}
)


def read_structured(body: GenerationRequest) -> StructuredOutput | None:
    """Return what shape the answer is to have; ``None`` for any.

    Raises:
        InvalidRequestError: A wrong type, nothing that is known, or more than one of them.
    """
    asked: list[StructuredOutput] = []
    readers: dict[str, Callable[[Any], StructuredOutput | None]] = {
        "response_format": _response_format,
        "structured_outputs": _structured_outputs,
    }
    for name, read in readers.items():
        value = _decoded(getattr(body, name), name)
        if value is not None and (found := read(value)) is not None:
            asked.append(found)
    for kind in _KINDS:
        name = f"guided_{kind}"
        value = _decoded(getattr(body, name), name)
        if value is not None:
            asked.append(_of_kind(kind, value, name, name))
    if len(asked) > 1:
        raise InvalidRequestError(
            f"'{asked[0].param}' and '{asked[1].param}' cannot both be given.",
            param=asked[1].param,
        )
    return asked[0] if asked else None


def _decoded(raw: Raw, name: str) -> Any:
    data = bytes(raw)
    if not data:
        return None
    if len(data) > _MAX_BYTES:
        raise InvalidRequestError(f"'{name}' is too long.", param=name)
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise InvalidRequestError(f"'{name}' is nested too deeply.", param=name) from None
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(f"'{name}' cannot be read: {error}.", param=name) from None


def _response_format(value: Any) -> StructuredOutput | None:
    name = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput("json_object", param=name)
    if kind == "json_schema":
        outer = value.get("json_schema")
        said = outer if isinstance(outer, dict) else {}
        if "schema" in said and not isinstance(said.get("name"), str):
            raise InvalidRequestError(f"'{name}.json_schema.name' must be a string.", param=name)
        return schema_shape(said.get("schema"), said.get("strict"), name, f"{name}.json_schema")
    raise InvalidRequestError(
        "'response_format.type' must be 'text', 'json_object' or 'json_schema'; structural tags "
        "are not supported by this server.",
        param=name,
    )


def schema_shape(schema: Any, strict: Any, name: str, place: str) -> StructuredOutput:
    """Return the shape that a schema of either endpoint's format asks for.

    Args:
        schema: As the client sent it.
        strict: The same; see above.
        name: The parameter, for errors.
        place: Where within it the two stand.

    Raises:
        InvalidRequestError: One of them is not of its type.
    """
    if not isinstance(schema, dict):
        raise InvalidRequestError(
            f"'{place}.schema' must be a JSON schema (an object).", param=name
        )
    if not isinstance(strict, bool | None):
        raise InvalidRequestError(f"'{place}.strict' must be true or false.", param=name)
    spec = msgspec.json.encode(schema).decode()
    return StructuredOutput("json", spec, lenient=strict is False, param=name)


def _structured_outputs(value: Any) -> StructuredOutput | None:
    name = "structured_outputs"
    if not isinstance(value, dict):
        raise InvalidRequestError(f"'{name}' must be an object.", param=name)
    said = {key: item for key, item in value.items() if item is not None and key not in _HINTS}
    if said.pop("json_object", False):
        said["json_object"] = True
    unknown = sorted(said.keys() - {*_KINDS, "json_object"})
    if unknown:
        raise InvalidRequestError(
            f"'{name}.{unknown[0][:50]}' is not supported by this server; it takes one of "
            f"{', '.join(_KINDS)} and json_object.",
            param=name,
        )
    if len(said) > 1:
        raise InvalidRequestError(
            f"'{name}' takes one of {', '.join(_KINDS)} and json_object, got {len(said)}.",
            param=name,
        )
    for key in said:
        if key == "json_object":
            return StructuredOutput("json_object", param=name)
        kind: StructuredKind = next(kind for kind in _KINDS if kind == key)
        return _of_kind(kind, said[key], name, f"{name}.{kind}")
    raise InvalidRequestError(
        f"'{name}' must have one of {', '.join(_KINDS)} and json_object.", param=name
    )


def _of_kind(kind: StructuredKind, value: Any, name: str, place: str) -> StructuredOutput:
    if kind == "json":
        # A schema may come as an object, or as the text of one.
        spec = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    elif kind == "choice":
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise InvalidRequestError(f"'{place}' must be a list of strings.", param=name)
        spec = msgspec.json.encode(value).decode()
    elif isinstance(value, str):
        spec = value
    else:
        raise InvalidRequestError(f"'{place}' must be a string.", param=name)
    return StructuredOutput(kind, spec, param=name)
