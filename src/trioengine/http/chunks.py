"""Engine deltas → the objects of chats and completions: chunks of a stream, or the whole. Pure.

A streamed chunk differs from the one before it in little but its text. So all the rest is encoded
once per request and choice, and a chunk is prefix + encoded text + suffix: no dict is built and
nothing but the text is encoded while tokens arrive.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UNSET

from trioengine.http.answers import (
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    MadeFunction,
    MadeToolCall,
    PromptTokensDetails,
    ReplyMessage,
    UsageInfo,
)
from trioengine.http.errors import error_body
from trioengine.http.sse import DATA, DONE, END, event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioengine.errors import TrioEngineError
    from trioengine.http.details import Piece, Reason
    from trioengine.http.replies import Choice, ReplyHead
    from trioengine.http.tools.reader import MadeCall
    from trioengine.outputs import Usage

__all__ = ["ChatReplies", "CompletionReplies"]

_encode: Final = msgspec.json.Encoder().encode

_HOLE: Final = "0b7c6a52"  # stands where the text goes while a prefix and suffix are cut


class _Replies(abc.ABC):
    """What the two endpoints share: events cut into prefix and suffix."""

    done = DONE
    _object: str

    def failure(self, error: TrioEngineError) -> bytes:
        return event(error_body(error))

    def __init__(self, head: ReplyHead, *, include_usage: bool) -> None:
        self.head = head
        self._usage: dict[str, UsageInfo | None] = {"usage": None} if include_usage else {}
        self._cuts: dict[int, tuple[bytes, bytes]] = {}

    def opening(self, index: int) -> bytes:
        event = self._event([self._choice(index, _HOLE)], self._usage)
        prefix, _, suffix = event.rpartition(_encode(_HOLE))
        self._cuts[index] = prefix, suffix
        return b""

    def text(self, index: int, text: str) -> bytes:
        prefix, suffix = self._cuts[index]
        return prefix + _encode(text) + suffix

    def usage(self, usage: Usage) -> bytes:
        return self._event([], {"usage": _usage_info(usage)})

    def usage_so_far(self, usage: Usage) -> None:
        self._usage = {"usage": _usage_info(usage)}

    def finish(
        self,
        index: int,
        reason: Reason,
        stop_reason: int | str | None,
        rest: Piece | None = None,
    ) -> bytes:
        choice = self._choice(index, "", reason) | {"stop_reason": stop_reason}
        if rest is not None:
            return self._detailed(choice, rest)
        return self._event([choice], self._usage)

    @abc.abstractmethod
    def _choice(self, index: int, text: str, reason: Reason | None = None) -> dict[str, Any]:
        """Return a chunk's choice with this text."""

    @abc.abstractmethod
    def _detailed(self, choice: dict[str, Any], piece: Piece) -> bytes:
        """Return the event of a choice with all else that ``piece`` tells."""

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        head = self.head
        body = {
            "id": head.id,
            "object": self._object,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
            "choices": choices,
        } | usage
        return DATA + _encode(body) + END


class ChatReplies(_Replies):
    """``chat.completion`` and its chunks: role first, then text, then an empty finish."""

    _object = "chat.completion.chunk"

    def opening(self, index: int) -> bytes:
        super().opening(index)
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._event([_chat_choice(index, delta)], self._usage)

    def piece(self, index: int, piece: Piece) -> bytes:
        deltas: list[dict[str, Any]] = []
        if piece.reasoning:
            deltas.append({"reasoning_content": piece.reasoning})
        if piece.text:
            deltas.append({"content": piece.text})
        deltas += [{"tool_calls": [_call_delta(call)]} for call in piece.calls]
        *before, last = (_chat_choice(index, delta) for delta in deltas)
        events = [self._event([choice], self._usage) for choice in before]
        return b"".join(events) + self._detailed(last, piece)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return _encode(
            ChatCompletion(
                **dataclasses.asdict(self.head),
                choices=[
                    ChatChoice(
                        index=index,
                        message=_message(choice),
                        finish_reason=choice.finish_reason,
                        stop_reason=choice.stop_reason,
                        **_said(choice, "logprobs", "token_ids"),
                    )
                    for index, choice in enumerate(choices)
                ],
                usage=_usage_info(usage),
                **_said(choices[0], "prompt_token_ids", "prompt_logprobs"),
            )
        )

    def _choice(self, index: int, text: str, reason: Reason | None = None) -> dict[str, Any]:
        return _chat_choice(index, {"content": text} if text else {}, reason)

    def _detailed(self, choice: dict[str, Any], piece: Piece) -> bytes:
        return self._event([_with_tokens(choice, piece)], self._usage | _prompt_ids(piece))


class CompletionReplies(_Replies):
    """``text_completion``, whose chunks have the same shape as the whole."""

    _object = "text_completion"

    def piece(self, index: int, piece: Piece) -> bytes:
        return self._detailed(self._choice(index, piece.text), piece)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return _encode(
            Completion(
                **dataclasses.asdict(self.head),
                choices=[
                    CompletionChoice(
                        index=index,
                        text=choice.text,
                        finish_reason=choice.finish_reason,
                        stop_reason=choice.stop_reason,
                        **_said(
                            choice, "logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs"
                        ),
                    )
                    for index, choice in enumerate(choices)
                ],
                usage=_usage_info(usage),
            )
        )

    def _choice(self, index: int, text: str, reason: Reason | None = None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def _detailed(self, choice: dict[str, Any], piece: Piece) -> bytes:
        return self._event([_with_tokens(choice, piece) | _prompt_ids(piece)], self._usage)


def _call_delta(call: MadeCall) -> dict[str, Any]:
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _chat_choice(index: int, delta: dict[str, Any], reason: Reason | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _with_tokens(choice: dict[str, Any], piece: Piece) -> dict[str, Any]:
    tokens = {} if piece.token_ids is None else {"token_ids": piece.token_ids}
    return choice | {"logprobs": piece.logprobs} | tokens


def _prompt_ids(piece: Piece) -> dict[str, Any]:
    ids = piece.prompt_token_ids
    return {} if ids is None else {"prompt_token_ids": ids}


def _message(choice: Choice) -> ReplyMessage:
    if choice.details is None:
        return ReplyMessage(content=choice.text)
    calls = [
        MadeToolCall(id=call.id, function=MadeFunction(call.name, call.arguments))
        for call in choice.details.calls
    ]
    return ReplyMessage(
        content=None if calls and not choice.text else choice.text,
        reasoning_content=choice.details.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _said(choice: Choice, *names: str) -> dict[str, Any]:
    """Return those of the choice's details that there are."""
    if choice.details is None:
        return {}
    values = {name: getattr(choice.details, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _usage_info(usage: Usage) -> UsageInfo:
    return UsageInfo(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
    )
