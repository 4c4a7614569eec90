"""A client's JSON schema, made ready for the grammar library.

A format that the library does not know says nothing about the text (so the standard has it) and is
dropped; patterns are looked at as expressions are. All else is the library's to take or refuse.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from trioengine.engine_proc.structured_output.regex_bounds import check_regex
from trioengine.errors import InvalidRequestError

__all__ = ["MAX_DEPTH", "WHITESPACE", "prepared_schema"]

MAX_DEPTH: Final = 64

WHITESPACE: Final = r"( |\n {0,16})?"
"""Between two tokens of JSON: without a bound a small model can go on with it for ever."""

_FORMATS: Final = frozenset(
    {
        "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    }
)  # fmt: skip
# Keyword -> its value is a map of schemas, or a list of them, or a schema.
_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLE: Final = frozenset({"items", "additionalProperties", "additionalItems", "not"})


def prepared_schema(text: str, param: str) -> str:
    """Return the schema as JSON.

    Raises:
        InvalidRequestError: It is no JSON, no schema, too deep, or has a pattern that is refused.
    """
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _refusal(f"the schema is no JSON: {error}", param) from error
    if not isinstance(schema, dict | bool):
        raise _refusal("a schema must be an object or a boolean", param)
    if schema is False:
        raise _refusal("no text satisfies the schema false", param)
    schema = {} if schema is True else schema  # the library takes options with an object only
    return msgspec.json.encode(_prepared(schema, 0, param)).decode()


def _prepared(schema: Any, depth: int, param: str) -> Any:
    if depth > MAX_DEPTH:
        raise _refusal(f"the schema is nested more than {MAX_DEPTH} deep", param)
    if isinstance(schema, list):
        return [_prepared(item, depth + 1, param) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(pattern := schema.get("pattern"), str):
        check_regex(pattern, param)
    return {
        name: _value(name, value, depth, param)
        for name, value in schema.items()
        if name != "format" or value in _FORMATS or not isinstance(value, str)
    }


def _value(name: str, value: Any, depth: int, param: str) -> Any:
    if name in _MAPS and isinstance(value, dict):
        if name == "patternProperties":
            for pattern in value:
                check_regex(pattern, param)
        return {key: _prepared(item, depth + 1, param) for key, item in value.items()}
    if name in _LISTS or name in _SINGLE:
        return _prepared(value, depth + 1, param)
    return value


def _refusal(reason: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} cannot be used: {reason}", param=param)
