"""What shape an answer is to have: as a client asked for it, bounded, not yet understood.

Whether it is a sound schema, expression or grammar is found out in the engine process, where it is
compiled beside the step loop. What can be refused without understanding it is refused here.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from trioengine.errors import InvalidRequestError

__all__ = [
    "MAX_CHOICES",
    "MAX_GRAMMAR_CHARS",
    "MAX_REGEX_CHARS",
    "MAX_SCHEMA_CHARS",
    "THOUGHT_BEGIN",
    "THOUGHT_END",
    "StructuredKind",
    "StructuredOutput",
    "Thought",
]

MAX_SCHEMA_CHARS: Final = 64 * 1024
MAX_GRAMMAR_CHARS: Final = 64 * 1024
MAX_REGEX_CHARS: Final = 4096
MAX_CHOICES: Final = 1024

THOUGHT_BEGIN: Final = "<think>"
THOUGHT_END: Final = "</think>"
"""Between them stands what a model thinks before it answers."""

Thought = Literal["none", "optional", "open"]
StructuredKind = Literal["json_object", "json", "regex", "choice", "grammar"]

_MAX_CHARS: Final[dict[str, int]] = {
    "json_object": 0,
    "json": MAX_SCHEMA_CHARS,
    "regex": MAX_REGEX_CHARS,
    "choice": MAX_GRAMMAR_CHARS,
    "grammar": MAX_GRAMMAR_CHARS,
}


class StructuredOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """The language that an answer must be a word of. Hashable: equal ones are compiled once.

    Attributes:
        kind: What ``spec`` is.
        spec: ``json``: a JSON schema, as JSON. ``regex``: a regular expression for the whole text.
            ``choice``: a JSON list of strings. ``grammar``: a context-free grammar, Lark's or
            GBNF. ``json_object``: empty; any JSON object will do.
        lenient: Keywords of a schema that cannot be enforced are passed over instead of refused.
        param: Under which name the client asked for it, for errors.
        thought: What comes before what has this shape. ``open``: the rest of a thought that the
            prompt has begun. ``optional``: a whole thought, if the model begins with one.

    Raises:
        InvalidRequestError: It is empty, or longer than its kind may be.
    """

    kind: StructuredKind
    spec: str = ""
    lenient: bool = False
    param: str = "structured_outputs"
    thought: Thought = "none"

    def __post_init__(self) -> None:
        if self.kind != "json_object" and not self.spec.strip():
            raise InvalidRequestError(f"{self.param} must not be empty", param=self.param)
        most = _MAX_CHARS[self.kind]
        if len(self.spec) > most:
            raise InvalidRequestError(
                f"{self.param} takes at most {most} characters of {self.kind}, "
                f"got {len(self.spec)}",
                param=self.param,
            )
