from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.client.engine_client import SequenceRequest
from trioengine.errors import InternalError
from trioengine.http.chunks import ChatReplies, CompletionReplies
from trioengine.http.convert import Job
from trioengine.http.narrate import Collection, Deltas, Narration
from trioengine.http.replies import Replies, ReplyHead
from trioengine.outputs import FinishReason, RequestOutput
from trioengine.sampling_params import SamplingParams

HEAD = ReplyHead("id", 1, "m", "fp")


def job(num_choices: int, n: int = 1, *, include_usage: bool = False) -> Job:
    return Job(
        sequences=[SequenceRequest([1], SamplingParams())] * num_choices,
        n=n,
        best_of=n,
        prompt_tokens=num_choices // n,
        model="m",
        stream=True,
        include_usage=include_usage,
        priority=0,
        timeout_s=None,
    )


def events(data: bytes) -> list[Any]:
    blocks = data.decode().split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block[6:]) for block in blocks if block != "data: [DONE]"]


def delta(text: str, *ids: int, end: FinishReason | None = None, cached: int = 0) -> RequestOutput:
    return RequestOutput(1, text, list(ids), end, None, cached)


def narrated(histories: Deltas, replies: Replies, num_choices: int, **kw: Any) -> list[Any]:
    narration = Narration(job(num_choices, **kw), replies)
    told = b"".join(narration.tell([item]) for item in histories)
    return events(told + narration.closing())


choices_text = st.lists(
    st.lists(st.text(max_size=3), min_size=1, max_size=4), min_size=1, max_size=3
)


@given(choices_text, st.randoms(use_true_random=False), st.booleans())
def test_joined_events_equal_the_whole_however_deltas_are_grouped(
    pieces: list[list[str]], random: Any, chat: bool
) -> None:
    """One finish each, no empty text, role first; the text is that of the whole answer."""
    left = {index: list(texts) for index, texts in enumerate(pieces)}
    history: Deltas = []
    while left:
        index = random.choice(list(left))
        text = left[index].pop(0)
        end = None if left[index] else FinishReason.STOP
        if end is not None:
            del left[index]
        history.append((index, delta(text, 7, end=end)))
    collection = Collection(job(len(pieces)))
    collection.add(history)
    replies: Replies = (ChatReplies if chat else CompletionReplies)(HEAD, include_usage=False)
    told = [event["choices"][0] for event in narrated(history, replies, len(pieces))]
    for index, whole in enumerate(collection.choices()):
        mine = [choice for choice in told if choice["index"] == index]
        texts = [c["delta"].get("content", "") if chat else c["text"] for c in mine]
        assert "".join(texts) == whole.text == "".join(pieces[index])
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
        body = texts[1:-1] if chat else texts[:-1]
        assert all(body)
        if chat:
            assert mine[0]["delta"]["role"] == "assistant"
            assert all("role" not in c["delta"] for c in mine[1:])


@pytest.mark.parametrize("include_usage", [True, False])
def test_usage_is_told_only_when_asked_for(include_usage: bool) -> None:
    replies = CompletionReplies(HEAD, include_usage=include_usage)
    history: Deltas = [(0, delta("a", 1, 2, cached=16)), (0, delta("", 3, end=FinishReason.STOP))]
    told = narrated(history, replies, 1, include_usage=include_usage)
    assert all(("usage" in event) is include_usage for event in told)
    if include_usage:
        assert told[-1]["choices"] == []
        assert told[-1]["usage"]["completion_tokens"] == 3
        assert told[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


def test_a_prompt_counts_once_whatever_n() -> None:
    collection = Collection(job(4, n=2))
    collection.add([(index, delta("", 1, end=FinishReason.STOP, cached=8)) for index in range(4)])
    assert collection.tally.usage.prompt_tokens == 2
    assert collection.tally.usage.completion_tokens == 4
    assert collection.tally.usage.cached_tokens == 16


def test_an_answer_with_an_unfinished_choice_is_never_passed_off_as_whole() -> None:
    narration = Narration(job(2), CompletionReplies(HEAD, include_usage=False))
    narration.tell([(0, delta("a", end=FinishReason.STOP)), (1, delta("b"))])
    with pytest.raises(InternalError):
        narration.closing()
    collection = Collection(job(2))
    collection.add([(1, delta("a", end=FinishReason.STOP))])
    with pytest.raises(InternalError):
        collection.choices()


def test_nothing_to_tell_is_no_bytes() -> None:
    narration = Narration(job(1), CompletionReplies(HEAD, include_usage=False))
    assert narration.tell([(0, delta("", 5))]) == b""
