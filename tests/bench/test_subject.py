"""Whose tokenizer sizes the prompts, and whose weights make the floor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers.tiny_tokenizers import byte_level, save
from helpers.weightless import BODY, TABLE, checkpoint
from trioengine.bench import subject
from trioengine.bench.subject import find_subject
from trioengine.errors import ConfigError
from trioengine.models.resolve import ModelKind, ResolvedModel

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    save(byte_level(), tmp_path)
    return checkpoint(tmp_path, {"embed": TABLE, "w": BODY})


def test_the_simulated_engine_has_words_and_no_cost() -> None:
    found = find_subject(None, {"engine": "sim", "engine_args": '{"vocab_size": 300}'})
    assert (found.model, found.tokenizer.vocab_size) == ("sim", 300)
    assert (found.cost, found.cost_unknown) == (None, "the simulated engine computes nothing")


def test_the_simulated_engine_takes_the_words_of_a_checkpoint(model_dir: Path) -> None:
    found = find_subject(str(model_dir), {"engine": "sim"})
    assert found.tokenizer.vocab_size == byte_level().get_vocab_size()
    assert found.cost is None


def test_a_checkpoint_has_both(model_dir: Path) -> None:
    found = find_subject(str(model_dir), {})
    assert found.model == str(model_dir)
    assert found.cost is not None
    assert (found.cost.weight_bytes, found.is_float32) == (2 * 880, False)


def test_float32_is_twice_as_much_to_read(model_dir: Path) -> None:
    found = find_subject(str(model_dir), {"dtype": "float32"})
    assert found.cost is not None
    assert (found.cost.weight_bytes, found.is_float32) == (4 * 880, True)
    assert found.cost.kv_bytes_per_token == 2 * 48


def test_a_gguf_file_is_read_as_it_is(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"x" * 500)
    resolved = ResolvedModel(str(file), ModelKind.GGUF, file)
    monkeypatch.setattr(subject, "resolve_model", lambda name: resolved)
    monkeypatch.setattr("trioengine.models.resolve.resolve_model", lambda name: resolved)
    monkeypatch.setattr("trioengine.models.resolve.prepared_dir", lambda resolved: model_dir)
    found = find_subject(str(file), {})
    assert found.cost is not None
    assert (found.cost.weight_bytes, found.cost.body_params) == (500, 800)
    found = find_subject(str(file), {"quantization": "none"})
    assert found.cost is not None
    assert found.cost.weight_bytes == 2 * 880


@pytest.mark.parametrize(
    ("quantization", "num_bytes"), [("int8", 850 + 85), ("q4", 500 + 85), ("gguf", 700)]
)
def test_quantised_weights_are_less_to_read(
    model_dir: Path, quantization: str, num_bytes: int
) -> None:
    (model_dir / "model.gguf").write_bytes(b"x" * 700)
    found = find_subject(str(model_dir), {"quantization": quantization})
    assert found.cost is not None
    assert (found.cost.weight_bytes, found.cost.body_params) == (num_bytes, 800)


def test_blocks_of_a_file_that_is_not_there_have_no_known_cost(model_dir: Path) -> None:
    found = find_subject(str(model_dir), {"quantization": "gguf"})
    assert found.cost is None
    assert found.cost_unknown.endswith("model.gguf cannot be read: No such file or directory")


def test_a_model_of_unknown_cost_says_why(model_dir: Path) -> None:
    checkpoint(model_dir, num_experts=4)
    found = find_subject(str(model_dir), {})
    assert found.cost is None
    assert "mixture of experts" in found.cost_unknown


@pytest.mark.parametrize(("model", "engine"), [("/nowhere/at/all", {}), (None, {"engine": "none"})])
def test_what_is_not_there_is_refused(model: str | None, engine: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        find_subject(model, engine)
