"""One request to a server under a history, as its client sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from helpers.server_operations import CHAT, Submit
from helpers.socket_visitor import SocketVisitor, post, read_answer

if TYPE_CHECKING:
    from helpers.socket_visitor import Answer

__all__ = ["SEED", "WORDS", "Request"]

SEED = 3
WORDS = "to be or not to be that is the question"


class Request:
    """One request, as its client sees it.

    Attributes:
        submit: What is asked for.
        visitor: Its connection.
        rest: What has not been sent.
        left: The client has gone, or said that it would send nothing more.
        cancelled: Somebody asked to cancel it.
        gone_on: Its connection carries a later request.
        second: Another request was sent behind it.
        reused: Its connection had carried an earlier one.
        was_lazy: It left something unread for a while.
        began_s: When it was submitted.
    """

    def __init__(self, submit: Submit, visitor: SocketVisitor, number: int) -> None:
        self.submit = submit
        self.visitor = visitor
        self.left = self.cancelled = self.gone_on = self.second = self.reused = False
        self.was_lazy = self.lazy = submit.lazy
        self.began_s = trio.current_time()
        self.answer: Answer | None = None
        self._read = b""
        data = post(submit.path, _body(submit, number))
        half = len(data) - 20 if submit.late_body else len(data)
        self.rest = data[half:]
        visitor.received = b""
        visitor.send(data[:half])

    def look(self) -> None:
        """Read, unless it is lazy."""
        if not self.left and not self.gone_on:
            if not self.lazy:
                self.visitor.read()
            if self.visitor.received is not self._read:  # most have had nothing new
                self._read = self.visitor.received
                self.answer = read_answer(self._read)

    @property
    def answered(self) -> bool:
        """The answer is whole."""
        return self.answer is not None and self.answer.complete

    @property
    def pending(self) -> bool:
        """The client waits for (the rest of) its answer."""
        return not (self.left or self.answered or self.gone_on or self.visitor.end)

    def is_overdue(self, now_s: float) -> bool:
        """Its own deadline has passed, and it has not been told."""
        timeout_s, waits_by_itself = self.submit.timeout_s, self.lazy or self.submit.late_body
        if timeout_s is None or waits_by_itself or not self.pending:
            return False
        return now_s > self.began_s + timeout_s

    def finish_sending(self) -> None:
        """Send what is left of the body."""
        rest, self.rest = self.rest, b""
        if rest:
            self.visitor.send(rest)


def _body(submit: Submit, number: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "n": submit.num_choices,
        "max_tokens": submit.max_tokens,
        "seed": SEED,
        "ignore_eos": True,
        "temperature": 1.0,
        "stream": submit.stream,
        "priority": submit.priority,
        "user": f"client {number}",
    }
    if submit.timeout_s is not None:
        body["timeout"] = submit.timeout_s
    text = WORDS[: submit.prompt_size]
    if submit.path == CHAT:
        return {"messages": [{"role": "user", "content": text}], **body}
    return {"prompt": text, **body}
