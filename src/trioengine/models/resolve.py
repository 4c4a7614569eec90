"""What the MODEL that a user names means.

In this order: a directory (Hugging Face layout) · a ``.gguf`` file · a packaged model · a hub id.
The server asks before it starts anything, so nothing here is slow or heavy. Fetching and converting
are ``pipeline``'s, in a child process, unless ``prepared_dir`` shows that nothing is left to
do.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
from pathlib import Path
from typing import Final

from trioengine.errors import ConfigError
from trioengine.models.gguf_header import read_gguf_scalars
from trioengine.models.store import cache_dir, file_name
from trioengine.models.table import DEFAULT_MODEL, PACKAGED_MODELS, PackagedModel

__all__ = [
    "DEFAULT_MODEL",
    "ModelKind",
    "ResolvedModel",
    "cache_dir",
    "checkpoint_place",
    "prepared_dir",
    "resolve_model",
]

# Part of the names of converted checkpoints: raise it when conversion gives other files.
_CONVERSION: Final = "c1"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SLOW_TOKENIZERS: Final = ("tokenizer.model", "spiece.model", "vocab.json", "*.tiktoken")


class ModelKind(enum.StrEnum):
    """What a name turned out to mean."""

    DIRECTORY = "directory"
    GGUF = "gguf"
    PACKAGED = "packaged"
    HUB = "hub"


@dataclasses.dataclass(frozen=True, slots=True)
class ResolvedModel:
    """What a name means.

    Attributes:
        name: As the user gave it; what the model is served as unless the user says otherwise.
        kind: See ``ModelKind``.
        path: Of a directory or GGUF file, absolute.
        packaged: The table's entry of a packaged model.
    """

    name: str
    kind: ModelKind
    path: Path = Path()
    packaged: PackagedModel | None = None


def resolve_model(name: str) -> ResolvedModel:
    """Say what ``name`` means, without importing, fetching or changing anything.

    Raises:
        ConfigError: Nothing, as far as can be told without a network; one sentence that says what
            would be possible.
    """
    try:
        path = Path(name).expanduser().absolute()
        if path.is_dir():
            return ResolvedModel(name, ModelKind.DIRECTORY, _checked_directory(path))
        if path.is_file():
            read_gguf_scalars(path)
            return ResolvedModel(name, ModelKind.GGUF, path)
    except (OSError, ValueError, RuntimeError) as error:  # a name no path can have
        raise ConfigError(f"model {name!r} is not usable as a path: {error}") from error
    if packaged := PACKAGED_MODELS.get(name.lower()):
        return ResolvedModel(name, ModelKind.PACKAGED, packaged=packaged)
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return ResolvedModel(name, ModelKind.HUB)
    raise ConfigError(
        f"model {name!r} not found: there is no such directory or .gguf file, it is no packaged "
        f"model ({', '.join(PACKAGED_MODELS)}), and hub ids have the form owner/name"
    )


def _checked_directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"; its GGUF file can be given by name: {ggufs[0]}" if ggufs else ""
        raise ConfigError(f"{path} has no config.json, so it is no checkpoint{hint}")
    if not (path / "tokenizer.json").is_file() and not _has_slow_tokenizer(path):
        raise ConfigError(f"{path} has no tokenizer.json, nor any older tokenizer")
    return path


def _has_slow_tokenizer(path: Path) -> bool:
    return any(next(path.glob(pattern), None) for pattern in _SLOW_TOKENIZERS)


def prepared_dir(resolved: ResolvedModel) -> Path | None:
    """Return the checkpoint's directory if there is nothing to prepare, else ``None``.

    Of a hub id it is always ``None``: only the hub's library can tell.
    """
    place = checkpoint_place(resolved)
    return place if place is not None and place.is_dir() else None


def checkpoint_place(resolved: ResolvedModel) -> Path | None:
    """Return where the checkpoint is or will be; of a hub id only the hub's library can tell."""
    checkpoints = cache_dir() / "checkpoints"
    if resolved.packaged is not None:
        name = f"{resolved.packaged.name}-{resolved.packaged.sha256[:16]}"
        return checkpoints / f"{name}-{_CONVERSION}"
    if resolved.kind is ModelKind.GGUF:
        name = f"{file_name(resolved.path.stem)}-{_fingerprint([resolved.path])}"
        return checkpoints / f"{name}-{_CONVERSION}"
    if resolved.kind is ModelKind.HUB:
        return None
    if (resolved.path / "tokenizer.json").is_file():
        return resolved.path
    files = sorted(path for path in resolved.path.iterdir() if path.is_file())
    name = f"{file_name(resolved.path.name)}-{_fingerprint(files)}"
    return checkpoints / f"{name}-{_CONVERSION}"


def _fingerprint(paths: list[Path]) -> str:
    """Return what tells these files from other ones, or other versions, without reading them."""
    digest = hashlib.sha256()
    for path in paths:
        status = path.stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]
