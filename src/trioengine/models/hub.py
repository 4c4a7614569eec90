"""Fetch a model by hub id, through ``huggingface_hub`` and into its own cache.

``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_ENDPOINT`` and tokens mean what they mean to that library.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    Progress = Callable[[str, float], None]

__all__ = ["fetch_hub_model"]

# What a checkpoint is loaded from. Weights come as safetensors only: other formats are pickles.
_WANTED: Final = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt")
_UNWANTED: Final = ("consolidated*", "*/*.safetensors", "onnx/*", "original/*", "*.md")


def fetch_hub_model(
    repo_id: str, progress: Progress, *, download: Callable[..., str] | None = None
) -> Path:
    """Return the directory of a snapshot, fetched as far as it is not there.

    Args:
        repo_id: ``owner/name``.
        progress: Told of the phase ``fetching``.
        download: ``huggingface_hub.snapshot_download``, unless given.

    Raises:
        ConfigError: It does not exist, may not be read, cannot be reached, or has no safetensors.
    """
    from huggingface_hub import errors, snapshot_download

    progress("fetching", 0.0)
    try:
        snapshot = (download or snapshot_download)(
            repo_id,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
            tqdm_class=_progress_bar(progress),
        )
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{repo_id} is gated: ask for access on its page, then log in (`hf auth login`)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{repo_id} was not found on the hub, or needs a token (HF_TOKEN)"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ConfigError(
            f"{repo_id} is neither a local directory nor in the hub's cache, and the hub cannot be "
            f"reached: {_reason(error)}"
        ) from error
    except Exception as error:  # of the network, the disk, the id: they share no class
        raise ConfigError(f"{repo_id} cannot be fetched: {_reason(error)}") from error
    return _checked(repo_id, Path(snapshot))


def _checked(repo_id: str, snapshot: Path) -> Path:
    if not (snapshot / "config.json").is_file():
        raise ConfigError(f"{repo_id} has no config.json: it is no model that can be loaded")
    if not any(snapshot.glob("*.safetensors")):
        raise ConfigError(f"{repo_id} has no weights as safetensors")
    return snapshot


def _reason(error: Exception) -> str:
    """Return one line: the error below, where the library has wrapped it in advice."""
    text = str(error.__cause__ or error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _progress_bar(progress: Progress) -> type[Any]:
    """Return a tqdm that reports the bytes of all its bars together, and draws nothing."""
    from tqdm import tqdm

    bars: list[Any] = []

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})
            if self.unit == "B":
                bars.append(self)

        def update(self, n: float | None = 1) -> bool | None:
            drawn: bool | None = super().update(n)
            total = sum(bar.total or 0 for bar in bars)
            if total:
                progress("fetching", min(1.0, sum(bar.n for bar in bars) / total))
            return drawn

    return Bar
