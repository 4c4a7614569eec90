"""Scoring through the whole server in memory, as lm-evaluation-harness does it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from helpers.api_world import COMPLETION, TOKENIZER, open_world
from helpers.told_tokens import SEEDED, counts, joined, told

if TYPE_CHECKING:
    from trio.testing import MockClock

    from helpers.api_world import World


def parse_logprobs(outputs: Any, ctxlens: list[int]) -> list[tuple[float, bool]]:
    """What the harness reads of an answer.

    Source: lm-evaluation-harness, ``LocalCompletionsAPI.parse_logprobs``.
    """
    results = []
    choices = sorted(outputs["choices"], key=lambda choice: choice["index"])
    for choice, ctxlen in zip(choices, ctxlens, strict=True):
        token_logprobs = choice["logprobs"]["token_logprobs"][ctxlen:-1]
        top_logprobs = choice["logprobs"]["top_logprobs"][ctxlen:-1]
        is_greedy = all(
            own == max(top.values()) for own, top in zip(token_logprobs, top_logprobs, strict=True)
        )
        results.append((sum(token_logprobs), is_greedy))
    return results


@pytest.mark.parametrize("as_ids", [True, False])
async def test_an_evaluation_harness_can_score(as_ids: bool, autojump_clock: MockClock) -> None:
    contexts, continuations = ["ab", "a"], ["cd", "efg"]
    texts = [context + rest for context, rest in zip(contexts, continuations, strict=True)]
    async with open_world(running=True) as world:
        body = {
            "model": "sim", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
            "echo": True, "prompt": [TOKENIZER.encode(text) for text in texts] if as_ids else texts,
        }  # fmt: skip
        answer = (await world.api.post(COMPLETION, body)).json
        scores = parse_logprobs(answer, [len(context) for context in contexts])
        assert scores == [(-9999.0 * 2, False), (-9999.0 * 3, False)]  # letters are never said
        for choice, text in zip(answer["choices"], texts, strict=True):
            assert choice["text"].startswith(text)
            assert len(choice["logprobs"]["tokens"]) == len(text) + 1


async def greedy_continuation(world: World, prompt: list[int], num_tokens: int) -> list[int]:
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "seed": 1234}
    answer = await world.api.post(COMPLETION, body | {"return_token_ids": True})
    ids: list[int] = answer.json["choices"][0]["token_ids"]
    return ids


async def test_what_the_model_would_say_is_scored_as_greedy(autojump_clock: MockClock) -> None:
    async with open_world(running=True, script=SEEDED) as world:
        prompt = [5, 6]
        rest = await greedy_continuation(world, prompt, 3)
        body = {"prompt": [prompt + rest], "max_tokens": 1, "logprobs": 1, "echo": True,
                "temperature": 0, "seed": 1234}  # fmt: skip
        answer = (await world.api.post(COMPLETION, body)).json
        ((score, is_greedy),) = parse_logprobs(answer, [len(prompt)])
        assert is_greedy
        assert score == pytest.approx(-3 * math.log(2))


@pytest.mark.parametrize("stream", [True, False])
async def test_scoring_without_output(stream: bool, autojump_clock: MockClock) -> None:
    async with open_world(running=True) as world:
        body = {"prompt": ["abc", "d"], "max_tokens": 0, "logprobs": 1, "echo": True}
        if stream:
            call = await world.api.post(COMPLETION, body | {"stream": True})
            choices = joined(call.events[:-1], COMPLETION)
        else:
            answer = (await world.api.post(COMPLETION, body)).json
            choices = told(answer, COMPLETION)
            assert counts(answer["usage"]) == [4, 0, 4]
        assert [choices[index]["text"] for index in (0, 1)] == ["abc", "d"]
        assert choices[0]["logprobs"]["tokens"] == ["a", "b", "c"]
        assert choices[0]["logprobs"]["token_logprobs"][0] is None
        assert choices[1]["finish_reason"] == "length"


async def test_an_echo_without_output_or_logprobs(autojump_clock: MockClock) -> None:
    async with open_world(running=True) as world:
        body = {"prompt": [TOKENIZER.encode("ab")[0], 300], "max_tokens": 0, "echo": True}
        (choice,) = (await world.api.post(COMPLETION, body)).json["choices"]
        assert (choice["text"], choice["logprobs"]) == ("a" + TOKENIZER.decode([300]), None)
