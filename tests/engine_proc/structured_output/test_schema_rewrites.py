"""Keywords that the library lacks: each says what it said, and what cannot be said is refused."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Discriminator, Field, Tag

from trioengine.engine_proc.structured_output.schema_rewrites import MAX_MAGNITUDE
from trioengine.errors import InvalidRequestError

if TYPE_CHECKING:
    from helpers.grammars import Judge

ANIMALS = {
    "$defs": {
        "cat": {"type": "object", "properties": {"is": {"const": "cat"}}, "required": ["is"]},
        "dog": {"type": "object", "properties": {"is": {"const": "dog"}}, "required": ["is"]},
    },
    "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
}
FOLLOWED: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"maxItems": 2.0, "type": "array"}, [[1, 2]], [[1, 2, 3]]),
    ({"type": "integer", "maximum": 2**64}, [5, -5], []),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, MAX_MAGNITUDE], [0.5]),
    ({"type": "number", "exclusiveMaximum": 1e300, "minimum": 0}, [0, 100000.5], [-1]),
    ({"format": "date"}, ["2024-02-29", "0001-01-01", 5], ["2023-02-29", "1900-02-29"]),
    ({"format": "date"}, ["2000-02-29"], ["0000-01-01", "0000-02-29", "2024-06-31"]),
    ({"format": "date", "pattern": "^20"}, ["2023-01-31"], ["1923-01-31", "20"]),
    ({"format": "time"}, ["23:59:59.5Z", "00:00:00+01:30"], ["23:59:60Z", "24:00:00Z", "1:0:0"]),
    ({"format": "date-time"}, ["2024-02-29T01:02:03Z"], ["2023-02-29T01:02:03Z", "2023-01-01"]),
    (
        {"properties": {"a": {"type": "null"}}, "unevaluatedProperties": False},
        [{}, {"a": None}, 5],
        [{"b": 1}, {"a": 1}],
    ),
    ({"additionalProperties": {"type": "null"}, "unevaluatedProperties": False}, [{"x": None}], []),
    (
        {"prefixItems": [{"type": "null"}], "unevaluatedItems": {"type": "integer"}},
        [[None, 1]],
        [[1], [None, "a"]],
    ),
    ({"items": [{"type": "null"}], "unevaluatedItems": False}, [[None]], [[None, 1], [1]]),
    ({"uniqueItems": False, "type": "array"}, [[1, 1]], []),
    ({"uniqueItems": True, "maxItems": 1, "type": "array"}, [[1], []], [[1, 1]]),
    ({"if": {"type": "string"}, "not": False}, [1, "a"], []),
    ({"then": False, "else": False}, [1, "a"], []),
    ({"minContains": 2, "maxContains": 1, "type": "array"}, [[]], []),
    ({"contains": {"type": "null"}, "minContains": 0}, [[], [1], [None]], []),
    ({"dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}}, [{}], []),
    ({"propertyNames": {"type": "string", "title": "x"}}, [{"a": 1}], []),
    ({"type": "object", "propertyNames": False}, [{}], [{"a": 1}]),
    (
        {"propertyNames": {"enum": ["a", "b.", 5]}, "additionalProperties": {"type": "integer"}},
        [{}, {"b.": 2}, {"a": 1, "b.": 2}, "x"],
        [{"c": 1}, {"a": "x"}, {"bx": 1}],
    ),
    (
        {"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"enum": ["a"]}}},
        [{"a": [1]}],
        [{"b": 1}],
    ),
    (
        {
            "propertyNames": {"enum": ["a", "b"]},
            "properties": {"a": {"type": "null"}, "c": {"type": "null"}},
            "additionalProperties": False,
        },
        [{"a": None}],
        [{"b": None}, {"c": None}, {"a": 1}],
    ),
    ({"propertyNames": {"const": "a"}}, [{"a": 1}], [{"b": 1}]),
    ({"propertyNames": {"pattern": "^x"}, "type": "object"}, [{"xy": 1}, {}], [{"y": 1}]),
    ({"propertyNames": {"minLength": 2, "maxLength": 3}}, [{"ab": 1, "abc": 2}], [{"a": 1}]),
    ({"propertyNames": {"maxLength": 1}}, [{"": 1, "é": 2}], [{"ab": 1}]),
    ({"oneOf": [{"const": 1}, {"enum": [2, "a"]}]}, [1, 2, "a"], [3]),
    ({"oneOf": [{"type": "object"}, {"type": "null"}, False]}, [{}, None], [1]),
    ({"oneOf": [{"type": "string"}, {"enum": [1, None]}]}, ["a", 1, None], [2]),
    (ANIMALS, [{"is": "cat"}, {"is": "dog"}], [{"is": "cow"}, {}, 5]),
    (
        {"anyOf": [{"const": 1}, {"const": 3}], "oneOf": [{"const": 1}, {"const": 2}]},
        [1],
        [2, 3],
    ),
]


@pytest.mark.parametrize(("schema", "good", "bad"), FOLLOWED)
def test_a_keyword_is_said_in_others(
    schema: dict[str, Any], good: list[Any], bad: list[Any], judge: Judge
) -> None:
    grammar = judge.schema(schema)
    assert [value for value in good if not judge.allows(grammar, value)] == []
    assert [value for value in bad if judge.allows(grammar, value)] == []
    if "format" not in schema:  # the table itself is right
        valid = jsonschema.Draft202012Validator(schema).is_valid
        if not isinstance(schema.get("items"), list):
            assert all(map(valid, good))
            assert not any(map(valid, bad))


def kind(number: int, **fields: Any) -> dict[str, Any]:
    tagged = {"type": "object", "properties": {"is": {"const": number}}, "required": ["is"]}
    return tagged | fields


def nested(times: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(times):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED: list[dict[str, Any]] = [
    {"uniqueItems": True},
    {"uniqueItems": True, "maxItems": 2},
    {"not": {"type": "null"}},
    {"if": {"type": "null"}, "then": False},
    {"contains": {"type": "null"}},
    {"contains": {"type": "null"}, "minContains": 0, "maxContains": 1},
    {"dependentRequired": {"a": ["b"]}},
    {"propertyNames": {"pattern": "^x"}, "properties": {"y": {}}},
    {"propertyNames": {"enum": ["a"]}, "patternProperties": {"^b": {}}},
    {"propertyNames": {"enum": ["a"], "pattern": "b"}},
    {"propertyNames": {"format": "uuid"}},
    {"unevaluatedProperties": False, "allOf": [{"properties": {"a": {}}}]},
    {"unevaluatedProperties": False, "$ref": "#/$defs/a", "$defs": {"a": {"properties": {}}}},
    {"unevaluatedItems": False, "contains": {"type": "null"}},
    {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    {"oneOf": [{"const": 1}, {"const": 1.0}]},
    {"oneOf": [{"const": "a"}, {"type": "string"}]},
    {"oneOf": [{"type": "object"}, {"type": "object", "required": ["a"]}]},
    {"oneOf": [{"required": ["is"]}, {"properties": {"is": {"const": 1}}, "required": ["is"]}]},
    {"oneOf": [{"$ref": "#/$defs/a"}, {"const": 2}], "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"oneOf": [{"const": number} for number in range(65)]},
    {"oneOf": [kind(1, type=["object", "string"]), kind(2, type=["object", "string"])]},
    {"oneOf": [kind(1, required=[]), kind(2, required=[])]},
    nested(70),
    {"type": "object", "propertyNames": {"enum": ["a"]}, "required": ["b"]},
    {"type": "integer", "minimum": 2**64},
    {"$ref": "https://example.com/elsewhere.json"},
    {"properties": {"a": {"$id": "https://example.com/a", "$ref": "#/$defs/b"}}},
    {"properties": 5, "propertyNames": {"enum": ["a"]}},
    {"type": []},
    {"anyOf": []},
    {"format": [], "type": "nothing"},
]


@pytest.mark.parametrize("schema", REFUSED, ids=str)
def test_what_cannot_be_said_is_refused(schema: dict[str, Any], judge: Judge) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        judge.schema(schema)
    assert refusal.value.param == "response_format"


@pytest.mark.parametrize("step", [0, -1, -0.5, 0.0, False])
def test_a_step_is_greater_than_nothing(step: float, judge: Judge) -> None:
    for schema in ({"multipleOf": step}, {"type": "integer", "multipleOf": step}):
        inner = {"type": "object", "properties": {"multipleOf": schema}}
        for whole in (schema, inner):
            with pytest.raises(InvalidRequestError, match="'multipleOf' must be greater than 0"):
                judge.schema(whole)
    assert judge.allows(judge.schema({"const": {"multipleOf": -1}}), {"multipleOf": -1})


def test_references_are_not_followed_where_a_part_has_its_own_address(judge: Judge) -> None:
    schema: dict[str, Any] = {
        "$defs": {"a": {"type": "null"}, "b": {"type": "string"}},
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
    }
    assert judge.allows(judge.schema(schema), "a")
    schema["$defs"]["c"] = {"$id": "https://example.com/a"}
    with pytest.raises(InvalidRequestError):
        judge.schema(schema)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Everything(BaseModel):
    by_tag: Annotated[Cat | Dog, Field(discriminator="kind")]
    by_function: Annotated[
        Annotated[Cat, Tag("cat")] | Annotated[Dog, Tag("dog")],
        Discriminator(lambda animal: animal.kind),
    ]
    by_colour: dict[Colour, int]
    by_letter: dict[Literal["a", "b"], bool]
    by_short_name: dict[Annotated[str, Field(min_length=1, max_length=3)], int]
    tree: list[Everything] = []


def test_what_pydantic_makes_of_its_models_is_followed(judge: Judge) -> None:
    grammar = judge.schema(Everything.model_json_schema())
    answer = Everything(
        by_tag=Cat(kind="cat", lives=9),
        by_function=Dog(kind="dog", name="Rex"),
        by_colour={Colour.RED: 1},
        by_letter={"b": True},
        by_short_name={"abc": 5},
    )
    told = answer.model_dump(mode="json")
    assert judge.allows(grammar, told)
    assert not judge.allows(grammar, told | {"by_colour": {"green": 1}})
    assert not judge.allows(grammar, told | {"by_tag": {"kind": "dog", "lives": 9}})
