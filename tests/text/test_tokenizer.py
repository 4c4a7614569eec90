from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import chat_templates, tiny_tokenizers
from trioengine.errors import ConfigError, InvalidRequestError
from trioengine.text.tokenizer import Tokenizer
from trioengine.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from pathlib import Path

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.save(
        tiny_tokenizers.byte_level(),
        tmp_path_factory.mktemp("model"),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=chat_templates.CHATML,
    )


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(model_dir)


def test_what_a_checkpoint_says_of_itself(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 422
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.has_chat_template


def test_encode_is_the_library_s_own(tokenizer: Tokenizer) -> None:
    reference = tiny_tokenizers.byte_level()
    for text in ("", "The fox<|im_end|>", tiny_tokenizers.TEXT):
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_left_out_of_the_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b")) == "ab"


def test_added_special_tokens_are_a_choice(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    backend = tiny_tokenizers.byte_fallback()
    backend.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = Tokenizer.from_dir(tiny_tokenizers.save(backend, tmp_path))
    assert tokenizer.encode("x")[0] == 1
    assert tokenizer.encode("x", add_special_tokens=False) == tokenizer.encode("x")[1:]


def test_truncation_and_padding_of_the_checkpoint_lose_nothing(tmp_path: Path) -> None:
    backend = tiny_tokenizers.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer.from_dir(tiny_tokenizers.save(backend, tmp_path))
    assert len(tokenizer.encode("no merge: QZXJ")) > 4
    assert tokenizer.decode(tokenizer.encode("no merge: QZXJ")) == "no merge: QZXJ"


def test_a_lone_surrogate_is_the_client_s_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode("x\ud800")


@pytest.mark.parametrize("token_id", [-1, 2**32, 2**64])
def test_an_id_that_is_none_is_the_client_s_error(tokenizer: Tokenizer, token_id: int) -> None:
    with pytest.raises(InvalidRequestError):
        tokenizer.decode([token_id])
    with pytest.raises(InvalidRequestError):
        tokenizer.token_bytes(token_id)


def test_token_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("日😀 fox<|im_end|>")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "日😀 fox<|im_end|>"


@pytest.mark.slow
def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    """``encode`` of the library holds the GIL: then this loop would stand still throughout."""
    text = "The quick brown fox " * 100_000
    started, counted = threading.Event(), 0

    def encode() -> None:
        started.set()
        tokenizer.encode(text)

    thread = threading.Thread(target=encode)
    thread.start()
    started.wait()
    while thread.is_alive():
        thread.join(0.001)
        counted += 1
    assert counted > 20


@pytest.mark.slow
def test_threads_share_one_tokenizer(tokenizer: Tokenizer) -> None:
    texts = [f"{tiny_tokenizers.TEXT} {n}" * 5 for n in range(200)]

    def round_trip(text: str) -> bool:
        ids = tokenizer.encode(text)
        rendered = tokenizer.render_chat([{"role": "user", "content": text}])
        return (
            tokenizer.decode(ids) == text and text in rendered and tokenizer.token_bytes(5) != b""
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(round_trip, texts))


# Conversations -----------------------------------------------------------------------------------


def test_render_chat(tokenizer: Tokenizer) -> None:
    text = tokenizer.render_chat(USER)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert text.endswith(
        tokenizer.render_chat(USER, add_generation_prompt=False)[-10:] + text[-22:]
    )
    assert tokenizer.encode(text, add_special_tokens=False).count(1) == 3


def test_special_tokens_and_variables_are_visible(model_dir: Path) -> None:
    template = "{{ bos_token }}{{ eos_token }}{{ tools | length }}{{ mood }}"
    tokenizer = Tokenizer.from_dir(model_dir, chat_template=template)
    text = tokenizer.render_chat(USER, tools=[1, 2], mood="!")
    assert text == "<|im_start|><|im_end|>2!"


def test_a_template_for_tools_is_taken_with_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    saved = tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path, chat_template=named)
    tokenizer = Tokenizer.from_dir(saved)
    assert tokenizer.render_chat(USER) == "plain"
    assert tokenizer.render_chat(USER, tools=[]) == "tools"


def test_no_template_tells_which_flag_helps(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="--chat-template") as caught:
        tokenizer.render_chat(USER)
    assert caught.value.param == "messages"


def test_a_model_s_broken_template_stops_chats_only(tmp_path: Path) -> None:
    saved = tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path, chat_template="{% if %}")
    tokenizer = Tokenizer.from_dir(saved)
    assert tokenizer.encode("x")
    with pytest.raises(InvalidRequestError, match=r"does not compile.*--chat-template"):
        tokenizer.render_chat(USER)


