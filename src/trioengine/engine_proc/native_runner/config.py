"""What a checkpoint's ``config.json`` says, for the architectures that the native runner knows.

Every field that would change the arithmetic is either understood or refused: a model must never be
computed almost right.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from trioengine.engine_proc.native_runner.rope import RopeConfig, UnsupportedRopeError
from trioengine.errors import ConfigError
from trioengine.models.checkpoint_files import read_json

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LayerConfig", "ModelConfig", "UnsupportedModelError", "read_config"]

MODEL_TYPES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"})
MAX_HEAD_DIM: Final = 512
DEFAULT_WINDOW: Final = 4096  # of the types that know windows, where the field is left out


class UnsupportedModelError(ConfigError):
    """The native runner does not compute this model; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerConfig:
    """How one layer differs from the others.

    Attributes:
        window: Tokens that a query sees, itself included; 0 means all.
        rotate: False for a layer without position embedding (NoPE).
    """

    window: int
    rotate: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder of the Llama family.

    Attributes:
        model_type: As transformers names it.
        hidden: Width of the residual.
        intermediate: Width of the gated MLP.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Of queries, keys and values alike.
        vocab_size: Rows of the embedding.
        max_positions: Context length the model was made for.
        norm_eps: Of every RMS norm.
        tied: The head is the embedding; ``None`` where the checkpoint's tensors decide.
        rope: Frequencies of the position embedding.
        layers: One entry per layer.
    """

    model_type: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tied: bool | None
    rope: RopeConfig
    layers: tuple[LayerConfig, ...]


def read_config(model_dir: Path) -> ModelConfig:
    """Read and check ``config.json``.

    Raises:
        UnsupportedModelError: The native runner does not compute this model.
        ConfigError: There is no readable configuration.
    """
    raw = read_json(model_dir / "config.json")
    if not raw:
        raise ConfigError(f"{model_dir} holds no checkpoint: config.json is missing or empty")
    _refuse_unknown(raw)
    hidden, num_heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
    # Only where transformers' own default is this one may a field be left out.
    is_llama = raw["model_type"] == "llama"
    num_kv_heads = _positive(raw, "num_key_value_heads", num_heads if is_llama else None)
    is_split = raw["model_type"] != "qwen3"
    head_dim = _positive(raw, "head_dim", hidden // num_heads if is_split else None)
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(f"{num_heads} heads do not share {num_kv_heads} KV heads")
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise UnsupportedModelError(f"head_dim {head_dim} is odd or above {MAX_HEAD_DIM}")
    max_positions = _positive(raw, "max_position_embeddings")
    try:
        rope = RopeConfig.parse(raw, head_dim)
    except UnsupportedRopeError as error:
        raise UnsupportedModelError(str(error)) from error
    return ModelConfig(
        model_type=raw["model_type"],
        hidden=hidden,
        intermediate=_positive(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_positive(raw, "vocab_size"),
        max_positions=max_positions,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tied=raw.get("tie_word_embeddings"),
        rope=rope,
        layers=_layers(raw, _positive(raw, "num_hidden_layers")),
    )


def _refuse_unknown(raw: dict[str, Any]) -> None:
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        known = ", ".join(sorted(MODEL_TYPES))
        raise UnsupportedModelError(
            f"model type {model_type!r} is none that the native runner computes ({known})"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"activation {raw['hidden_act']!r} is not silu")
    if raw.get("quantization_config"):
        raise UnsupportedModelError("the checkpoint is quantised in a format of its own")


def _positive(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise UnsupportedModelError(f"config.json: {name} is {value!r}, not a positive integer")
    return value


def _layers(raw: dict[str, Any], count: int) -> tuple[LayerConfig, ...]:
    rotates = _rotates(raw, count)
    windows = _windows(raw, count)
    return tuple(LayerConfig(w, r) for w, r in zip(windows, rotates, strict=True))


def _rotates(raw: dict[str, Any], count: int) -> list[bool]:
    """Say which layers rotate queries and keys; SmolLM3 leaves it out in every fourth."""
    if raw["model_type"] != "smollm3":
        return [True] * count
    listed = raw.get("no_rope_layers")
    if listed is None:
        interval = _positive(raw, "no_rope_layer_interval", 4)
        return [(i + 1) % interval != 0 for i in range(count)]
    if not isinstance(listed, list) or len(listed) != count:
        raise UnsupportedModelError("config.json: no_rope_layers needs one entry per layer")
    return [bool(entry) for entry in listed]  # 1 means that the layer does rotate


def _windows(raw: dict[str, Any], count: int) -> list[int]:
    is_mistral = raw["model_type"] == "mistral"
    if raw["model_type"] == "llama" or not (is_mistral or raw.get("use_sliding_window")):
        return [0] * count
    if raw.get("sliding_window", DEFAULT_WINDOW) is None:
        return [0] * count
    window = _positive(raw, "sliding_window", DEFAULT_WINDOW)
    if is_mistral:
        return [window] * count
    types = raw.get("layer_types")
    if types is None:
        return [window if slides else 0 for slides in _sliding_layers(raw, count)]
    if not isinstance(types, list) or len(types) != count:
        raise UnsupportedModelError("config.json: layer_types needs one entry per layer")
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(f"attention of type {sorted(unknown)[0]!r} is not computed")
    return [window if kind == "sliding_attention" else 0 for kind in types]


def _sliding_layers(raw: dict[str, Any], count: int) -> list[bool]:
    """Apply transformers' defaults for configurations without ``layer_types``."""
    if raw["model_type"] == "smollm3":
        return [not rotates for rotates in _rotates(raw, count)]
    first = raw.get("max_window_layers", 28)
    return [i >= first for i in range(count)]
