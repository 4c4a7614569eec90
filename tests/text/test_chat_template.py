from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import tokenizers
from tokenizers.models import BPE

from helpers import chat_templates as templates
from trioengine.errors import ConfigError, InvalidRequestError
from trioengine.text import chat_template
from trioengine.text.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": templates.PLAIN,
    "plain_with_system": [{"role": "system", "content": "Be brief."}, *templates.PLAIN],
}


def render(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    return ChatTemplate(source).render(messages, {**SPECIAL, **variables})


@pytest.fixture(scope="module")
def reference() -> Any:
    """A function like ``render`` that is transformers' own ``apply_chat_template``."""
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer(BPE())
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)

    def apply(source: str, messages: list[dict[str, Any]], **variables: Any) -> Any:
        return tokenizer.apply_chat_template(
            messages, chat_template=source, tokenize=False, **variables
        )

    return apply


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", templates.PARITY)
@pytest.mark.parametrize("prompt", [True, False])
def test_same_text_as_transformers(
    reference: Any, name: str, conversation: str, prompt: bool
) -> None:
    source, messages = templates.PARITY[name], CONVERSATIONS[conversation]
    ours = render(source, messages, add_generation_prompt=prompt)
    assert ours == reference(source, messages, add_generation_prompt=prompt)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, {"tools": [templates.A_TOOL]}, {"documents": []}])
def test_same_text_as_transformers_with_tools(reference: Any, variables: dict[str, Any]) -> None:
    ours = render(templates.TOOLS, templates.RICH, **variables)
    assert ours == reference(templates.TOOLS, templates.RICH, **variables)
    assert "never seen" not in ours
    assert "<think>I should call the tool</think>" in ours


@pytest.mark.model
@pytest.mark.slow
def test_same_text_as_transformers_with_a_variable_of_the_client_s(reference: Any) -> None:
    source, messages = templates.GENERATION, templates.PLAIN
    ours = render(source, messages, enable_thinking=False)
    assert ours == reference(source, messages, enable_thinking=False)
    assert ours.endswith("no thinking")


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("content", ["Sure, the", "Sure, the ", "\n Sure:\n", "", " "])
@pytest.mark.parametrize("name", ["chatml", "strict_turns", "tools", "trimming"])
def test_same_text_as_transformers_where_the_last_message_goes_on(
    reference: Any, name: str, content: str
) -> None:
    trimming = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    source = templates.PARITY.get(name, trimming)
    messages = [*templates.PLAIN, {"role": "assistant", "content": content}]
    ours = ChatTemplate(source).render(messages, dict(SPECIAL), continue_final=True)
    assert ours == reference(source, messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{{ messages[0].content }}", [{"content": "a"}, {"content": "left out"}]),
        ("{{ messages[0].content }}", []),
        ("{{ messages[0].content }}", [{"content": [{"text": "a"}]}]),
    ],
)
def test_what_cannot_be_continued_is_refused(source: str, messages: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(source).render(messages, {}, continue_final=True)
    assert caught.value.param == "messages"


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ x | tojson }}", [], x="é<&>'") == '"é<&>\'"'


def test_what_the_template_says_is_what_the_client_hears() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(InvalidRequestError, match="Roles must alternate: user/assistant") as caught:
        render(templates.STRICT_TURNS, turns)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{{ messages[0].content + 'x' }}", [{"role": "user", "content": None}]),
        ("{{ messages[0].content + 'x' }}", [{"role": "user", "content": [1]}]),
        ("{{ messages[7].content }}", []),
        ("{{ 1 // 0 }}", []),
        ("{{ messages[0]['content'].items() }}", [{"role": "user", "content": "x"}]),
        ("{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}", [{"role": "user"}]),
    ],
)
def test_a_template_that_fails_is_the_client_s_400(
    source: str, messages: list[dict[str, Any]]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(source, messages)
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__ }}{{ ().__class__.__bases__[0].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ dict.__class__ }}{{ dict.mro() }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        render(source, [{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "source", ["{{ 'x' * 10**9 }}", "{{ 10**9 * ['x'] }}", "{{ 9 ** 10 ** 9 }}"]
)
def test_a_short_expression_cannot_fill_the_memory(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="on too much"):
        render(source, [])
    assert render("{{ '-' * 3 }}{{ 3 * '-' }}{{ 2 ** 10 }}{{ 6 * 7 }}", []) == "------102442"


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    loop = "{% for i in range(100) %}{{ messages[0].content }}{% endfor %}"
    assert len(render(loop, [{"role": "user", "content": "x" * 10}])) == 1000
    with pytest.raises(InvalidRequestError, match="more than 1000 characters"):
        render(loop, [{"role": "user", "content": "x" * 11}])


def test_time_is_bounded() -> None:
    ticks = itertools.count()
    template = ChatTemplate(
        "{% for i in range(100) %}x{% endfor %}", clock=lambda: float(next(ticks))
    )
    with pytest.raises(InvalidRequestError, match="more than 10 s"):
        template.render([], {})


def test_a_template_that_does_not_compile_says_where() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("fine\n{% for %}")


def test_the_time_of_day_is_there() -> None:
    assert render("{{ strftime_now('%Y') }}", []) in {time.strftime("%Y")}
