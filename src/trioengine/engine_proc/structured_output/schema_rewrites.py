"""Keywords that the grammar library lacks, said in words that it has. Pure.

Each rule either leaves what a schema allows as it is, or narrows it: an answer of the narrower kind
is as valid. Where no rule applies the keyword stays, and the library refuses the schema.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from trioengine.engine_proc.structured_output.disjoint import all_disjoint

if TYPE_CHECKING:
    from collections.abc import Callable

    Schema = dict[str, Any]
    Resolve = Callable[[str], Any]

__all__ = ["rewritten"]

# These say what else must hold of the same value, so they see its properties and items, too.
_IN_PLACE: Final = frozenset(
    {
        "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "then", "else",
        "dependentSchemas", "dependencies", "not", "contains",
    }
)  # fmt: skip
_COUNTS: Final = (
    "minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties",
    "minContains", "maxContains",
)  # fmt: skip
_ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment", "$id", "$schema"}
)

MAX_MAGNITUDE: Final = 10**18
"""The library's numbers end near 2^63. Bounds further out are drawn in; nobody misses the rest."""

_DAY: Final = (
    # The 29th of February, and every other day, of the years 0001 to 9999: those of calendars.
    "(?:(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29"
    "|(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-(?:(?:0[13578]|1[02])-"
    "(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8])))"
)
_TIME: Final = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
# The library's own take the 29th of February of any year, and seconds numbered 60.
_FORMAT_PATTERNS: Final = {
    "date": f"^{_DAY}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DAY}T{_TIME}$",
}


def rewritten(schema: Schema, resolve: Resolve) -> Schema:
    """Return a schema that the library may know more of.

    Args:
        schema: One object; what is within has been rewritten already.
        resolve: Returns what a reference points at, ``None`` if it cannot say.
    """
    schema = dict(schema)
    for rule in _RULES:
        rule(schema, resolve)
    return schema


def _whole_counts(schema: Schema, resolve: Resolve) -> None:
    for name in _COUNTS:
        value = schema.get(name)
        if isinstance(value, float) and value.is_integer():
            schema[name] = int(value)


def _near_bounds(schema: Schema, resolve: Resolve) -> None:
    for name, sign in (("maximum", 1), ("minimum", -1)):
        for keyword in (name, f"exclusive{name.title()}"):
            value = schema.get(keyword)
            if isinstance(value, int | float) and value * sign > MAX_MAGNITUDE:
                schema[keyword] = MAX_MAGNITUDE * sign


def _real_dates(schema: Schema, resolve: Resolve) -> None:
    value = schema.get("format")
    pattern = _FORMAT_PATTERNS.get(value) if isinstance(value, str) else None
    if pattern is None:
        return
    del schema["format"]
    _also(schema, "pattern", pattern)


def _unevaluated(schema: Schema, resolve: Resolve) -> None:
    """Say "unevaluated" as "additional", which it is where only this object can evaluate."""
    for name, other in (("unevaluatedProperties", "additionalProperties"), _rest_of_items(schema)):
        if name not in schema or (schema[name] is not True and _IN_PLACE & schema.keys()):
            continue
        rest = schema.pop(name)
        schema.setdefault(other, rest)


def _rest_of_items(schema: Schema) -> tuple[str, str]:
    older = isinstance(schema.get("items"), list)
    return "unevaluatedItems", "additionalItems" if older else "items"


def _without_effect(schema: Schema, resolve: Resolve) -> None:
    """Drop what asserts nothing."""
    if not {"then", "else"} & schema.keys():
        schema.pop("if", None)
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
    elif schema.get("minContains") == 0 and "maxContains" not in schema:
        del schema["contains"], schema["minContains"]
    for name, nothing in _NOTHING.items():
        if schema.get(name) == nothing and type(schema[name]) is type(nothing):  # 0 == False
            del schema[name]
    most = schema.get("maxItems")
    if isinstance(most, int) and most <= 1:
        schema.pop("uniqueItems", None)


_NOTHING: Final[dict[str, Any]] = {
    "uniqueItems": False,
    "not": False,
    "dependentRequired": {},
    "dependentSchemas": {},
    "dependencies": {},
}


def _property_names(schema: Schema, resolve: Resolve) -> None:
    """Say which names properties may have by patterns for all the others."""
    if "propertyNames" not in schema:
        return
    names = _without_annotations(_resolved(schema["propertyNames"], resolve))
    if names is True or names == {}:
        del schema["propertyNames"]
        return
    if "patternProperties" in schema or "unevaluatedProperties" in schema:
        return
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        return
    if (known := _listed_names(names)) is not None:
        left = [name for name in known if name not in properties]
        pattern = f"^(?:{'|'.join(map(_escaped, left))})$" if left else None
        schema["properties"] = {name: properties[name] for name in properties if name in known}
    elif properties or (pattern := _pattern_of_names(names)) is None:
        return
    del schema["propertyNames"]
    rest = schema.get("additionalProperties", True)
    schema["additionalProperties"] = False
    if pattern is not None and rest is not False:
        schema["patternProperties"] = {pattern: rest}


def _listed_names(names: Any) -> dict[str, None] | None:
    """Return all names that a schema of names allows, in order, if they can be told."""
    if names is False:
        return {}
    if not isinstance(names, dict) or names.keys() - {"enum", "const"}:
        return None
    listed = names.get("enum", [names.get("const")])
    if not isinstance(listed, list) or len(names) != 1:
        return None
    return dict.fromkeys(name for name in listed if isinstance(name, str))


def _pattern_of_names(names: Any) -> str | None:
    if not isinstance(names, dict):
        return None
    if names.keys() == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if names.keys() - {"minLength", "maxLength"} or not isinstance(least, int):
        return None
    return f"^(?s:.{{{least},{most}}})$" if most == "" or isinstance(most, int) else None


def _without_annotations(names: Any) -> Any:
    if not isinstance(names, dict):
        return names
    said = {name: value for name, value in names.items() if name not in _ANNOTATIONS}
    if said.get("type") == "string":  # as every name is
        del said["type"]
    return said


def _escaped(name: str) -> str:
    return re.sub(r"[\\^$.|?*+()\[\]{}/]", r"\\\g<0>", name)


def _one_of(schema: Schema, resolve: Resolve) -> None:
    """Say "one of" as "any of" where no value can be two of them."""
    branches = schema.get("oneOf")
    if not isinstance(branches, list):
        return
    possible = [branch for branch in branches if branch is not False]
    if possible and all_disjoint(possible, resolve):
        del schema["oneOf"]
        _also(schema, "anyOf", possible)


def _also(schema: Schema, name: str, value: Any) -> None:
    """Add a keyword that may be there already."""
    if name not in schema:
        schema[name] = value
    elif isinstance(schema.get("allOf", []), list):
        schema["allOf"] = [*schema.get("allOf", []), {name: value}]


def _resolved(schema: Any, resolve: Resolve) -> Any:
    if isinstance(schema, dict) and schema.keys() == {"$ref"}:
        found = resolve(schema["$ref"])
        return schema if found is None else found
    return schema


# In this order: what is unevaluated is decided while all that evaluates is still there.
_RULES: Final[tuple[Callable[[Schema, Resolve], None], ...]] = (
    _whole_counts,
    _near_bounds,
    _real_dates,
    _unevaluated,
    _without_effect,
    _property_names,
    _one_of,
)
