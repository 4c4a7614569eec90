"""The native CPU runner: one call into C++ per step, decoders of the Llama family.

The sources of the extension are in ``native/`` at the root of the repository. Where it was not
built (an installation without a compiler), ``load`` refuses and the engine falls back to torch.
Nothing here imports torch.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Final

from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trioengine.config import EngineOptions
    from trioengine.engine_proc.native_runner.model_runner import NativeModelRunner

__all__ = ["load", "supported"]

NOT_BUILT: Final = "the native extension was not built (there was no C++ compiler)"


def load(
    model_dir: Path, options: EngineOptions, progress: Callable[[str, float], None]
) -> NativeModelRunner:
    """Load a checkpoint directory and allocate the cache.

    Args:
        model_dir: Hugging Face layout, weights as safetensors.
        options: Lengths, memory, threads, quantization. ``engine_args`` may hold ``isa``, one of
            ``_native.usable_isas()``; the best by default.
        progress: Called with (phase, fraction in [0, 1] of the whole load).

    Raises:
        ConfigError: An option does not fit this machine or this model, or the model is none that
            this runner computes, or the extension was not built or cannot be loaded; the message
            says why.
    """
    if not _is_built():
        raise ConfigError(NOT_BUILT)
    try:
        from trioengine.engine_proc.native_runner.start import start
    except ImportError as error:  # built for another Python or another C++ library
        raise ConfigError(f"the native extension cannot be loaded: {error}") from error
    return start(model_dir, options, progress)


def supported(model_dir: Path) -> str | None:
    """Return why this runner cannot compute the checkpoint, ``None`` where it can.

    Only ``config.json`` is read.
    """
    from trioengine.engine_proc.native_runner.config import read_config

    if not _is_built():
        return NOT_BUILT
    try:
        read_config(model_dir)
    except ConfigError as error:
        return error.message
    return None


def _is_built() -> bool:
    return importlib.util.find_spec(f"{__name__}._native") is not None
