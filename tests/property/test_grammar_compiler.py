"""Whatever a client sends as a shape is compiled or refused: nothing else comes of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helpers.grammars import Judge
from trioengine.errors import InvalidRequestError
from trioengine.structured import StructuredOutput, Thought

if TYPE_CHECKING:
    from trioengine.structured import StructuredKind

JUDGE = Judge()
KEYWORDS = [
    "$ref", "$id", "$schema", "$defs", "$anchor", "type", "enum", "const", "properties", "required",
    "additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties",
    "minProperties", "maxProperties", "items", "prefixItems", "additionalItems", "minItems",
    "maxItems", "uniqueItems", "contains", "minContains", "unevaluatedItems", "pattern", "format",
    "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentRequired",
    "title", "default", "nullable", "discriminator",
]  # fmt: skip
WORDS = [
    "object", "array", "string", "number", "integer", "boolean", "null", "a", "date", "uuid", "",
    "#", "#/$defs/a", "#/properties/a", "^a.*b$", "[", "é\n", "(?=a)", "http://x", "#a",
]  # fmt: skip
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.sampled_from(WORDS),
    st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**70), 2**70),
)  # fmt: skip
names = st.one_of(st.sampled_from(KEYWORDS), st.sampled_from(["a", "b"]))
schemas = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)
thoughts: st.SearchStrategy[Thought] = st.sampled_from(["none", "optional", "open"])


def settle(kind: StructuredKind, spec: str, thought: Thought = "none") -> None:
    try:
        JUDGE.compile(StructuredOutput(kind, spec, thought=thought, param="p")).begin()
    except InvalidRequestError as error:
        refusal = error
    else:
        return
    assert (refusal.param, bool(refusal.message)) == ("p", True)


@given(st.dictionaries(names, schemas, max_size=4), thoughts)
def test_any_schema(schema: dict[str, Any], thought: Thought) -> None:
    settle("json", json.dumps(schema), thought)


@given(st.text(st.sampled_from('ab()[]{}*+?|\\.^$-,0129dwpL:<>=!é\n/"'), min_size=1, max_size=25))
@example("a{,5}")
@example("[^]]")
def test_any_expression(pattern: str) -> None:
    if pattern.strip():
        settle("regex", pattern)


@given(
    st.lists(
        st.sampled_from(
            ["start", ":", "::=", "root", '"a"', "|", "/b/", "A", "\n", "(", ")", "{1,3}", "*", "%",
             "json", "{}", "import", "[", "]", "lazy", "@", "<[1]>", "&", "~", "#", "?"]
        ),
        min_size=1, max_size=14,
    ),
    thoughts,
)  # fmt: skip
def test_any_grammar(words: list[str], thought: Thought) -> None:
    if "".join(words).strip():
        settle("grammar", " ".join(words), thought)


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"enum": [json.loads("[" * 800 + "]" * 800)]}, {"const": 1}]},
        {"enum": [json.loads('{"a":' * 800 + "1" + "}" * 800)]},
        {"$ref": "#/$ref"},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "propertyNames": {"$ref": "#/$defs/a"}},
        {"properties": {"": {"$ref": "#/properties/"}}},
        {"items": {"$ref": "#"}, "type": "array", "minItems": 1},
        {"required": ["a"] * 1000},
        {"enum": [{}] * 1000},
    ],
    ids=lambda schema: str(schema)[:20],
)
def test_odd_schemas(schema: dict[str, Any]) -> None:
    settle("json", json.dumps(schema))