def test_a_given_template_from_a_file(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("from a file: {{ messages[0].content }}")
    tokenizer = Tokenizer.from_dir(model_dir, chat_template=str(path))
    assert tokenizer.render_chat(USER) == "from a file: Hi"


@pytest.mark.parametrize("given", ["no/such/file.jinja", "{% for %}"])
def test_a_given_template_that_cannot_be_used_is_refused_at_once(
    model_dir: Path, given: str
) -> None:
    with pytest.raises(ConfigError, match="template"):
        Tokenizer.from_dir(model_dir, chat_template=given)


def test_a_directory_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_dir(tmp_path)


# Simulated ---------------------------------------------------------------------------------------

SIMULATED = Tokenizer.simulated(2_000)


@given(st.text(max_size=40))
def test_simulated_round_trip(text: str) -> None:
    assert SIMULATED.decode(SIMULATED.encode(text)) == text.replace("<|endoftext|>", "")


@given(st.lists(st.integers(257, 1_999), min_size=1))
def test_simulated_words_are_one_token_each(ids: list[int]) -> None:
    text = SIMULATED.decode(ids)
    assert SIMULATED.encode(text) == ids
    assert len(text.split()) == len(ids)


def test_simulated_is_its_vocabulary_s_twin() -> None:
    vocabulary = Vocabulary.simulated(2_000)
    assert vocabulary.size == SIMULATED.vocab_size
    assert all(
        SIMULATED.token_bytes(token_id) == vocabulary.token_bytes(token_id)
        for token_id in range(2_000)
    )


def test_simulated_chat() -> None:
    assert SIMULATED.render_chat(USER) == "user: Hi\nassistant:"


def test_simulated_with_a_template_of_the_user_s() -> None:
    tokenizer = Tokenizer.simulated(300, chat_template="[{{ messages[0].content }}]")
    assert tokenizer.render_chat(USER) == "[Hi]"
    assert tokenizer.template_mentions("messages")
    assert not tokenizer.template_mentions("</think>")


def test_a_request_can_bring_a_template() -> None:
    assert SIMULATED.render_chat(USER, chat_template="{{ messages | length }}") == "1"
    with pytest.raises(InvalidRequestError, match="does not compile") as caught:
        SIMULATED.render_chat(USER, chat_template="{% if %}")
    assert caught.value.param == "chat_template"


def test_the_last_message_can_go_on() -> None:
    messages = [*USER, {"role": "assistant", "content": "Hello, "}]
    text = SIMULATED.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "user: Hi\nassistant: Hello, "


def test_the_vocabulary_is_read_once_and_when_needed() -> None:
    tokenizer = Tokenizer.simulated(300)
    assert not tokenizer.has_read_vocabulary
    assert tokenizer.vocabulary is tokenizer.vocabulary
    assert tokenizer.has_read_vocabulary


def test_simulated_needs_room_for_the_bytes() -> None:
    assert Tokenizer.simulated(257).decode(Tokenizer.simulated(257).encode("é")) == "é"
    with pytest.raises(ValueError, match="at least 257"):
        Tokenizer.simulated(256)
