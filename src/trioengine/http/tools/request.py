"""What a chat request says of tools, checked, and what the template is told of them. Pure."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from trioengine.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NamedChoice", "Tool", "ToolChoice", "ToolUse", "calls_schema", "read_tools"]

MAX_TOOLS: Final = 128
MAX_FORCED_CALLS: Final = 16  # a small model would go on for ever
_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function that the model may call. ``parameters`` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """One entry of ``tools``."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(msgspec.Struct, kw_only=True):
    """Which function."""

    name: str


class NamedChoice(msgspec.Struct, kw_only=True):
    """``tool_choice`` that names the function to call."""

    type: Literal["function"] = "function"
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How a request uses tools.

    Attributes:
        tools: All that the model is told of.
        parallel: It may call several in one answer.
        forced: The functions of which it must call one; empty where it need not call any.
        named: The client has named the one.
    """

    tools: Sequence[Tool]
    parallel: bool
    forced: Sequence[Tool] = ()
    named: bool = False

    def for_template(self) -> list[dict[str, Any]]:
        """Return the tools as templates expect them: what the client did not say is not there."""
        return [
            {"type": tool.type, "function": _said(msgspec.structs.asdict(tool.function))}
            for tool in self.tools
        ]


def read_tools(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None
) -> ToolUse | None:
    """Return how tools are used, ``None`` where they are not.

    Raises:
        InvalidRequestError: A name is no name or there twice, there are none or too many, or the
            choice is of something that is not there.
    """
    if tools is None:
        if choice not in (None, "none"):
            raise InvalidRequestError(
                "'tool_choice' is only allowed with 'tools'.", param="tool_choice"
            )
        return None
    if not tools:
        raise InvalidRequestError("'tools' must not be an empty list.", param="tools")
    _check_names(tools)
    if choice == "none":
        return None
    several = parallel is not False
    if choice in (None, "auto"):
        return ToolUse(tools=tools, parallel=several)
    if not isinstance(choice, NamedChoice):
        return ToolUse(tools=tools, parallel=several, forced=tools)
    chosen = [tool for tool in tools if tool.function.name == choice.function.name]
    if not chosen:
        raise InvalidRequestError(
            f"'tool_choice' names the function {choice.function.name[:64]!r}, which is not in "
            "'tools'.",
            param="tool_choice",
        )
    return ToolUse(tools=tools, parallel=False, forced=chosen, named=True)


def calls_schema(use: ToolUse) -> str:
    """Return the JSON schema of a list of calls of the forced functions.

    What a function takes is a document of its own to whoever wrote it: where its parts refer to one
    another they find each other here, too.

    Raises:
        InvalidRequestError: It is nested too deeply.
    """
    try:
        return json.dumps(_calls_schema(use))
    except RecursionError:
        raise InvalidRequestError("'tools' are nested too deeply.", param="tools") from None


def _calls_schema(use: ToolUse) -> dict[str, Any]:
    calls, takes = [], {}
    for number, tool in enumerate(use.forced):
        place = f"#/$defs/{number}"
        takes[str(number)] = _moved(tool.function.parameters or {"type": "object"}, place)
        properties = {"name": {"const": tool.function.name}, "arguments": {"$ref": place}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    most = MAX_FORCED_CALLS if use.parallel else 1
    items = {"anyOf": calls}
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most, "$defs": takes}


def _moved(schema: Any, place: str) -> Any:
    """Return a schema whose references to itself hold where it stands now."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict) or "$id" in schema:  # one with an address refers to that
        return schema
    moved = {
        name: value if name in _NO_SCHEMAS else _moved(value, place)
        for name, value in schema.items()
    }
    reference = moved.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = place + reference[1:]
    return moved


_NO_SCHEMAS: Final = frozenset({"const", "enum", "default", "examples"})


def _check_names(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(
            f"'tools' takes at most {MAX_TOOLS} functions, got {len(tools)}.", param="tools"
        )
    seen: set[str] = set()
    for number, tool in enumerate(tools):
        name = tool.function.name
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"A function's name must have 1 to 64 letters, digits, '_', '-', '.' or ':', got "
                f"{name[:70]!r}.",
                param=f"tools[{number}].function.name",
            )
        if name in seen:
            raise InvalidRequestError(
                f"The function {name!r} is there twice.", param=f"tools[{number}].function.name"
            )
        seen.add(name)


def _said(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
