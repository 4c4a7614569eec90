from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from helpers import tiny_gguf
from trioengine.errors import ConfigError
from trioengine.models import resolve
from trioengine.models.resolve import ModelKind, checkpoint_place, prepared_dir, resolve_model
from trioengine.models.table import PACKAGED_MODELS

if TYPE_CHECKING:
    from pathlib import Path


def test_a_directory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint.parent)
    resolved = resolve_model("checkpoint")
    assert (resolved.kind, resolved.name) == (ModelKind.DIRECTORY, "checkpoint")
    assert resolved.path == prepared_dir(resolved) == checkpoint


def test_a_gguf_file(gguf: Path) -> None:
    resolved = resolve_model(str(gguf))
    assert (resolved.kind, resolved.path) == (ModelKind.GGUF, gguf)
    assert prepared_dir(resolved) is None


def test_a_packaged_model() -> None:
    for name in (resolve.DEFAULT_MODEL, "SmolLM2-135M-Instruct"):
        resolved = resolve_model(name)
        assert resolved.packaged is PACKAGED_MODELS[resolve.DEFAULT_MODEL]
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
    assert resolve_model(resolve.DEFAULT_MODEL).kind is ModelKind.DIRECTORY


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
        "import sys; import trioengine.models.resolve as m;"
        "m.prepared_dir(m.resolve_model(m.DEFAULT_MODEL));"
        "print({'torch', 'transformers', 'tokenizers', 'huggingface_hub', 'numpy', 'gguf', 'trio'}"
        " & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout == b"set()\n"


# Where it is or will be --------------------------------------------------------------------------


def test_another_file_of_the_same_name_has_another_place(gguf: Path, cache: Path) -> None:
    first = checkpoint_place(resolve_model(str(gguf)))
    assert first == checkpoint_place(resolve_model(str(gguf)))
    os.utime(gguf, ns=(0, 0))
    second = checkpoint_place(resolve_model(str(gguf)))
    assert second is not None
    assert second != first
    assert second.parent == cache / "checkpoints"


def test_places_in_the_cache_cannot_climb(tmp_path: Path, cache: Path) -> None:
    gguf = tiny_gguf.write(tmp_path / "..%2f.. x.gguf", {"general.architecture": "llama"})
    place = checkpoint_place(resolve_model(str(gguf)))
    assert place is not None
    assert place.name.startswith("2f..-x-")
    assert place.parent == cache / "checkpoints"
