from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from trioengine.errors import ConfigError
from trioengine.models import checkpoint_files

if TYPE_CHECKING:
    from pathlib import Path


def write(model_dir: Path, **files: object) -> Path:
    for name, content in files.items():
        (model_dir / f"{name}.json").write_text(json.dumps(content))
    return model_dir


def added(*tokens: str) -> dict[str, object]:
    return {"added_tokens": [{"id": i, "content": token} for i, token in enumerate(tokens)]}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        ({"config": {"eos_token_id": 7}}, (7,)),
        ({"config": {"text_config": {"eos_token_id": [7, 8]}}}, (7, 8)),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [9, 3]}}, (9, 3)),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": None}}, (7,)),
        (
            # The base model's end of text, and the end of turn that only the tokenizer names.
            {
                "generation_config": {"eos_token_id": 0},
                "tokenizer_config": {"eos_token": {"content": "</s>"}},
                "tokenizer": added("<s>", "</s>"),
            },
            (0, 1),
        ),
        (
            {
                "generation_config": {"eos_token_id": 1},
                "special_tokens_map": {"eos_token": "</s>"},
                "tokenizer": added("<s>", "</s>"),
            },
            (1,),
        ),
    ],
)
def test_eos_token_ids(tmp_path: Path, files: dict[str, object], expected: tuple[int, ...]) -> None:
    assert checkpoint_files.eos_token_ids(write(tmp_path, **files)) == expected


def test_chat_template_from_the_tokenizer_configuration(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"chat_template": "inline"})
    assert checkpoint_files.read_chat_templates(tmp_path) == {"default": "inline"}


def test_chat_template_file_wins(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"chat_template": "inline"})
    (tmp_path / "chat_template.jinja").write_text("file é")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert checkpoint_files.read_chat_templates(tmp_path) == {
        "default": "file é",
        "tool_use": "tools",
    }


def test_several_templates_in_the_older_spelling(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    write(tmp_path, tokenizer_config={"chat_template": named})
    assert checkpoint_files.read_chat_templates(tmp_path) == {"default": "a", "tool_use": "b"}


def test_no_chat_template(tmp_path: Path) -> None:
    assert checkpoint_files.read_chat_templates(tmp_path) == {}


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        checkpoint_files.eos_token_ids(tmp_path)


def test_special_tokens(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"bos_token": "<s>", "eos_token": None, "x_token": "x"})
    assert checkpoint_files.read_special_tokens(tmp_path) == {"bos_token": "<s>"}
