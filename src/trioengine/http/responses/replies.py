"""Engine deltas → the events and the object of a response. Pure.

A response is a list of items: thoughts, a message, calls. In a stream each is added, filled and
done before the next one begins; the last event carries the whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from trioengine.http.responses.items import MESSAGE, REASONING, Item, OpenItem, call_item
from trioengine.http.sse import END
from trioengine.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioengine.errors import TrioEngineError
    from trioengine.http.details import Piece, Reason
    from trioengine.http.replies import Choice, ReplyHead
    from trioengine.http.responses.items import ItemKind
    from trioengine.http.responses.request import ResponseRequest
    from trioengine.http.tools.reader import MadeCall
    from trioengine.outputs import Usage

__all__ = ["ResponseReplies"]

_encode: Final = msgspec.json.Encoder().encode


class ResponseReplies:
    """Fulfils ``Replies``; there is one choice."""

    done = b""  # the last event says that it is the last

    def __init__(self, head: ReplyHead, body: ResponseRequest) -> None:
        self.head = head
        self._body = body
        self._number = 0
        self._output: list[Item] = []
        self._open: OpenItem | None = None
        self._reason: Reason = FinishReason.STOP

    # Events ---------------------------------------------------------------------------------

    def opening(self, index: int) -> bytes:
        response = {"response": self._response("in_progress", None)}
        return self._event("response.created", response) + self._event(
            "response.in_progress", response
        )

    def text(self, index: int, text: str) -> bytes:
        begun = self._begin(MESSAGE)
        return begun + self._more(text)

    def piece(self, index: int, piece: Piece) -> bytes:
        events = b""
        if piece.reasoning:
            events += self._begin(REASONING) + self._more(piece.reasoning)
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
        """Return the events that end a stream which failed: the response's, and the reason.

        A response has one of OpenAI's codes for its error, the event the same as everywhere here.
        """
        message = error.message.encode("utf-8", "replace").decode()
        failed = self._response("failed", None)
        failed["error"] = {"code": "server_error", "message": message}
        reason = {"code": error.code, "message": message, "param": getattr(error, "param", None)}
        return self._event("response.failed", {"response": failed}) + self._event("error", reason)

    def _begin(self, kind: ItemKind) -> bytes:
        """Open an item of this kind, if it is not open already."""
        if self._open is not None and self._open.kind is kind:
            return b""
        ended = self._end("completed")
        self._open = OpenItem(kind, kind.new_item("in_progress", ""))
        added = self._item_added(self._open.item | {"content": []})
        part = self._place() | {"part": self._open.item["content"][0]}
        return ended + added + self._event("response.content_part.added", part)

    def _more(self, text: str) -> bytes:
        if self._open is None:
            return b""
        self._open.texts.append(text)
        kind = self._open.kind
        return self._event(kind.delta, {**self._place(), "delta": text, **kind.with_text})

    def _end(self, status: str) -> bytes:
        """Close the item that is open, if one is."""
        opened = self._open
        if opened is None:
            return b""
        kind, text = opened.kind, "".join(opened.texts)
        item = kind.new_item(status, text) | {"id": opened.item["id"]}
        events = (
            self._event(kind.text_done, {**self._place(), "text": text, **kind.with_text})
            + self._event(
                "response.content_part.done", self._place() | {"part": item["content"][0]}
            )
            + self._item_done(item)
        )
        self._open = None
        return events

    def _call(self, call: MadeCall) -> bytes:
        ended = self._end("completed")
        item = call_item(call)
        place = {"item_id": item["id"], "output_index": len(self._output)}
        empty = item | {"arguments": "", "status": "in_progress"}
        return (
            ended
            + self._item_added(empty)
            + self._event(
                "response.function_call_arguments.delta", place | {"delta": call.arguments}
            )
            + self._event(
                "response.function_call_arguments.done",
                place | {"arguments": call.arguments, "name": call.name},
            )
            + self._item_done(item)
        )

    def _item_added(self, item: Item) -> bytes:
        place = {"output_index": len(self._output), "item": item}
        return self._event("response.output_item.added", place)

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
            self._output.append(REASONING.new_item("completed", details.reasoning))
        calls = details.calls if details is not None else []
        if choice.text or not calls:
            self._output.append(MESSAGE.new_item(status, choice.text))
        self._output += [call_item(call) for call in calls]
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


def _status(reason: Reason) -> str:
    return "incomplete" if reason is FinishReason.LENGTH else "completed"


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
        "total_tokens": usage.total_tokens,
    }
