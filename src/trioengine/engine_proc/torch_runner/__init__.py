"""The model runner on torch: the only room of the engine where tensors live.

Importing this package imports no torch; ``load`` does, so that progress can be told before.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trioengine.config import EngineOptions
    from trioengine.engine_proc.torch_runner.model_runner import TorchModelRunner

__all__ = ["load"]


def load(
    model_dir: Path, options: EngineOptions, progress: Callable[[str, float], None]
) -> TorchModelRunner:
    """Load a checkpoint directory and allocate the cache.

    Sets the number of threads of torch, and how they wait, for the whole process.

    Args:
        model_dir: Hugging Face layout, weights as safetensors.
        options: Device, dtype, lengths, memory, threads.
        progress: Called with (phase, fraction in [0, 1] of the whole load).

    Raises:
        ConfigError: An option does not fit this machine or this model (also: too little memory).
        EngineStartError: The directory does not hold a checkpoint that loads and runs.
    """
    progress("importing torch", 0.0)
    # Read once, when torch loads its threads. By default they spin while they wait for each other;
    # with a front end on the same cores that made steps 3 to 10 times longer, measured.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from trioengine.engine_proc.torch_runner.start import start

    return start(model_dir, options, progress)
