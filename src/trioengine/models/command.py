"""What ``trioengine models list|fetch|path`` does; the command line prints what these return."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioengine.errors import ConfigError
from trioengine.models.pipeline import prepare_model
from trioengine.models.resolve import DEFAULT_MODEL, prepared_dir, resolve_model
from trioengine.models.table import PACKAGED_MODELS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["fetch_model", "list_models", "model_path"]


def list_models() -> list[str]:
    """Return a table of the packaged models, a line each, with what is in the cache."""
    rows = [("NAME", "SIZE", "LICENCE", "CACHED", "")]
    for model in PACKAGED_MODELS.values():
        cached = prepared_dir(resolve_model(model.name)) is not None
        size = f"{model.num_bytes / 1e6:.0f} MB"
        default = " (default)" if model.name == DEFAULT_MODEL else ""
        summary = model.summary + default
        rows.append((model.name, size, model.licence, "yes" if cached else "no", summary))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]])
        for row in rows
    ]


def fetch_model(name: str, progress: Callable[[str, float], None]) -> Path:
    """Fetch and convert a model, if that is still to do; return its directory.

    Raises:
        ConfigError: There is no such model, or it cannot be fetched.
        EngineStartError: It does not load.
    """
    return prepare_model(resolve_model(name), progress)


def model_path(name: str = DEFAULT_MODEL) -> Path:
    """Return the directory of a checkpoint that is in the cache.

    Raises:
        ConfigError: There is no such model, or it is not there yet.
    """
    model_dir = prepared_dir(resolve_model(name))
    if model_dir is None:
        raise ConfigError(
            f"{name} is not in the cache; `trioengine models fetch {name}` fetches it"
        )
    return model_dir
