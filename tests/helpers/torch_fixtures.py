"""Fixtures of every test that runs the torch engine; a conftest imports them by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from helpers.tiny_models import save_tiny
from trioengine.config import EngineOptions
from trioengine.engine_proc import torch_runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from trioengine.engine_proc.torch_runner.model_runner import TorchModelRunner

    Checkpoints = Callable[[str], Path]
    OpenRunner = Callable[..., TorchModelRunner]

__all__ = ["TINY_OPTIONS", "checkpoints", "open_runner"]

TINY_OPTIONS = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_cache_memory_gib": 0.004}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Return the directory of a tiny checkpoint by name; each is written once a session."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("checkpoints")

    def directory(name: str) -> Path:
        path = root / name
        if not path.exists():
            save_tiny(path, name)
        return path

    return directory


@pytest.fixture
def open_runner(checkpoints: Checkpoints) -> Iterator[OpenRunner]:
    """Load a tiny checkpoint by name, or a directory; closed and threads restored at the end."""
    import torch

    threads = torch.get_num_threads()
    opened: list[TorchModelRunner] = []

    def open_(model: str | Path, **options: Any) -> TorchModelRunner:
        directory = checkpoints(model) if isinstance(model, str) else model
        chosen = EngineOptions(**{**TINY_OPTIONS, **options})
        opened.append(torch_runner.load(directory, chosen, lambda phase, fraction: None))
        return opened[-1]

    yield open_
    for runner in opened:
        runner.close()
    torch.set_num_threads(threads)
