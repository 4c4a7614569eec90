"""What fits into memory: free bytes in, KV-cache blocks out, or a refusal with the numbers."""

from __future__ import annotations

import dataclasses
import logging
from typing import Final

from trioengine.errors import ConfigError

__all__ = [
    "CPU_SHARE",
    "CUDA_SHARE",
    "GIB",
    "KVCacheRequest",
    "KVCacheSizeError",
    "num_kv_blocks",
    "require_memory",
]

log = logging.getLogger(__name__)

GIB: Final = 2**30
CPU_SHARE: Final = 0.25
"""Share of the memory that is free once the weights are loaded. Modest: a CPU's memory belongs to
everything else on the machine too."""
CUDA_SHARE: Final = 0.8
"""The same on a GPU; the rest is for activations, logits and the allocator's slack."""


class KVCacheSizeError(ConfigError):
    """There is no room for such a cache, whatever computes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheRequest:
    """What decides the size of a cache.

    Attributes:
        bytes_per_token: Keys and values of one token, all layers.
        block_size: Tokens per block.
        max_model_len: Tokens of the longest sequence allowed.
        max_num_seqs: Sequences that may run at once.
        free_bytes: Free memory on the device of the cache.
        share: Part of ``free_bytes`` to take when the user names no size.
        budget_gib: The size the user names, in GiB.
    """

    bytes_per_token: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    free_bytes: int
    share: float
    budget_gib: float | None = None

    @property
    def budget_bytes(self) -> int:
        """Bytes that the cache may take."""
        if self.budget_gib is not None:
            return int(self.budget_gib * GIB)
        return int(self.free_bytes * self.share)


def require_memory(what: str, needed_bytes: int, free_bytes: int) -> None:
    """Refuse what would not fit, before the kernel ends this process for it.

    Raises:
        ConfigError: ``what`` needs more than is free; the message has both numbers.
    """
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"{what} take {needed_bytes / GIB:.2f} GiB and {free_bytes / GIB:.2f} GiB are free"
        )


def num_kv_blocks(request: KVCacheRequest) -> int:
    """Return the number of blocks of the cache, and log what that is in requests.

    Without a size from the user there are never more blocks than ``max_num_seqs`` sequences of
    full length can use: a tiny model on a large machine must not end up with millions.

    Raises:
        KVCacheSizeError: The named size exceeds the free memory, or not even one sequence of
            ``max_model_len`` tokens fits.
    """
    if request.budget_gib is not None and request.budget_bytes > request.free_bytes:
        raise KVCacheSizeError(
            f"--kv-cache-memory {request.budget_gib:g} GiB exceeds the free memory, "
            f"{request.free_bytes / GIB:.2f} GiB"
        )
    per_sequence = -(-request.max_model_len // request.block_size)
    blocks = request.budget_bytes // (request.bytes_per_token * request.block_size)
    if blocks < per_sequence:
        raise KVCacheSizeError(_too_small(request, blocks))
    if request.budget_gib is None:
        blocks = min(blocks, per_sequence * request.max_num_seqs)
    _report(request, blocks)
    return blocks


def _report(request: KVCacheRequest, blocks: int) -> None:
    tokens = blocks * request.block_size
    log.info(
        "KV cache: %.2f of %.2f GiB free, %d tokens, %.1f requests of %d tokens at once",
        tokens * request.bytes_per_token / GIB,
        *(request.free_bytes / GIB, tokens, tokens / request.max_model_len, request.max_model_len),
    )


def _too_small(request: KVCacheRequest, blocks: int) -> str:
    needed = request.max_model_len * request.bytes_per_token / GIB
    shorter = f"set --max-model-len to at most {blocks * request.block_size}, or " if blocks else ""
    return (
        f"one sequence of {request.max_model_len} tokens needs {needed:.2f} GiB of KV cache and "
        f"{request.budget_bytes / GIB:.2f} GiB are there ({request.free_bytes / GIB:.2f} GiB "
        f"free): {shorter}raise --kv-cache-memory or --kv-cache-share"
    )
