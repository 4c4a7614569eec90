"""Tools for a model whose chat template knows none: told in the system message. Pure.

The words are those of the Hermes format, which many small models have seen in training. What the
conversation has of calls and results is spelled in the same way.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FORMAT", "with_tools"]

FORMAT: Final = "hermes"

_PREAMBLE: Final = """\
You can call functions. These are the functions, each as JSON:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON like this, and nothing else:
<tool_call>
{{"name": "FUNCTION", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""


def with_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the conversation with the tools, calls and results in its text.

    Args:
        messages: As templates expect them.
        tools: As templates expect them; empty where the conversation only remembers some.
    """
    turns = [_spelled(turn) for turn in messages]
    if not tools:
        return turns
    preamble = _PREAMBLE.format(tools="\n".join(_json(tool["function"]) for tool in tools))
    if turns and turns[0]["role"] == "system":
        first = turns[0] | {"content": f"{turns[0]['content']}\n\n{preamble}".strip()}
        return [first, *turns[1:]]
    return [{"role": "system", "content": preamble}, *turns]


def _spelled(turn: dict[str, Any]) -> dict[str, Any]:
    if turn["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{turn['content']}\n</tool_response>",
        }
    calls = turn.get("tool_calls")
    if not calls:
        return turn
    spelled = [f"<tool_call>\n{_json(call['function'])}\n</tool_call>" for call in calls]
    rest = {name: value for name, value in turn.items() if name != "tool_calls"}
    return rest | {"content": "\n".join([*filter(None, [turn["content"]]), *spelled])}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
