"""What a checkpoint says of itself as an embedding model, in the layout of sentence-transformers.

``modules.json`` lists what runs behind the network: one pooling, and a normalisation perhaps. A
checkpoint without it is no embedding model here: how to pool must not be guessed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from trioengine.errors import ConfigError
from trioengine.models.checkpoint_files import read_json

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["EmbeddingFiles", "Pooling", "read_embedding_files"]

Pooling = Literal["mean", "cls", "last", "max"]

_MODES: Final[dict[str, Pooling]] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
}


class _Module(msgspec.Struct):
    path: str
    type: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingFiles:
    """How an embedding is made from the network's last hidden states.

    Attributes:
        pooling: Which of a sequence's states, or what of all of them.
        normalize: Scale to length 1 at the end.
        max_seq_len: Tokens the model was trained for, where the checkpoint says so.
        any_dimensions: A shorter prefix is an embedding, too (Matryoshka, arXiv:2205.13147).
        dimensions: Lengths that it was trained for; empty where it does not say.
    """

    pooling: Pooling
    normalize: bool
    max_seq_len: int | None
    any_dimensions: bool
    dimensions: tuple[int, ...]


def read_embedding_files(model_dir: Path) -> EmbeddingFiles | None:
    """Return how the checkpoint makes embeddings, ``None`` if it is no embedding model.

    Raises:
        ConfigError: It is one, with a step that is not supported.
    """
    modules = _read_modules(model_dir / "modules.json")
    if modules is None:
        return None
    kinds = {module.type.rpartition(".")[2]: module.path for module in modules}
    if unknown := sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"}):
        raise ConfigError(f"{model_dir}: a {unknown[0]} module in an embedding is not supported")
    if "Pooling" not in kinds:
        raise ConfigError(f"{model_dir}: modules.json names no pooling")
    config = read_json(model_dir / "config.json")
    lengths = read_json(model_dir / "sentence_bert_config.json")
    dimensions = config.get("matryoshka_dimensions") or ()
    return EmbeddingFiles(
        pooling=_pooling(read_json(model_dir / kinds["Pooling"] / "config.json"), model_dir),
        normalize="Normalize" in kinds,
        max_seq_len=lengths.get("max_seq_length"),
        any_dimensions=bool(config.get("is_matryoshka")) and not dimensions,
        dimensions=tuple(sorted(int(length) for length in dimensions)),
    )


def _read_modules(path: Path) -> list[_Module] | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[_Module])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _pooling(config: dict[str, Any], model_dir: Path) -> Pooling:
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise ConfigError(f"{model_dir}: pooling {chosen or 'of no kind'} is not supported")
    return _MODES[chosen[0]]
