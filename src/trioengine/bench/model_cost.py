"""What one token costs a decoder, in bytes and operations, from the files of its checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from trioengine.errors import ConfigError
from trioengine.models.checkpoint_files import read_json
from trioengine.models.safetensors_header import count_weights

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ModelCost", "read_model_cost"]

_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


class ModelCost(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a dense decoder. One multiply-add is two operations.

    Attributes:
        weight_bytes: What a decode step must read: every weight, but of an embedding that is not
            the head too only single rows.
        body_params: Weights that each token is multiplied with, head left out.
        head_params: Weights of the head, for each row of logits.
        kv_bytes_per_token: Keys and values of one token in all layers.
    """

    weight_bytes: int
    body_params: int
    head_params: int
    kv_bytes_per_token: int

    @property
    def body_flops(self) -> int:
        """Operations per token: two per weight.

        Attention's own arithmetic is left out, so a time derived from it remains a lower bound.

        Source: Kaplan et al. 2020, arXiv:2001.08361, section 2.1 (C_forward = 2 N, N without
        embeddings, for contexts that are short against 12 times the width).
        """
        return 2 * self.body_params

    @property
    def head_flops(self) -> int:
        """Operations per row of logits: two per weight."""
        return 2 * self.head_params

    def stored_as(self, *, weight_bytes: int | None, kv_element_bytes: int) -> ModelCost:
        """Return the cost with weights and cache stored otherwise than in the checkpoint.

        Args:
            weight_bytes: All weights, such as the size of a quantised file; ``None``: unchanged.
            kv_element_bytes: Of each key and value; 2 in the checkpoint's own reckoning.
        """
        return msgspec.structs.replace(
            self,
            weight_bytes=self.weight_bytes if weight_bytes is None else weight_bytes,
            kv_bytes_per_token=self.kv_bytes_per_token // 2 * kv_element_bytes,
        )


def read_model_cost(model_dir: Path) -> ModelCost:
    """Read ``config.json`` and the headers of the safetensors files, not the weights themselves.

    A sliding window is not looked at: the workloads' contexts are shorter than any.

    Raises:
        ConfigError: It is not a dense decoder with the usual names in its configuration.
    """
    config = read_json(model_dir / "config.json")
    if any(config.get(name) for name in _EXPERTS):
        raise ConfigError("the floor of a mixture of experts depends on which are asked")
    vocab_size, hidden, layers, heads = (
        _size(config, name)
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    num_params, num_bytes = count_weights(model_dir)
    if not num_params:
        raise ConfigError(f"{model_dir} has no safetensors, so the model's floor is not known")
    table_params, table_bytes = vocab_size * hidden, 0
    if not config.get("tie_word_embeddings", False):
        table_bytes = table_params * num_bytes // num_params
        num_params -= table_params
    return ModelCost(
        weight_bytes=num_bytes - table_bytes,
        body_params=num_params - table_params,
        head_params=table_params,
        kv_bytes_per_token=2 * layers * kv_heads * head_dim * 2,
    )


def _size(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"config.json has no {name}, so the model's floor is not known")
    return value
