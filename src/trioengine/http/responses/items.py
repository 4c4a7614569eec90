"""The items that a response is a list of: thoughts, a message, calls. Pure."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from trioengine.http.replies import new_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trioengine.http.tools.reader import MadeCall

__all__ = ["MESSAGE", "REASONING", "Item", "ItemKind", "OpenItem", "call_item"]

Item = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ItemKind:
    """A kind of item that consists of text.

    Attributes:
        type: Its name.
        prefix: What its ids begin with.
        more: What else such an item has.
        part: Type of the one part of its content.
        with_part: What else that part has.
        delta: Type of the event with new text.
        text_done: Type of the event with the whole text.
        with_text: What else these two events have.
    """

    type: str
    prefix: str
    more: Mapping[str, Any]
    part: str
    with_part: Mapping[str, Any]
    delta: str
    text_done: str
    with_text: Mapping[str, Any]

    def new_item(self, status: str, text: str) -> Item:
        """Return an item with this text and an id of its own."""
        part = {"type": self.part, "text": text, **self.with_part}
        item = {"type": self.type, "id": new_id(self.prefix), **self.more}
        return item | {"status": status, "content": [part]}


@dataclasses.dataclass(slots=True)
class OpenItem:
    """An item that is being streamed, and the texts of which it consists so far."""

    kind: ItemKind
    item: Item
    texts: list[str] = dataclasses.field(default_factory=list)


MESSAGE: Final = ItemKind(
    type="message",
    prefix="msg_",
    more={"role": "assistant"},
    part="output_text",
    with_part={"annotations": [], "logprobs": []},
    delta="response.output_text.delta",
    text_done="response.output_text.done",
    with_text={"logprobs": []},
)
REASONING: Final = ItemKind(
    type="reasoning",
    prefix="rs_",
    more={"summary": []},
    part="reasoning_text",
    with_part={},
    delta="response.reasoning_text.delta",
    text_done="response.reasoning_text.done",
    with_text={},
)


def call_item(call: MadeCall) -> Item:
    """Return the item of a call, which is whole from its beginning."""
    return {
        "type": "function_call",
        "id": call.id.replace("call_", "fc_", 1),
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }
