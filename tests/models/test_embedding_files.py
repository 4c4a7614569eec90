"""What a checkpoint says of itself as an embedding model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from trioengine.errors import ConfigError
from trioengine.models.embedding_files import read_embedding_files

if TYPE_CHECKING:
    from pathlib import Path

MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def write(
    directory: Path,
    *,
    pooling: dict[str, Any] | None = None,
    kinds: tuple[str, ...] = ("Transformer", "Pooling", "Normalize"),
    **config: Any,
) -> Path:
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling or MEAN))
    return directory


def test_a_checkpoint_without_modules_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_embedding_files(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "pooling"),
    [
        ("pooling_mode_mean_tokens", "mean"),
        ("pooling_mode_cls_token", "cls"),
        ("pooling_mode_lasttoken", "last"),
        ("pooling_mode_max_tokens", "max"),
    ],
)
def test_pooling_is_the_one_that_is_switched_on(name: str, pooling: str, tmp_path: Path) -> None:
    switches = {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": False, name: True}
    files = read_embedding_files(write(tmp_path, pooling=switches))
    assert files is not None
    assert files.pooling == pooling


def test_normalisation_length_and_dimensions(tmp_path: Path) -> None:
    write(tmp_path, kinds=("Transformer", "Pooling"), matryoshka_dimensions=[128, 64])
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 77}')
    files = read_embedding_files(tmp_path)
    assert files is not None
    assert not files.normalize
    assert files.max_seq_len == 77
    assert (files.any_dimensions, files.dimensions) == (False, (64, 128))


def test_any_dimension_where_the_model_says_matryoshka_and_no_more(tmp_path: Path) -> None:
    files = read_embedding_files(write(tmp_path, is_matryoshka=True))
    assert files is not None
    assert files.normalize
    assert (files.any_dimensions, files.dimensions) == (True, ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": ("Transformer", "Pooling", "Dense")}, "Dense"),
        ({"kinds": ("Transformer",)}, "no pooling"),
        ({"pooling": {"pooling_mode_weightedmean_tokens": True}}, "weightedmean"),
        ({"pooling": {**MEAN, "pooling_mode_cls_token": True}}, "not supported"),
        ({"pooling": {"pooling_mode_mean_tokens": False}}, "of no kind"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_embedding_files(write(tmp_path, **changes))


def test_a_damaged_list_of_modules_is_refused(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[{}]")
    with pytest.raises(ConfigError, match=r"modules\.json"):
        read_embedding_files(tmp_path)
