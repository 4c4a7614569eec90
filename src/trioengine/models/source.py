"""Where the model of a server comes from: a directory that is there, or a name to be prepared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from trioengine.config import ServerConfig

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
    """

    name: str
    model_dir: Path | None
    simulated: bool = False


def find_model(config: ServerConfig) -> ModelSource:
    """Say what ``config`` names, without fetching, converting or importing anything heavy.

    The simulated engine takes words and name from a directory where MODEL is one; any other MODEL
    is only a name to it.

    Raises:
        ConfigError: There is no such model.
    """
    from trioengine.models.resolve import DEFAULT_MODEL, ModelKind, prepared_dir, resolve_model

    if config.engine.backend != "sim":
        return ModelSource(config.model, prepared_dir(resolve_model(config.model)))
    if Path(config.model).is_dir():
        resolved = resolve_model(config.model)
        if resolved.kind is ModelKind.DIRECTORY:
            return ModelSource(config.model, prepared_dir(resolved), simulated=True)
    name = SIMULATED_NAME if config.model == DEFAULT_MODEL else config.model
    return ModelSource(name, None, simulated=True)
