from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import pytest

from trioengine.errors import ConfigError
from trioengine.models.hub import fetch_hub_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.model  # huggingface_hub comes with transformers


def no_progress(phase: str, fraction: float) -> None:
    pass


def snapshot(path: Path, *names: str) -> Callable[..., str]:
    def download(repo_id: str, **options: Any) -> str:
        path.mkdir()
        for name in names:
            (path / name).touch()
        return str(path)

    return download


def failing(error: Exception, cause: Exception | None = None) -> Callable[..., str]:
    def download(repo_id: str, **options: Any) -> str:
        raise error from cause

    return download


def test_a_snapshot(tmp_path: Path) -> None:
    download = snapshot(tmp_path / "s", "config.json", "model.safetensors")
    assert fetch_hub_model("a/b", no_progress, download=download) == tmp_path / "s"


def test_only_what_a_checkpoint_is_loaded_from_is_fetched(tmp_path: Path) -> None:
    from huggingface_hub.utils import filter_repo_objects

    wanted = [
        *("config.json", "generation_config.json", "model-00001-of-2.safetensors"),
        *("tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja"),
        "additional_chat_templates/tool_use.jinja",
    ]
    unwanted = [
        *("pytorch_model.bin", "consolidated.safetensors", "original/params.json", "README.md"),
        *("onnx/model.json", "fp32/model.safetensors", "evil.py", "model.gguf", "tf_model.h5"),
    ]
    seen: list[str] = []

    def download(repo_id: str, **options: Any) -> str:
        patterns = {key: options[key] for key in ("allow_patterns", "ignore_patterns")}
        seen.extend(filter_repo_objects([*wanted, *unwanted], **patterns))
        return snapshot(tmp_path / "s", "config.json", "x.safetensors")(repo_id)

    fetch_hub_model("a/b", no_progress, download=download)
    assert seen == wanted


def test_bytes_of_all_files_are_one_progress(tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []

    def download(repo_id: str, **options: Any) -> str:
        with options["tqdm_class"](total=10, unit="B") as first:
            first.update(5)
            with options["tqdm_class"](total=30, unit="B") as second:
                second.update(15)
            first.update(5)
        with options["tqdm_class"](total=3, desc="files") as files:
            files.update(1)
        return snapshot(tmp_path / "s", "config.json", "x.safetensors")(repo_id)

    fetch_hub_model("a/b", lambda *step: seen.append(step), download=download)
    assert seen[:4] == [("fetching", f) for f in (0.0, 0.5, 0.5, 0.625)]


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["model.safetensors"], "no config.json"), (["config.json", "x.bin"], "as safetensors")],
)
def test_what_is_no_checkpoint(tmp_path: Path, names: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        fetch_hub_model("a/b", no_progress, download=snapshot(tmp_path / "s", *names))


def test_each_failure_is_one_sentence() -> None:
    from huggingface_hub import errors

    refused = OSError(101, "Network is unreachable")
    response: Any = types.SimpleNamespace(headers={}, request=None, status_code=404)
    cases: list[tuple[Exception, Exception | None, str]] = [
        (errors.LocalEntryNotFoundError("advice\non lines"), refused, "Network is unreachable"),
        (errors.OfflineModeIsEnabled("offline mode"), None, "cannot be reached: offline mode"),
        (errors.RepositoryNotFoundError("404", response=response), None, "not found on the hub"),
        (errors.GatedRepoError("403", response=response), None, "gated"),
        (errors.HFValidationError("bad id"), None, "cannot be fetched: bad id"),
        (ConnectionResetError(104, "reset by peer"), None, "cannot be fetched: .*reset by peer"),
    ]
    for error, cause, expected in cases:
        with pytest.raises(ConfigError, match=expected) as caught:
            fetch_hub_model("a/b", no_progress, download=failing(error, cause))
        assert caught.value.message.startswith("a/b ")
        assert "\n" not in caught.value.message


def test_offline_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library itself, with nothing in its cache and no network allowed."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="neither a local directory nor in the hub's cache"):
        fetch_hub_model("no-such-owner/no-such-model", no_progress)
