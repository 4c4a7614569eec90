"""Where the model of a server comes from: a directory that is there, or a name to be prepared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from trioengine.config import EngineOptions, ServerConfig

__all__ = ["ModelSource", "find_model"]

SIMULATED_NAME: Final = "sim"


@dataclass
class ModelSource:
    """What to serve.

    Attributes:
        name: As the user gave it.
        model_dir: The checkpoint; ``None`` where it is still to be prepared, or where there is none
            because the engine is ``simulated``.
        simulated: No checkpoint is needed.
        is_gguf: The user named a GGUF file, rather than a model that happens to be made from one.
    """

    name: str
    model_dir: Path | None
    simulated: bool = False
    is_gguf: bool = False

    def fit(self, options: EngineOptions) -> EngineOptions:
        """Return the options for this model: what ``auto`` cannot mean for it, it no longer says.

        Only a GGUF file's blocks can be taken as they are, and not where a type was asked for.
        """
        if options.quantization != "auto" or (self.is_gguf and options.dtype == "auto"):
            return options
        return msgspec.structs.replace(options, quantization="none")


def find_model(config: ServerConfig) -> ModelSource:
    """Say what ``config`` names, without fetching, converting or importing anything heavy.

    The simulated engine takes words and name from a directory where MODEL is one; any other MODEL
    is only a name to it.

    Raises:
        ConfigError: There is no such model.
    """
    from trioengine.models.resolve import DEFAULT_MODEL, ModelKind, prepared_dir, resolve_model

    if config.engine.backend != "sim":
        resolved = resolve_model(config.model)
        is_gguf = resolved.kind is ModelKind.GGUF
        return ModelSource(config.model, prepared_dir(resolved), is_gguf=is_gguf)
    if Path(config.model).is_dir():
        resolved = resolve_model(config.model)
        if resolved.kind is ModelKind.DIRECTORY:
            return ModelSource(config.model, prepared_dir(resolved), simulated=True)
    name = SIMULATED_NAME if config.model == DEFAULT_MODEL else config.model
    return ModelSource(name, None, simulated=True)
