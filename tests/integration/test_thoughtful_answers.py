"""A model that thinks aloud, asked for JSON: the real process, with words of a real tokenizer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import AddedToken

from helpers import tiny_tokenizers
from helpers.server_process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.process, pytest.mark.slow]

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if not loop.last %}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}\nassistant: <think>\n{% endif %}"
    "{# the thought ends with </think> #}"
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("thinker")
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.add_tokens([AddedToken("</think>")])
    tiny_tokenizers.save(tokenizer, directory, chat_template=TEMPLATE, eos_token="<|endoftext|>")
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 0}))
    with ServerProcess(str(directory)) as server:
        yield server.wait_ready()


def body(**fields: Any) -> dict[str, Any]:
    end = tiny_tokenizers.byte_level().get_vocab_size()  # the token that was added
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    return {
        "messages": [USER], "response_format": shape, "max_tokens": 1500,
        "logit_bias": {str(end): 5}, "seed": 4, **fields,
    }  # fmt: skip


@pytest.mark.parametrize("message", [None, "<think>well", "<think>"])
def test_json_follows_the_thought(server: ServerProcess, message: str | None) -> None:
    fields: dict[str, Any] = {}
    if message is not None:
        turn = {"role": "assistant", "content": message}
        fields = {"messages": [USER, turn], "continue_final_message": True}
    status, answer = server.post("/v1/chat/completions", body(**fields))
    assert status == 200, answer
    said = answer["choices"][0]
    assert said["finish_reason"] == "stop"
    assert said["message"]["reasoning_content"]
    assert set(json.loads(said["message"]["content"])) == {"a", "b"}
    assert said["message"]["content"].startswith("{")


def test_streamed_it_is_the_same(server: ServerProcess) -> None:
    _, raw = server.request("POST", "/v1/chat/completions", body(stream=True))
    events = [json.loads(line[6:]) for line in raw.decode().split("\n\n") if "{" in line]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert any(delta.get("reasoning_content") for delta in deltas)
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert set(json.loads(text)) == {"a", "b"}


def test_a_message_that_has_begun_the_answer_goes_on_with_it(server: ServerProcess) -> None:
    turn = {"role": "assistant", "content": "<think>well</think>"}
    asked = body(messages=[USER, turn], continue_final_message=True)
    _, answer = server.post("/v1/chat/completions", asked)
    message = answer["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert set(json.loads(message["content"])) == {"a", "b"}
