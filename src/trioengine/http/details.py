"""What an answer carries beside its text: logprobs, token ids, echoes, thoughts. Pure.

Few requests ask for any of it. Those that do not have no ``Details``, and nothing here runs for
them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import msgspec

from trioengine.http.logprobs import (
    TextOffsets,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    prompt_offsets,
)
from trioengine.http.reasoning import ReasoningSplitter, Split
from trioengine.http.tools.reader import ToolReader
from trioengine.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioengine.http.answers import PromptLogprobs
    from trioengine.http.logprobs import ChatLogprobs, CompletionLogprobs
    from trioengine.http.tools.reader import MadeCall, ToolReading
    from trioengine.outputs import RequestOutput, TokenLogprob
    from trioengine.structured import StructuredOutput
    from trioengine.text.vocabulary import Vocabulary

__all__ = ["Details", "Piece", "Prompt", "Reason", "Story", "Thinking"]

Reason = FinishReason | Literal["tool_calls"]


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the answer may repeat it. ``echo`` is ``None`` where it is not to."""

    token_ids: Sequence[int]
    echo: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Thinking:
    """A model that thinks aloud.

    Attributes:
        inside: The prompt ends in the middle of a thought.
        told: Whether the client wants to know.
        may_begin: The prompt leaves it to the model whether to think.
    """

    inside: bool
    told: bool
    may_begin: bool = False

    def before(self, shape: StructuredOutput) -> StructuredOutput:
        """Return the shape of an answer, and of the thought that may come before it."""
        if self.inside:
            return msgspec.structs.replace(shape, thought="open")
        return msgspec.structs.replace(shape, thought="optional" if self.may_begin else "none")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What one request asks for.

    Attributes:
        vocabulary: Of the model.
        prompts: In order.
        chat: Logprobs in the schema of chats, and without the prompt's.
        num_logprobs: How many of the likeliest tokens beside each; ``None`` for no logprobs.
        num_prompt_logprobs: The same in vLLM's ``prompt_logprobs``.
        token_ids: Ids of prompt and output.
        tokens_as_ids: Tokens are called by their ids.
        skip_special_tokens: Special tokens are no part of the text.
        thinking: ``None`` where what looks like a thought is text.
        usage_so_far: On every chunk of a stream.
        tools: How calls are read out of the text; ``None`` where there are no tools.
    """

    vocabulary: Vocabulary
    prompts: Sequence[Prompt]
    chat: bool
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    token_ids: bool = False
    tokens_as_ids: bool = False
    skip_special_tokens: bool = True
    thinking: Thinking | None = None
    usage_so_far: bool = False
    tools: ToolReading | None = None


@dataclasses.dataclass(slots=True)
class Piece:
    """A stretch of one choice. What is ``None`` was not asked for, or is said elsewhere.

    Attributes:
        text: What the model said.
        reasoning: What it thought before.
        logprobs: Of the tokens of this stretch.
        token_ids: Of this stretch.
        prompt_token_ids: On a choice's first stretch.
        prompt_logprobs: On a choice's first stretch.
        calls: That are complete with this stretch.
    """

    text: str = ""
    reasoning: str = ""
    logprobs: ChatLogprobs | CompletionLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    calls: list[MadeCall] = dataclasses.field(default_factory=list)

    @property
    def plain(self) -> bool:
        """True where there is nothing but text."""
        ids = (self.token_ids, self.prompt_token_ids)
        said = self.reasoning or self.calls
        return not said and self.logprobs is None and ids == (None, None)

    @property
    def says_something(self) -> bool:
        """True where a client that looks at messages sees anything."""
        return bool(self.text or self.reasoning or self.calls)


class Story:
    """One choice on its way from deltas to pieces.

    Tokens wait until there is text for them or the choice ends: a chunk of a stream without text
    would say nothing to most clients.
    """

    def __init__(self, details: Details, prompt: Prompt) -> None:
        self._details = details
        self._prompt = prompt
        self._names = TokenNames(details.vocabulary, as_ids=details.tokens_as_ids)
        self._offsets = TextOffsets(
            self._names, len(prompt.echo or ""), skip_special_tokens=details.skip_special_tokens
        )
        thinking = details.thinking
        self._splitter = None if thinking is None else ReasoningSplitter(inside=thinking.inside)
        self._tools = None if details.tools is None else ToolReader(details.tools)
        self._begun = False
        self._next = Piece()
        self._entries: list[TokenLogprob] = []
        self._echoed: list[TokenLogprob | None] | None = None

    def take(self, delta: RequestOutput) -> Piece | None:
        """Return what to say after this delta; after a choice's last there is always a piece."""
        if not self._begun:
            self._begun = True
            self._begin(delta.prompt_logprobs or [])
        piece, ended = self._next, delta.finish_reason is not None
        if piece.token_ids is not None:
            piece.token_ids += delta.token_ids
        self._entries += delta.logprobs or ()
        split = self._split(delta.text, ended=ended)
        piece.reasoning += split.reasoning
        content = split.content
        if self._tools is not None:
            content, calls = self._tools.feed(content, final=ended)
            piece.calls += calls
        piece.text += content
        if not (piece.says_something or ended):
            return None
        piece.logprobs = self._logprobs()
        self._next = Piece(token_ids=[] if self._details.token_ids else None)
        return piece

    def reason(self, reason: FinishReason) -> Reason:
        """Return why the choice ended, as clients are told: also because it calls a function."""
        tools, how = self._tools, self._details.tools
        if reason is not FinishReason.STOP or tools is None or how is None:
            return reason
        return "tool_calls" if tools.num_calls and not how.named else reason

    def _begin(self, scored: list[TokenLogprob | None]) -> None:
        details, prompt, piece = self._details, self._prompt, self._next
        piece.text = prompt.echo or ""
        if details.token_ids:
            piece.token_ids, piece.prompt_token_ids = [], list(prompt.token_ids)
        if details.num_prompt_logprobs is not None:
            piece.prompt_logprobs = prompt_logprobs(
                self._names, scored, details.num_prompt_logprobs
            )
        if prompt.echo is not None and not details.chat:
            self._echoed = scored

    def _split(self, text: str, *, ended: bool) -> Split:
        splitter, thinking = self._splitter, self._details.thinking
        if splitter is None or thinking is None:
            return Split("", text)
        parts = [splitter.feed(text), *([splitter.flush()] if ended else ())]
        reasoning = "".join(part.reasoning for part in parts) if thinking.told else ""
        return Split(reasoning, "".join(part.content for part in parts))

    def _logprobs(self) -> ChatLogprobs | CompletionLogprobs | None:
        num_top = self._details.num_logprobs
        if num_top is None:
            return None
        entries, self._entries = self._entries, []
        if self._details.chat:
            return chat_logprobs(self._names, entries, num_top) if entries else None
        token_ids = [entry.token_id for entry in entries]
        offsets = self._offsets.take(token_ids)
        echoed, self._echoed = self._echoed, None
        if echoed is None:
            if not entries:
                return None
            return completion_logprobs(self._names, entries, token_ids, offsets, num_top)
        prompt_ids = list(self._prompt.token_ids)[: len(echoed)]
        starts = prompt_offsets(self._names, prompt_ids, len(self._prompt.echo or ""))
        return completion_logprobs(
            self._names, [*echoed, *entries], prompt_ids + token_ids, starts + offsets, num_top
        )
