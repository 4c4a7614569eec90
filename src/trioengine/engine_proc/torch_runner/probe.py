"""One tiny forward pass at load: what each layer stores, and whether attention is ours at all.

A model that keeps some attention to itself (linear attention, ALiBi, a window that only its mask
knows) would answer with nonsense instead of an error. The probe is where it is refused.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from trioengine.engine_proc.torch_runner.attention import (
    AttentionCall,
    UnsupportedAttentionError,
    bind,
)
from trioengine.engine_proc.torch_runner.paged_cache import LayerShape

__all__ = ["probe_layers"]

_KNOWN_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})


class _AttentionProbe:
    """Notes what each layer asks for and answers zeros. Fulfils ``Attends``."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        num_tokens, num_heads, _ = call.query.shape
        return call.value.new_zeros(num_tokens, num_heads, call.value.shape[2])


def probe_layers(network: torch.nn.Module, config: Any, device: torch.device) -> list[LayerShape]:
    """Run two tokens through ``network`` and return what its layers store, in order.

    Args:
        network: A causal language model of transformers under the ``PAGED`` implementation.
        config: Its text configuration.
        device: Where it lives.

    Raises:
        UnsupportedAttentionError: Not every layer attends exactly once through us, or a layer
            wants something that we do not compute.
    """
    probe = _AttentionProbe()
    bind(network, probe)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
    positions = torch.arange(2, device=device)[None]
    with torch.inference_mode():
        network(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=1)
    seen = [call.layer for call in probe.calls]
    if seen != list(range(config.num_hidden_layers)):
        raise UnsupportedAttentionError(
            f"of {config.num_hidden_layers} layers, {len(set(seen))} use the attention interface"
        )
    for call in probe.calls:
        _check_window(call, config)
    return [_shape(call) for call in probe.calls]


def _check_window(call: AttentionCall, config: Any) -> None:
    """Refuse a layer whose limited view only the model's own mask would have said."""
    kinds = getattr(config, "layer_types", None)
    kind = kinds[call.layer] if kinds else _kind_without_types(config)
    if kind not in _KNOWN_LAYER_TYPES:
        raise UnsupportedAttentionError(f"layer {call.layer} is of type {kind}")
    if kind == "sliding_attention" and call.window is None:
        raise UnsupportedAttentionError(f"layer {call.layer} does not say its sliding window")


def _kind_without_types(config: Any) -> str:
    slides = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    return "sliding_attention" if slides else "full_attention"


def _shape(call: AttentionCall) -> LayerShape:
    return LayerShape(call.key.shape[1], call.key.shape[2], call.value.shape[2], call.key.dtype)
