"""A cache of its own for every test, and the two kinds of model that a user may have on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers import tiny_gguf, tiny_tokenizers

if TYPE_CHECKING:
    from pathlib import Path


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
