"""Rotary frequencies that depend on the batch are pinned at load.

Some rotary embeddings of transformers (``longrope``, ``dynamic``) look at the largest position of
a forward pass and choose their frequencies by it. In a flat batch one long sequence would turn
everybody else's keys, and keys already in the cache would no longer fit. So the choice is made
once, for the longest sequence that the server allows.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["pin_rotary"]

_PINNED = "pinned"


def pin_rotary(network: torch.nn.Module, max_model_len: int) -> None:
    """Let each batch-dependent rotary embedding choose for ``max_model_len`` tokens, and freeze it.

    Short sequences then use the long-context frequencies where ``max_model_len`` needs them.
    """
    for module in network.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _is_batch_dependent(kinds):
            _choose(module, max_model_len)
            module.rope_type = _PINNED  # type: ignore[assignment]  # a plain attribute
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if _is_batch_dependent(kind):
                    _choose(module, max_model_len, layer_type=layer_type)
                    kinds[layer_type] = _PINNED


def _is_batch_dependent(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind


def _choose(module: torch.nn.Module, max_model_len: int, **layer_type: str) -> None:
    """Call the embedding once with the last position: it updates its own frequencies."""
    buffer = next(module.buffers())
    with torch.inference_mode():
        module(buffer, torch.tensor([[max_model_len - 1]], device=buffer.device), **layer_type)
