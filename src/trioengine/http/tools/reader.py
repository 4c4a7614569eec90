"""One reply's text, piece by piece → content and calls. Pure."""

from __future__ import annotations

import dataclasses
import uuid
from typing import TYPE_CHECKING

from trioengine.http.tools.formats import FORMATS, Call, Reading

if TYPE_CHECKING:
    from trioengine.http.tools.formats import Format

__all__ = ["MadeCall", "ToolReader", "ToolReading"]


@dataclasses.dataclass(frozen=True, slots=True)
class MadeCall:
    """A call as clients get it: ``index`` in the reply, and an id that its result will name."""

    index: int
    id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolReading:
    """How a reply is read.

    Attributes:
        format: Name of the format.
        parallel: Whether calls after the first count.
        named: The client has named the function: then a call is what ``stop`` means.
        schema: JSON schema of the reply, where it must be calls and nothing else.
    """

    format: str
    parallel: bool
    named: bool
    schema: str | None = None


class ToolReader:
    """Reads one reply.

    Attributes:
        num_calls: Calls so far.
    """

    def __init__(self, how: ToolReading) -> None:
        self._format: Format = FORMATS[how.format]
        self._most = None if how.parallel else 1
        self._text = ""
        self._told = Reading("", ())
        self.num_calls = 0

    def feed(self, text: str, *, final: bool) -> tuple[str, list[MadeCall]]:
        """Take the next piece; return the content and calls that are certain by now, and new."""
        self._text += text
        now = self._format(self._text, final)
        content = now.content[len(self._told.content) :]
        calls = now.calls[: self._most][self.num_calls :]
        self._told = now
        return content, [self._made(call) for call in calls]

    def _made(self, call: Call) -> MadeCall:
        index = self.num_calls
        self.num_calls += 1
        return MadeCall(index, f"call_{uuid.uuid4().hex[:24]}", call.name, call.arguments)
