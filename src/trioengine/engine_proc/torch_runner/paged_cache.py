"""The paged K/V cache of one attention layer: two tensors, written by slot, read by block."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

__all__ = ["LayerCache", "LayerShape"]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in this layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class LayerCache:
    """Keys ``[num_blocks, block_size, num_kv_heads, key_dim]``, and values alike.

    The cache starts as zeros, not as whatever the allocator hands out: padded reads multiply
    foreign slots by a weight of zero, and zero times NaN is NaN.
    """

    def __init__(
        self, shape: LayerShape, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        size = (num_blocks, block_size, shape.num_kv_heads)
        self.keys = _zeros((*size, shape.key_dim), shape.dtype, device)
        self.values = _zeros((*size, shape.value_dim), shape.dtype, device)
        self._key_slots = self.keys.view(-1, shape.num_kv_heads, shape.key_dim)
        self._value_slots = self.values.view(-1, shape.num_kv_heads, shape.value_dim)
        # Only float16 overflows on sane weights; an infinity would reach batch-mates as NaN.
        self._finite_only = shape.dtype is torch.float16

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store this step's tokens.

        Args:
            slots: int64 ``[num_tokens]``, block · block_size + offset.
            keys: ``[num_tokens, num_kv_heads, key_dim]``.
            values: ``[num_tokens, num_kv_heads, value_dim]``.
        """
        if self._finite_only:
            keys, values = torch.nan_to_num(keys), torch.nan_to_num(values)
        self._key_slots.index_copy_(0, slots, keys)
        self._value_slots.index_copy_(0, slots, values)

    def gather(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read whole blocks, in the order named.

        Args:
            blocks: int64 ``[num_seqs, n]``.

        Returns:
            Keys and values ``[num_seqs, num_kv_heads, n · block_size, dim]``, as strided views of
            fresh copies.
        """
        return _gather(self.keys, blocks), _gather(self.values, blocks)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # torch.zeros writes every byte, which takes seconds and all of the memory at once. numpy asks
    # the kernel for pages that are zero until they are touched.
    memory = np.zeros(math.prod(size) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(size)


def _gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    # index_select over whole blocks: five times the speed of advanced indexing on a CPU.
    rows = cache.index_select(0, blocks.flatten())
    return rows.view(blocks.shape[0], -1, *cache.shape[2:]).transpose(1, 2)
