"""Engine deltas → the events and the object of a response. Pure.

A response is a list of items: thoughts, a message, calls. In a stream each is added, filled and
done before the next one begins; the last event carries the whole.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

import msgspec

from trioengine.http.replies import ReplyHead
from trioengine.http.sse import END
from trioengine.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioengine.errors import TrioEngineError
    from trioengine.http.details import Piece, Reason
    from trioengine.http.replies import Choice
    from trioengine.http.responses.request import ResponseRequest
    from trioengine.http.tools.reader import MadeCall
    from trioengine.outputs import Usage

__all__ = ["ResponseReplies", "response_head"]

Item = dict[str, Any]
_encode: Final = msgspec.json.Encoder().encode


def response_head(model: str, fingerprint: str) -> ReplyHead:
    """Return the head of a response that begins now."""
    return ReplyHead(f"resp_{uuid.uuid4().hex}", int(time.time()), model, fingerprint)


class ResponseReplies:
    """Fulfils ``Replies``; there is one choice."""

    done = b""  # the last event says that it is the last

    def __init__(self, head: ReplyHead, body: ResponseRequest) -> None:
        self.head = head
        self._body = body
        self._number = 0
        self._output: list[Item] = []
        self._open: _OpenItem | None = None
        self._reason: Reason = FinishReason.STOP

    # Events ---------------------------------------------------------------------------------

    def opening(self, index: int) -> bytes:
        response = {"response": self._response("in_progress", None)}
        return self._event("response.created", response) + self._event(
            "response.in_progress", response
        )

    def text(self, index: int, text: str) -> bytes:
        begun = self._begin(_MESSAGE)
        return begun + self._more(text)

    def piece(self, index: int, piece: Piece) -> bytes:
        events = b""
        if piece.reasoning:
            events += self._begin(_REASONING) + self._more(piece.reasoning)
        if piece.text:
            events += self.text(index, piece.text)
        return events + b"".join(self._call(call) for call in piece.calls)

    def finish(
        self,
        index: int,
        reason: Reason,
        stop_reason: int | str | None,
        rest: Piece | None = None,
    ) -> bytes:
        self._reason = reason
        return self._end(_status(reason))

    def usage(self, usage: Usage) -> bytes:
        status = _status(self._reason)
        kind = "response.completed" if status == "completed" else "response.incomplete"
        return self._event(kind, {"response": self._response(status, usage)})

    def usage_so_far(self, usage: Usage) -> None:
        """Say nothing: only the last event has a usage."""

    def failure(self, error: TrioEngineError) -> bytes:
        """Return the event that ends a stream which failed."""
        return self._event(
            "error",
            {
                "code": error.code,
                "message": error.message.encode("utf-8", "replace").decode(),
                "param": getattr(error, "param", None),
            },
        )

    def _begin(self, kind: _ItemKind) -> bytes:
        """Open an item of this kind, if it is not open already."""
        if self._open is not None and self._open.kind is kind:
            return b""
        ended = self._end("completed")
        self._open = _OpenItem(kind, kind.new_item("in_progress", ""))
        added = self._event(
            "response.output_item.added",
            {"output_index": len(self._output), "item": self._open.item | {"content": []}},
        )
        part = self._open.item["content"][0]
        return ended + added + self._event(kind.part_added, self._place() | {"part": part})

    def _more(self, text: str) -> bytes:
        if self._open is None:
            return b""
        self._open.texts.append(text)
        extra: Item = {"logprobs": []} if self._open.kind is _MESSAGE else {}
        return self._event(self._open.kind.delta, self._place() | {"delta": text} | extra)

    def _end(self, status: str) -> bytes:
        """Close the item that is open, if one is."""
        opened = self._open
        if opened is None:
            return b""
        text = "".join(opened.texts)
        extra: Item = {"logprobs": []} if opened.kind is _MESSAGE else {}
        item = opened.kind.new_item(status, text) | {"id": opened.item["id"]}
        events = (
            self._event(opened.kind.text_done, self._place() | {"text": text} | extra)
            + self._event(opened.kind.part_done, self._place() | {"part": item["content"][0]})
            + self._item_done(item)
        )
        self._open = None
        return events

    def _call(self, call: MadeCall) -> bytes:
        ended = self._end("completed")
        item = _call_item(call)
        place = {"item_id": item["id"], "output_index": len(self._output)}
        empty = item | {"arguments": "", "status": "in_progress"}
        return (
            ended
            + self._event(
                "response.output_item.added",
                {"output_index": place["output_index"], "item": empty},
            )
            + self._event(
                "response.function_call_arguments.delta", place | {"delta": call.arguments}
            )
            + self._event(
                "response.function_call_arguments.done",
                place | {"arguments": call.arguments, "name": call.name},
            )
            + self._item_done(item)
        )

    def _item_done(self, item: Item) -> bytes:
        place = {"output_index": len(self._output), "item": item}
        self._output.append(item)
        return self._event("response.output_item.done", place)

    def _place(self) -> Item:
        item_id = self._open.item["id"] if self._open is not None else ""
        return {"item_id": item_id, "output_index": len(self._output), "content_index": 0}

    def _event(self, kind: str, fields: Item) -> bytes:
        event = {"type": kind, "sequence_number": self._number} | fields
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + _encode(event) + END

    # The object -----------------------------------------------------------------------------

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        choice = choices[0]
        status = _status(choice.finish_reason)
        details = choice.details
        if details is not None and details.reasoning:
            self._output.append(_REASONING.new_item("completed", details.reasoning))
        calls = details.calls if details is not None else []
        if choice.text or not calls:
            self._output.append(_MESSAGE.new_item(status, choice.text))
        self._output += [_call_item(call) for call in calls]
        self._reason = choice.finish_reason
        return _encode(self._response(status, usage))

    def _response(self, status: str, usage: Usage | None) -> Item:
        body, ended = self._body, status != "in_progress"
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": cut,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.head.model,
            "output": self._output if ended else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}} | _told_text(body),
            "tool_choice": body.tool_choice or "auto",
            "tools": [_told_tool(tool) for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": body.user,
            "metadata": body.metadata or {},
        }


@dataclasses.dataclass(frozen=True, slots=True)
class _ItemKind:
    """How items that consist of text are named, and their events."""

    type: str
    prefix: str
    part: str
    part_added: str
    delta: str
    text_done: str
    part_done: str

    def new_item(self, status: str, text: str) -> Item:
        part: Item = {"type": self.part, "text": text}
        item: Item = {"type": self.type, "id": f"{self.prefix}_{uuid.uuid4().hex}"}
        if self.type == "message":
            part |= {"annotations": [], "logprobs": []}
            item |= {"role": "assistant"}
        else:
            item |= {"summary": []}
        return item | {"status": status, "content": [part]}


@dataclasses.dataclass(slots=True)
class _OpenItem:
    kind: _ItemKind
    item: Item
    texts: list[str] = dataclasses.field(default_factory=list)


_MESSAGE: Final = _ItemKind(
    "message",
    "msg",
    "output_text",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
)
_REASONING: Final = _ItemKind(
    "reasoning",
    "rs",
    "reasoning_text",
    "response.content_part.added",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
)


def _status(reason: Reason) -> str:
    return "incomplete" if reason is FinishReason.LENGTH else "completed"


def _call_item(call: MadeCall) -> Item:
    return {
        "type": "function_call",
        "id": call.id.replace("call_", "fc_", 1),
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _told_text(body: ResponseRequest) -> Item:
    said: Item = {} if body.text is None else msgspec.to_builtins(body.text)
    return said


def _told_tool(tool: Any) -> Item:
    fields = msgspec.structs.asdict(tool)
    return fields | {"strict": bool(fields["strict"]), "parameters": fields["parameters"] or {}}


def _usage(usage: Usage) -> Item:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
