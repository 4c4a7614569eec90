"""A client's JSON schema, made ready for the grammar library.

A format that the library does not know says nothing about the text (so the standard has it) and is
dropped; patterns are looked at as expressions are; some keywords that the library lacks are said in
others (``schema_rewrites``). All else is the library's to take or refuse.
"""

from __future__ import annotations

import functools
import urllib.parse
from typing import Any, Final

import msgspec

from trioengine.engine_proc.structured_output.regex_bounds import check_regex
from trioengine.engine_proc.structured_output.schema_rewrites import rewritten
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
_SINGLE: Final = frozenset(
    {
        "items", "additionalProperties", "additionalItems", "not", "contains", "propertyNames",
        "unevaluatedProperties", "unevaluatedItems", "if", "then", "else",
    }
)  # fmt: skip


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
    return msgspec.json.encode(_Preparation(schema, param).prepared(schema, 0)).decode()


class _Preparation:
    """Of one document."""

    def __init__(self, root: dict[str, Any], param: str) -> None:
        self._root = root
        self._param = param

    def prepared(self, schema: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise _refusal(f"the schema is nested more than {MAX_DEPTH} deep", self._param)
        if isinstance(schema, list):
            return [self.prepared(item, depth + 1) for item in schema]
        if not isinstance(schema, dict):
            return schema
        self._look_at(schema, depth)
        inner = {
            name: self._value(name, value, depth)
            for name, value in schema.items()
            if name != "format" or not isinstance(value, str) or value in _FORMATS
        }
        return rewritten(inner, self._resolve)

    def _look_at(self, schema: dict[str, Any], depth: int) -> None:
        if isinstance(pattern := schema.get("pattern"), str):
            check_regex(pattern, self._param)
        step = schema.get("multipleOf")
        if isinstance(step, int | float) and not step > 0:  # the library takes its magnitude
            raise _refusal("'multipleOf' must be greater than 0", self._param)
        if depth and "$ref" in schema and "$id" in schema:
            # Up to draft 7 the identifier then means nothing; since, it moves what the other means.
            raise _refusal("an '$id' beside a '$ref' is not supported", self._param)

    def _value(self, name: str, value: Any, depth: int) -> Any:
        if name in _MAPS and isinstance(value, dict):
            if name == "patternProperties":
                for pattern in value:
                    check_regex(pattern, self._param)
            return {key: self.prepared(item, depth + 1) for key, item in value.items()}
        if name in _LISTS or name in _SINGLE:
            return self.prepared(value, depth + 1)
        return value

    @functools.cached_property
    def _inner_ids(self) -> bool:
        """Whether a part of the document may be a document of its own."""
        text = msgspec.json.encode(self._root)
        return text.count(b'"$id"') + text.count(b'"id"') > (
            ("$id" in self._root) + ("id" in self._root)
        )

    def _resolve(self, reference: str) -> Any:
        """Return what a reference points at within the document, ``None`` if that is not plain."""
        if not isinstance(reference, str) or not reference.startswith("#/") or self._inner_ids:
            return None
        found: Any = self._root
        for part in reference[2:].split("/"):
            name = urllib.parse.unquote(part).replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                return None
            found = found[name]
        return found


def _refusal(reason: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} cannot be used: {reason}", param=param)
