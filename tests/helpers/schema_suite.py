"""A public collection of JSON schemas, each with values that are and are not of its shape.

It is the JSON-Schema-Test-Suite (MIT, ``tests/data/json_schema_test_suite.LICENSE``) as the source
distribution of the package ``jsonschema`` 4.26.0 ships it: drafts 2020-12, 2019-09, 7, 6 and 4 with
their optional parts, in this order, one line a case; schemas that differ from an earlier one in
``$schema`` only are left out. No wheel carries it, so a copy stands here.
"""

from __future__ import annotations

import datetime
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jsonschema

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Case", "suite", "validator"]

_FILE = Path(__file__).parent.parent / "data" / "json_schema_test_suite.jsonl"


_KINDS = {
    "draft2020-12": jsonschema.Draft202012Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft4": jsonschema.Draft4Validator,
}


class Case(NamedTuple):
    """A schema, and values with whether they are valid."""

    source: str
    title: str
    schema: Any
    values: list[tuple[Any, bool]]

    def __str__(self) -> str:
        return f"{self.source}: {self.title}"


@functools.cache
def suite() -> tuple[Case, ...]:
    """Return all cases."""
    return tuple(Case(*json.loads(line)) for line in _FILE.read_text().splitlines())


def validator(case: Case) -> Any:
    """Return what judges values by a schema, by formats that a grammar asserts, too."""
    kind = _KINDS[case.source.partition("/")[0]]
    return kind(case.schema, format_checker=_formats())


@functools.cache
def _formats() -> jsonschema.FormatChecker:
    formats = jsonschema.FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))
    for name, read in (
        ("date-time", datetime.datetime.fromisoformat),
        ("time", datetime.time.fromisoformat),
    ):
        formats.checks(name, raises=ValueError)(functools.partial(_is_read_by, read))
    return formats


def _is_read_by(read: Callable[[str], object], value: object) -> bool:
    if isinstance(value, str):
        read(value)  # raises
    return True
