"""Whatever parameters a request combines, its stream joins to its whole answer."""

from __future__ import annotations

import itertools
from typing import Any

import trio
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from trio.testing import MockClock

from helpers.api_world import CHAT, COMPLETION, TOKENIZER, body_for, open_world
from helpers.openai_shapes import strictly
from trioengine.engine_proc.sim_runner import SimScript

SEEDED = SimScript(num_blocks=256, max_model_len=1024, tokens_from="seed", eos_probability=0.05)
WORDS = [TOKENIZER.decode([token_id]) for token_id in range(257, 267)]

ids = st.lists(st.integers(1, 2047), min_size=1, max_size=6)
both = {
    "n": st.integers(1, 3),
    "seed": st.integers(0, 5),
    "temperature": st.sampled_from([0, 0.5, 1]),
    "max_tokens": st.integers(1, 8),
    "min_tokens": st.integers(0, 1),
    "stop": st.sampled_from(["a", " b", ["zi", "o f"], [], None]),
    "stop_token_ids": ids,
    "ignore_eos": st.booleans(),
    "presence_penalty": st.sampled_from([-1, 0, 1.5]),
    "repetition_penalty": st.sampled_from([1, 1.5]),
    "logit_bias": st.dictionaries(st.integers(0, 2047).map(str), st.integers(-100, 100)),
    "bad_words": st.lists(st.sampled_from(WORDS), max_size=2),
    "allowed_token_ids": st.sampled_from([None, list(range(300, 1200))]),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "truncate_prompt_tokens": st.sampled_from([None, -1, 2]),
    "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
    "echo": st.booleans(),
    "cache_salt": st.sampled_from([None, "a", "b"]),
}
completions = st.fixed_dictionaries(
    {}, optional=both | {"logprobs": st.integers(0, 3), "prompt": ids | st.lists(ids, min_size=1)}
)
chats = st.fixed_dictionaries(
    {}, optional=both | {"logprobs": st.just(True), "continue_final_message": st.booleans()}
)
bodies = st.one_of(
    st.tuples(st.just(COMPLETION), completions), st.tuples(st.just(CHAT), chats)
).map(lambda drawn: (drawn[0], body_for(drawn[0], max_tokens=5) | {"seed": 1} | drawn[1]))


@given(st.lists(bodies, min_size=1, max_size=2))
def test_a_stream_joins_to_the_whole_answer(requests: list[tuple[str, dict[str, Any]]]) -> None:
    trio.run(_ask_all, requests, clock=MockClock(autojump_threshold=0))


async def _ask_all(requests: list[tuple[str, dict[str, Any]]]) -> None:
    async with open_world(running=True, script=SEEDED) as world:
        for path, body in requests:
            whole = await world.api.post(path, body)
            streamed = await world.api.post(path, body | {"stream": True})
            assert whole.status == streamed.status == 200, whole.body
            assert streamed.events[-1] == "[DONE]"
            assert _joined(streamed.events[:-1]) == _told(whole.json)
            strictly(ChatCompletion if path == CHAT else Completion, whole.json)
            for event in streamed.events[:-1]:
                strictly(ChatCompletionChunk if path == CHAT else Completion, event)


LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset", "content")


def _joined(events: list[Any]) -> dict[int, Any]:
    choices: dict[int, Any] = {}
    for choice in itertools.chain.from_iterable(event["choices"] for event in events):
        total = choices.setdefault(choice["index"], {"text": "", "lists": {}, "end": None})
        assert total["end"] is None
        total["text"] += choice.get("delta", {}).get("content") or choice.get("text") or ""
        for name, items in _lists(choice).items():
            total["lists"][name] = total["lists"].get(name, []) + items
        if choice["finish_reason"] is not None:
            total["end"] = choice["finish_reason"], choice["stop_reason"]
    return choices


def _told(answer: Any) -> dict[int, Any]:
    return {
        choice["index"]: {
            "text": choice["message"]["content"] if "message" in choice else choice["text"],
            "lists": _lists(choice),
            "end": (choice["finish_reason"], choice["stop_reason"]),
        }
        for choice in answer["choices"]
    }


def _lists(choice: Any) -> dict[str, list[Any]]:
    found = {name: items for name, items in (choice["logprobs"] or {}).items() if name in LISTS}
    if "token_ids" in choice:
        found["token_ids"] = choice["token_ids"]
    return found
