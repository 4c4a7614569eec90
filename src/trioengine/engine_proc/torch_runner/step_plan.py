"""One step as attention sees it: where tokens are written, and who attends to which blocks.

Sequences with one token are decoded together, padded to the longest of their bucket. Sequences
with several tokens are chunks, each computed on its own. Nothing here depends on the layer except
the sliding window, so everything is made once a step per window and shared by all layers. There
is no mask over all tokens of all sequences, whose size would be the square of the batch.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

    from trioengine.engine_proc.runner import StepBatch

__all__ = ["DecodeGroup", "PrefillChunk", "QueryTile", "StepPlan", "to_device"]

TILE_QUERIES: Final = 256
"""Queries per masked tile of a chunk: bounds a mask to 256 rows and skips keys after its end."""

SHORT_BLOCKS: Final = 32
"""Decode sequences up to this many blocks share one bucket: padding is cheaper than a call."""


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query each, padded to the same number of blocks.

    Attributes:
        tokens: Their flat token indices, a slice where they are neighbours, else int64 ``[b]``.
        blocks: int64 ``[b, n]``; padding is a sequence's own first block.
        mask: Additive ``[b, 1, 1, n · block_size]``: 0 or -inf.
    """

    tokens: slice | torch.Tensor
    blocks: torch.Tensor
    mask: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class QueryTile:
    """Some queries of a chunk and the keys they can see.

    Attributes:
        queries: Slice of the chunk's tokens.
        keys: Slice of the chunk's gathered keys.
        mask: Additive ``[queries, keys]``; ``None`` where plain causal order says it all.
    """

    queries: slice
    keys: slice
    mask: torch.Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Several consecutive tokens of one sequence.

    Attributes:
        tokens: Slice of the flat tokens.
        blocks: int64 ``[1, n]`` to gather keys from; ``None`` where the chunk's own keys, just
            computed, are all there is.
        tiles: Cover the chunk's queries in order.
    """

    tokens: slice
    blocks: torch.Tensor | None
    tiles: tuple[QueryTile, ...]


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Move a host array without waiting for the device."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class StepPlan:
    """Slots, decode groups and prefill chunks of one ``StepBatch``.

    Args:
        batch: The step.
        block_size: Tokens per block.
        dtype: Of the masks; that of the queries.
        device: Where attention runs.
    """

    def __init__(
        self, batch: StepBatch, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._batch = batch
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._query_lens = np.diff(batch.query_start)
        self._decodes: dict[int | None, list[DecodeGroup]] = {}
        self._chunks: dict[int | None, list[PrefillChunk]] = {}
        self.num_tokens = len(batch.token_ids)
        self.slots = to_device(self._slots(), device)

    def _slots(self) -> npt.NDArray[np.int64]:
        sequence = np.repeat(np.arange(len(self._query_lens)), self._query_lens)
        index, offset = np.divmod(self._batch.positions.astype(np.int64), self._block_size)
        return self._batch.block_tables[sequence, index] * np.int64(self._block_size) + offset

    def decodes(self, window: int | None) -> list[DecodeGroup]:
        """Return the groups that cover every sequence with one token in this step."""
        if window not in self._decodes:
            self._decodes[window] = self._make_decodes(window)
        return self._decodes[window]

    def chunks(self, window: int | None) -> list[PrefillChunk]:
        """Return the chunks, one per sequence with several tokens in this step."""
        if window not in self._chunks:
            rows = np.flatnonzero(self._query_lens > 1)
            self._chunks[window] = [self._make_chunk(int(row), window) for row in rows]
        return self._chunks[window]

    def _make_decodes(self, window: int | None) -> list[DecodeGroup]:
        rows = np.flatnonzero(self._query_lens == 1)
        ends = self._batch.seq_lens[rows].astype(np.int64)
        starts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
        first_blocks = starts // self._block_size
        num_blocks = -(-ends // self._block_size) - first_blocks
        return [
            self._make_group(rows[m], ends[m], starts[m], first_blocks[m], int(num_blocks[m].max()))
            for m in bucket_by_length(num_blocks)
        ]

    def _make_group(
        self,
        rows: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        first_blocks: npt.NDArray[np.int64],
        width: int,
    ) -> DecodeGroup:
        columns = first_blocks[:, None] + np.arange(width)
        used = columns * self._block_size < ends[:, None]
        tables = self._batch.block_tables[rows[:, None], np.where(used, columns, 0)]
        return DecodeGroup(
            tokens=_indices(self._batch.query_start[rows].astype(np.int64), self._device),
            blocks=to_device(tables.astype(np.int64), self._device),
            mask=self._decode_mask(first_blocks * self._block_size, starts, ends, width),
        )

    def _decode_mask(
        self,
        first_keys: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        width: int,
    ) -> torch.Tensor:
        # Relative to the first key gathered: visible keys are low ≤ j < high.
        bounds = to_device(np.stack([starts - first_keys, ends - first_keys]), self._device)
        keys = torch.arange(width * self._block_size, device=self._device)
        hidden = (keys < bounds[0, :, None]) | (keys >= bounds[1, :, None])
        return self._additive(hidden)[:, None, None, :]

    def _make_chunk(self, row: int, window: int | None) -> PrefillChunk:
        start, stop = (int(edge) for edge in self._batch.query_start[row : row + 2])
        length, end = stop - start, int(self._batch.seq_lens[row])
        tokens = slice(start, stop)
        if end == length and (window is None or window >= length):
            whole = slice(0, length)
            return PrefillChunk(tokens, None, (QueryTile(whole, whole, None),))
        before = end - length  # tokens already in the cache: position of the first query
        first_block = 0 if window is None else max(before - window + 1, 0) // self._block_size
        last_block = -(-end // self._block_size)
        table = self._batch.block_tables[row, first_block:last_block].astype(np.int64)
        first_key = first_block * self._block_size
        tiles = tuple(
            self._make_tile(low, min(low + TILE_QUERIES, length), before - first_key, window)
            for low in range(0, length, TILE_QUERIES)
        )
        return PrefillChunk(tokens, to_device(table[None], self._device), tiles)

    def _make_tile(self, low: int, high: int, shift: int, window: int | None) -> QueryTile:
        """Mask queries ``low..high``; query ``i`` stands at gathered key ``i + shift``."""
        first = 0 if window is None else max(low + shift - window + 1, 0)
        keys = torch.arange(first, high + shift, device=self._device)
        queries = torch.arange(low + shift, high + shift, device=self._device)[:, None]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        return QueryTile(slice(low, high), slice(first, high + shift), self._additive(hidden))

    def _additive(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, -torch.inf)


def bucket_by_length(num_blocks: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Split sequences into buckets within which padding at most doubles the keys read.

    Args:
        num_blocks: int64 ``[n]``, blocks that each sequence reads.

    Returns:
        Rising indices per bucket. All sequences of up to ``SHORT_BLOCKS`` blocks share one bucket.
    """
    order = np.argsort(-num_blocks, kind="stable")
    buckets: list[npt.NDArray[np.int64]] = []
    while order.size:
        longest = int(num_blocks[order[0]])
        inside = (num_blocks[order] * 2 > longest) | (longest <= SHORT_BLOCKS)
        buckets.append(np.sort(order[inside]))
        order = order[~inside]
    return buckets


def _indices(indices: npt.NDArray[np.int64], device: torch.device) -> slice | torch.Tensor:
    """Return rising ``indices`` as a slice where they are neighbours: views instead of copies."""
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 == len(indices):
        return slice(first, last + 1)
    return to_device(indices, device)
