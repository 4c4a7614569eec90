"""Requests that ask for more than text: told in events, it joins to what is told at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.client.engine_client import SequenceRequest
from trioengine.http.chunks import ChatReplies, CompletionReplies
from trioengine.http.convert import Job
from trioengine.http.detailed import collection_of, narration_of
from trioengine.http.details import Details, Prompt, Thinking
from trioengine.http.narrate import Collection, Deltas, Narration
from trioengine.http.replies import Replies, ReplyHead
from trioengine.outputs import FinishReason, RequestOutput, TokenLogprob, Usage
from trioengine.sampling_params import SamplingParams
from trioengine.text.vocabulary import Vocabulary

HEAD = ReplyHead("id", 1, "m", "fp")
VOCABULARY = Vocabulary.simulated(300)


def byte(text: str) -> list[int]:
    return [1 + b for b in text.encode()]


PROMPT = Prompt(byte("ab"), "ab")


def job(details: Details | None, num_choices: int = 1, n: int = 1, best_of: int = 1) -> Job:
    return Job(
        sequences=[SequenceRequest([1], SamplingParams())] * num_choices,
        n=n,
        best_of=best_of,
        prompt_tokens=2,
        model="m",
        stream=True,
        include_usage=False,
        priority=0,
        timeout_s=None,
        details=details,
    )


def scored(ids: list[int], base: float = -1.0) -> list[TokenLogprob]:
    return [TokenLogprob(i, base, 2, [(257, -0.5), (i, base)]) for i in ids]


def details(*, chat: bool = False, **fields: Any) -> Details:
    return Details(vocabulary=VOCABULARY, prompts=[PROMPT], chat=chat, **fields)


def replies_of(chat: bool) -> Replies:
    return (ChatReplies if chat else CompletionReplies)(HEAD, include_usage=False)


def events(data: bytes) -> list[Any]:
    blocks = data.decode().split("\n\n")
    return [json.loads(b[6:]) for b in blocks if b.startswith("data: {")]


def streamed(deltas: Deltas, wanted: Details) -> list[Any]:
    narration = narration_of(job(wanted), replies_of(wanted.chat))
    told = b"".join(narration.tell([item]) for item in deltas)
    return events(told + narration.closing())


def whole(deltas: Deltas, wanted: Details) -> Any:
    collection = collection_of(job(wanted))
    collection.add(deltas)
    body = replies_of(wanted.chat).whole(collection.choices(), Usage(2, 5))
    return json.loads(body)


def joined(chunks: list[Any]) -> dict[str, Any]:
    """What a client makes of a stream: text and lists append, the rest is the last word."""
    total: dict[str, Any] = {"text": "", "reasoning": "", "logprobs": {}, "token_ids": []}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        delta = choice.get("delta", choice)
        total["text"] += delta.get("content", choice.get("text")) or ""
        total["reasoning"] += delta.get("reasoning_content", "")
        for name, items in (choice["logprobs"] or {}).items():
            if name != "refusal":
                total["logprobs"].setdefault(name, []).extend(items)
        total["token_ids"] += choice.get("token_ids", [])
        for place in (chunk, choice):
            if "prompt_token_ids" in place:
                assert "prompt_token_ids" not in total
                total["prompt_token_ids"] = place["prompt_token_ids"]
    return total


def flat(answer: Any) -> dict[str, Any]:
    (choice,) = answer["choices"]
    message = choice.get("message", choice)
    logprobs = dict(choice["logprobs"] or {})
    logprobs.pop("refusal", None)
    total = {
        "text": message.get("content", choice.get("text")),
        "reasoning": message.get("reasoning_content", ""),
        "logprobs": {name: items for name, items in logprobs.items() if items},
        "token_ids": choice.get("token_ids", []),
    }
    for place in (answer, choice):
        if "prompt_token_ids" in place:
            total["prompt_token_ids"] = place["prompt_token_ids"]
    return total


def history(pieces: list[tuple[str, int]], *, with_logprobs: bool, with_prompt: bool) -> Deltas:
    """Deltas whose texts may lag behind their tokens, as where text is held back."""
    deltas: Deltas = []
    for number, (text, num_tokens) in enumerate(pieces, 1):
        ids = [257 + (number + k) % 40 for k in range(num_tokens)]
        delta = RequestOutput(1, text, ids)
        delta.logprobs = scored(ids) if with_logprobs else None
        if with_prompt and number == 1:
            delta.prompt_logprobs = [None, *scored(byte("b"))]
        deltas.append((0, delta))
    deltas[-1][1].finish_reason = FinishReason.LENGTH
    return deltas


texts = st.sampled_from(["", "a", " b", "<think>", "</think>", "<", "/think>", "\n", "é"])
pieces = st.lists(st.tuples(texts, st.integers(0, 3)), min_size=1, max_size=6)
wants = st.fixed_dictionaries(
    {
        "chat": st.booleans(),
        "num_logprobs": st.sampled_from([None, 0, 1, 2]),
        "token_ids": st.booleans(),
        "tokens_as_ids": st.booleans(),
        "thinking": st.sampled_from([None, Thinking(True, True), Thinking(False, True),
                                     Thinking(False, False)]),
    }
)  # fmt: skip


@given(pieces, wants, st.booleans())
def test_a_stream_joins_to_the_whole(
    drawn: list[tuple[str, int]], fields: dict[str, Any], echo: bool
) -> None:
    prompt = Prompt(PROMPT.token_ids, PROMPT.echo if echo else None)
    if not fields["chat"]:
        fields = fields | {"thinking": None}
    wanted = Details(vocabulary=VOCABULARY, prompts=[prompt], **fields)
    with_logprobs = wanted.num_logprobs is not None
    deltas = history(drawn, with_logprobs=with_logprobs, with_prompt=with_logprobs and echo)
    chunks = streamed(deltas, wanted)
    assert joined(chunks) == flat(whole(deltas, wanted))
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert finishes == [None] * (len(chunks) - 1) + ["length"]
    for chunk in chunks[1 if wanted.chat else 0 : -1]:  # after the role, before the finish
        (choice,) = chunk["choices"]
        said = choice.get("delta", choice)
        assert said.get("content") or said.get("reasoning_content") or said.get("text")


def test_an_echo_comes_first_with_its_logprobs() -> None:
    wanted = details(num_logprobs=1)
    deltas = history([(" beba", 1)], with_logprobs=True, with_prompt=True)
    (choice,) = whole(deltas, wanted)["choices"]
    assert choice["text"] == "ab beba"
    assert choice["logprobs"]["tokens"] == ["a", "b", VOCABULARY.texts[258]]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_scoring_gives_the_prompt_alone() -> None:
    """``max_tokens: 0``: one delta without tokens ends it."""
    end = RequestOutput(1, finish_reason=FinishReason.LENGTH)
    end.prompt_logprobs = [None, *scored(byte("b"))]
    end.logprobs = []
    wanted = details(num_logprobs=1)
    (choice,) = whole([(0, end)], wanted)["choices"]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert joined(streamed([(0, end)], wanted))["logprobs"] == choice["logprobs"]


def test_prompt_logprobs_are_a_choices_own_or_a_chats() -> None:
    deltas = history([("x", 1)], with_logprobs=False, with_prompt=True)
    completion = whole(deltas, details(num_prompt_logprobs=1))
    assert set(completion["choices"][0]["prompt_logprobs"][1]) == {str(byte("b")[0]), "257"}
    chat = whole(deltas, details(chat=True, num_prompt_logprobs=0))
    assert set(chat["prompt_logprobs"][1]) == {str(byte("b")[0])}
    assert "prompt_logprobs" not in chat["choices"][0]


def test_what_was_not_asked_for_is_absent() -> None:
    deltas = history([("x", 1)], with_logprobs=False, with_prompt=False)
    (choice,) = whole(deltas, details())["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    answer = whole(deltas, details(chat=True))
    assert set(answer["choices"][0]["message"]) == {"role", "content", "refusal"}


def test_the_best_are_those_with_the_highest_mean_logprob() -> None:
    wanted = details()
    plan = job(wanted, num_choices=3, n=2, best_of=3)
    collection = collection_of(plan)
    for index, logprobs in enumerate([[-1.0, -3.0], [-0.1, -9.0], [-1.5, -1.5, -1.5, -1.5]]):
        ids = [257] * len(logprobs)
        delta = RequestOutput(1, f"text {index}", ids, FinishReason.STOP)
        delta.logprobs = [TokenLogprob(257, logprob, 1, []) for logprob in logprobs]
        collection.add([(index, delta)])
    assert [choice.text for choice in collection.choices()] == ["abtext 2", "abtext 0"]
    assert collection.tally.usage.completion_tokens == 8  # all that were generated


def test_a_request_for_text_alone_takes_the_plain_path() -> None:
    assert type(narration_of(job(None), replies_of(False))) is Narration
    assert type(collection_of(job(None))) is Collection


@pytest.mark.parametrize("told", [True, False])
def test_a_thought_is_no_content(told: bool) -> None:
    text = "<think>hm</think>yes"
    deltas = history([(c, 1) for c in text], with_logprobs=False, with_prompt=False)
    wanted = Details(
        vocabulary=VOCABULARY,
        prompts=[Prompt([1], None)],
        chat=True,
        thinking=Thinking(inside=False, told=told),
    )
    message = whole(deltas, wanted)["choices"][0]["message"]
    assert message["content"] == "yes"
    assert message.get("reasoning_content") == ("hm" if told else None)
    deltas_told = [c["choices"][0]["delta"] for c in streamed(deltas, wanted)]
    assert [d["reasoning_content"] for d in deltas_told if "reasoning_content" in d] == (
        ["h", "m"] if told else []
    )
