"""Whether no value can satisfy two of several schemas, as far as it can be told at a glance. Pure.

They are disjoint where they list different values, ask for different types, or for objects with
one property that says of which kind they are.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["all_disjoint"]

MAX_SCHEMAS: Final = 64  # each pair is looked at
_MAX_REFERENCES: Final = 8
_TYPES: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def all_disjoint(schemas: Sequence[Any], resolve: Callable[[str], Any]) -> bool:
    """Return whether it is certain that no value satisfies two of ``schemas``.

    Args:
        schemas: JSON schemas.
        resolve: Returns what a reference points at, ``None`` if it cannot say.
    """
    if len(schemas) > MAX_SCHEMAS:
        return False
    facts = [_Facts(schema, resolve) for schema in schemas]
    return all(a.excludes(b) for a, b in itertools.combinations(facts, 2))


class _Facts:
    """What must hold of every value that satisfies one schema.

    Attributes:
        types: It has one of these. A whole number is an ``integer``, any other a ``number``.
        values: It is one of these, each as JSON in one spelling; ``None`` if that is not said.
        kinds: If it is an object: property that it must have to the facts about that.
    """

    def __init__(self, schema: Any, resolve: Callable[[str], Any], depth: int = 0) -> None:
        schema = _followed(schema, resolve)
        self.values = _values(schema)
        self.types = _types(schema)
        if self.values is not None:
            self.types &= {_type_of(json.loads(value)) for value in self.values}
        self.kinds = {} if depth else _kinds(schema, resolve)

    def excludes(self, other: _Facts) -> bool:
        """Say whether no value can satisfy both."""
        if self.values is not None and other.values is not None:
            return not self.values & other.values
        common = self.types & other.types
        if common - {"object"}:
            return False
        return not common or any(
            self.kinds[name].excludes(other.kinds[name])
            for name in self.kinds.keys() & other.kinds.keys()
        )


def _followed(schema: Any, resolve: Callable[[str], Any]) -> dict[str, Any]:
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        if _TELLING & schema.keys():
            break  # what stands beside it tells something, too
        schema = resolve(schema["$ref"])
    return schema if isinstance(schema, dict) else {}


_TELLING: Final = frozenset({"type", "enum", "const", "properties"})


def _values(schema: dict[str, Any]) -> set[str] | None:
    if "const" in schema:
        return {_spelled(schema["const"])}
    listed = schema.get("enum")
    return {_spelled(value) for value in listed} if isinstance(listed, list) else None


def _spelled(value: Any) -> str:
    """Return JSON that is the same for equal values: 1.0 is 1, and true is neither."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_spelled, value))}]"
    if isinstance(value, dict):
        members = [f"{json.dumps(name)}:{_spelled(value[name])}" for name in sorted(value)]
        return f"{{{','.join(members)}}}"
    return json.dumps(value)


def _types(schema: dict[str, Any]) -> frozenset[str]:
    said = schema.get("type")
    names = [said] if isinstance(said, str) else said
    if not isinstance(names, list):
        return _TYPES
    known = frozenset(name for name in names if isinstance(name, str))
    return known | {"integer"} if "number" in known else known


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _kinds(schema: dict[str, Any], resolve: Callable[[str], Any]) -> dict[str, _Facts]:
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(required, list) or not isinstance(properties, dict):
        return {}
    return {
        name: _Facts(properties[name], resolve, depth=1)
        for name in required
        if isinstance(name, str) and name in properties
    }
