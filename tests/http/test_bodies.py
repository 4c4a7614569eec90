from __future__ import annotations

import contextlib
import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.errors import InvalidRequestError
from trioengine.http.bodies import BodyDecoder
from trioengine.http.schemas import UNSUPPORTED, ChatCompletionRequest, CompletionRequest

COMPLETION = BodyDecoder(CompletionRequest)
CHAT = BodyDecoder(ChatCompletionRequest)
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def refusal(decoder: BodyDecoder[Any], data: bytes | dict[str, Any]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        decoder.decode(data if isinstance(data, bytes) else json.dumps(data).encode())
    return caught.value


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"null", None),
        (b"[]", None),
        (b"1", None),
        (b'{"prompt": "a"} x', None),
        (b'{"prompt": "\xff"}', None),
        (b'{"unknown": "\xff"}', None),
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"temperature": NaN}', "temperature"),
        (b'{"temperature": Infinity}', "temperature"),
        (b'{"temperature": 1e999}', "temperature"),
        (b'{"temperature": -1e999}', "temperature"),
        (b'{"temperature": "nan"}', "temperature"),
        (b'{"temperature": true}', "temperature"),
        (b'{"n": true}', "n"),
        (b'{"n": 1.5}', "n"),
        (b'{"n": "1"}', "n"),
        (b'{"n": [1]}', "n"),
        (b'{"n": ' + b"9" * 5000 + b"}", "n"),
        (b'{"max_tokens": 1.5}', "max_tokens"),
        (b'{"n": 1.0, "max_tokens": 0.5}', "max_tokens"),
        (b'{"max_tokens": 1.0, "n": "1"}', "n"),
        (b'{"max_tokens": 1.0, "n": true}', "n"),
        (b'{"stop": 1.0}', "stop"),
        (b'{"stop_token_ids": [1.0, 2.5]}', "stop_token_ids[1]"),
        (b'{"stream": 1}', "stream"),
        (b'{"stream": "true"}', "stream"),
        (b'{"stop": [1]}', "stop[0]"),
        (b'{"stop": {}}', "stop"),
        (b'{"stop_token_ids": ["a"]}', "stop_token_ids[0]"),
        (b'{"stream_options": {"include_usage": 1}}', "stream_options.include_usage"),
        (b'{"unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    ],
)
def test_a_wrong_completion_body_is_refused_by_name(data: bytes, param: str | None) -> None:
    error = refusal(COMPLETION, data)
    assert (error.http_status, error.code, error.param) == (400, "invalid_value", param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}, 5]}, "messages[1]"),
        ({"messages": [{"role": "robot"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages[0].content[0].text",
        ),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        (HELLO | {"logprobs": 3}, "logprobs"),
    ],
)
def test_a_wrong_chat_body_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    assert refusal(CHAT, body).param == param


def test_a_byte_order_mark_is_no_obstacle() -> None:
    assert COMPLETION.decode(b'\xef\xbb\xbf{"max_tokens": 3}').max_tokens == 3


def test_null_is_not_said() -> None:
    names = [name for name in CompletionRequest.__struct_fields__ if name != "prompt"]
    body = COMPLETION.decode(json.dumps(dict.fromkeys(names)).encode())
    assert body.max_tokens is None
    assert body.stop is None


ASKED_FOR: dict[str, Any] = {
    "length_penalty": 2, "suffix": "x", "use_beam_search": True,
    "spaces_between_special_tokens": False, "logprob_token_ids": [1], "prompt_embeds": "x",
    "request_id": "x",
    "kv_transfer_params": {"a": 1}, "vllm_xargs": {"a": 1}, "repetition_detection": {"a": 1},
    "thinking_token_budget": 5, "stream_interval": 2,
    "functions": [], "function_call": "auto",
    "verbosity": "low", "modalities": ["text", "audio"],
    "audio": {"voice": "x"}, "prediction": {"a": 1}, "web_search_options": {},
    "mm_processor_kwargs": {"a": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_parameter_that_cannot_be_honoured_is_refused_and_its_default_is_not(name: str) -> None:
    chat = name in ChatCompletionRequest.__struct_fields__
    decoder: BodyDecoder[Any] = CHAT if chat else COMPLETION
    base: dict[str, Any] = HELLO if chat else {"prompt": "a"}
    assert refusal(decoder, base | {name: ASKED_FOR[name]}).param == name
    for value in (None, *UNSUPPORTED[name]):
        decoder.decode(json.dumps(base | {name: value}).encode())


def test_every_raw_field_is_in_the_table() -> None:
    own = {"prompt", "chat_template_kwargs", "response_format", "structured_outputs"}
    own |= {f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar")}
    for body_type in (CompletionRequest, ChatCompletionRequest):
        body = BodyDecoder(body_type)
        raw = {
            name
            for name, default in zip(
                body_type.__struct_fields__[-len(body_type.__struct_defaults__) :],
                body_type.__struct_defaults__,
                strict=True,
            )
            if type(default).__name__ == "Raw"
        }
        assert raw - own == set(body._unsupported)


@pytest.mark.parametrize("value", [1, 1.0, None])
def test_one_is_one_however_it_is_spelled(value: float | None) -> None:
    COMPLETION.decode(json.dumps({"length_penalty": value}).encode())


@pytest.mark.parametrize("value", [True, "1", [1], 1.000001])
def test_what_only_looks_like_one_is_refused(value: object) -> None:
    assert refusal(COMPLETION, {"length_penalty": value}).param == "length_penalty"


@pytest.mark.parametrize(
    ("value", "reason"),
    [({"a": 1}, "int"), ({"1": "x"}, "float"), ([1], "object"), ({"1.5": 1}, "int")],
)
def test_a_bias_is_a_number_for_each_token_id(value: object, reason: str) -> None:
    error = refusal(COMPLETION, {"logit_bias": value})
    assert error.param == "logit_bias"
    assert reason in error.message
    assert COMPLETION.decode(b'{"logit_bias": {"50256": -100}}').logit_bias == {50256: -100.0}


@pytest.mark.parametrize("filler", ["", "a" * 2**19])
def test_an_integer_may_be_spelled_with_a_fraction_of_nothing(filler: str) -> None:
    """OpenAI and vLLM take it; some clients' languages have no integers."""
    body = COMPLETION.decode(
        b'{"max_tokens": 1e2, "n": 2.0, "seed": -0.0, "stop_token_ids": [3.0, 4], "temperature": 1,'
        b'"user": "%b", "response_format": {"n": 1.0}}' % filler.encode()
    )
    integers = (body.max_tokens, body.n, body.seed, *(body.stop_token_ids or ()))
    assert integers == (100, 2, 0, 3, 4)
    assert {type(number) for number in integers} == {int}
    assert bytes(body.response_format) == b'{"n": 1.0}'
    assert body.top_k is None
    assert type(CHAT.decode(json.dumps(HELLO | {"top_logprobs": 5.0}).encode())) is (
        ChatCompletionRequest
    )


def test_labels_are_ignored() -> None:
    labels = {"user": 5, "metadata": {"a": [1]}, "store": "x", "service_tier": "flex"}
    CHAT.decode(json.dumps(HELLO | labels).encode())


def test_an_unknown_field_is_ignored_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    decoder = BodyDecoder(CompletionRequest)
    with caplog.at_level(logging.DEBUG, "trioengine.http.bodies"):
        for _ in range(2):
            decoder.decode(b'{"prompt": "secret", "frobnicate": 1, "user": "u"}')
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]
    assert "frobnicate" in caplog.text
    assert "secret" not in caplog.text


@given(st.binary(max_size=200))
def test_any_bytes_give_a_body_or_a_refusal(data: bytes) -> None:
    with contextlib.suppress(InvalidRequestError):
        CHAT.decode(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(ChatCompletionRequest.__struct_fields__), json_values, max_size=4
    )
)
def test_any_values_give_a_body_or_a_refusal(body: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequestError):
        CHAT.decode(json.dumps(HELLO | body).encode())
