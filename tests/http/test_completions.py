from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from openai.types import Completion

from helpers.api_world import COMPLETION, TOKENIZER, open_world
from trioengine.protocol import Add

if TYPE_CHECKING:
    from trio.testing import MockClock


async def prompts_sent(body: dict[str, Any]) -> list[list[int]]:
    async with open_world() as world:
        call = world.start("POST", COMPLETION, body)
        await world.settle()
        assert world.engine.sent, call.body
        adds = [message for message in world.engine.sent if isinstance(message, Add)]
        call.disconnect()
        return [add.prompt_token_ids for add in adds]


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("hi", ["hi"]),
        (["hi", "you"], ["hi", "you"]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_prompts_reach_the_engine_in_order(
    prompt: Any, sent: list[str | list[int]], autojump_clock: MockClock
) -> None:
    expected = [TOKENIZER.encode(p) if isinstance(p, str) else p for p in sent]
    assert await prompts_sent({"prompt": prompt}) == expected
    twice = [ids for ids in expected for _ in range(2)]
    assert await prompts_sent({"prompt": prompt, "n": 2}) == twice


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], [""], ["a", ""], [[1], []], [2048], [[-1]], {}, 5, [1, "a"]]
)
async def test_a_prompt_that_is_none_is_refused_and_the_next_is_served(
    prompt: Any, autojump_clock: MockClock
) -> None:
    async with open_world(running=True) as world:
        call = await world.api.post(COMPLETION, {"prompt": prompt})
        assert (call.status, call.error["param"]) == (400, "prompt")
        assert (await world.api.post(COMPLETION, {"prompt": "a"})).status == 200
        assert (await world.api.post(COMPLETION, {})).status == 400


async def test_an_answer_is_what_the_official_client_expects(autojump_clock: MockClock) -> None:
    async with open_world(running=True) as world:
        whole = await world.api.post(COMPLETION, {"prompt": ["a", "b"], "n": 2})
        parsed = Completion.model_validate_json(whole.body, strict=True)
        assert [choice.index for choice in parsed.choices] == [0, 1, 2, 3]
        assert whole.json["id"].startswith("cmpl-")
        assert whole.json["usage"]["completion_tokens"] == 4 * 16  # OpenAI's default


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "output_tokens"),
    [(1023, None, 1), (1023, 1, 1), (1000, None, 16), (1020, None, 4), (1000, 24, 24)],
)
async def test_what_fits_is_served(
    prompt_tokens: int, max_tokens: int | None, output_tokens: int, autojump_clock: MockClock
) -> None:
    async with open_world(running=True) as world:
        body = {"prompt": [1] * prompt_tokens, "max_tokens": max_tokens}
        call = await world.api.post(COMPLETION, body)
        assert call.json["usage"]["completion_tokens"] == output_tokens


@pytest.mark.parametrize(
    ("prompt", "max_tokens"),
    [([1] * 1024, None), ([1] * 1024, 1), ([1] * 1025, None), ([1] * 1000, 25), ("x" * 1024, 1),
     ("x" * 300_000, None)],
)  # fmt: skip
async def test_what_does_not_fit_is_refused_with_the_numbers(
    prompt: Any, max_tokens: int | None, autojump_clock: MockClock
) -> None:
    async with open_world() as world:
        body = {"prompt": prompt, "max_tokens": max_tokens}
        call = await world.api.post(COMPLETION, body)
        assert (call.status, call.error["code"]) == (400, "context_length_exceeded")
        assert call.error["param"] == "prompt"
        assert " 1024 tokens" in call.error["message"]


async def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("tokenised")

    monkeypatch.setattr(TOKENIZER, "encode", encode)
    async with open_world() as world:
        call = await world.api.post(COMPLETION, {"prompt": "x" * 300_000})
        assert call.error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("prompt", [["a"] * 2049, [[1]] * 2049])
async def test_the_number_of_prompts_is_bounded(prompt: Any, autojump_clock: MockClock) -> None:
    async with open_world(max_queue_sequences=5000) as world:
        call = await world.api.post(COMPLETION, {"prompt": prompt})
        assert (call.status, call.error["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("name", "value"),
    [("suffix", "x"), ("use_beam_search", True), ("logprobs", 21), ("logprobs", -1),
     ("best_of", 0), ("max_tokens", 0), ("bad_words", [""]), ("logit_bias", {"2048": 1})],
)  # fmt: skip
async def test_what_cannot_be_honoured_is_refused(
    name: str, value: Any, autojump_clock: MockClock
) -> None:
    async with open_world() as world:
        call = await world.api.post(COMPLETION, {"prompt": "a", name: value})
        assert (call.status, call.error["param"]) == (400, name)
