"""Who holds each block of the paged KV cache, and which prefix a block remembers.

Theory of operation
-------------------
A block is *held* (reference count ≥ 1), *evictable* (count 0, but its content is known by hash and
may be asked for again) or *blank*. Allocation takes blank blocks first, then the evictable one that
has been free for longest, which forgets its prefix. A block that somebody holds is never written
over, so a hit can never see another sequence's keys and values.

The hash of a full block is blake2b over its parent's hash and its own token ids, so one hash stands
for the whole prefix up to its end. A lookup still compares the token ids: a collision costs a miss,
not a wrong answer.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from trioengine.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["ROOT_HASH", "BlockPool", "hash_block", "root_hash"]

_DIGEST_BYTES: Final = 16
ROOT_HASH: Final = bytes(_DIGEST_BYTES)


def hash_block(parent: bytes, token_bytes: bytes) -> bytes:
    """Return the hash of a full block with these token ids after the prefix ``parent``."""
    return blake2b(parent + token_bytes, digest_size=_DIGEST_BYTES).digest()


def root_hash(salt: str) -> bytes:
    """Return the parent of a first block: sequences of different salts share no prefix."""
    return hash_block(ROOT_HASH, salt.encode()) if salt else ROOT_HASH


class BlockPool:
    """Reference counts, the free list, and the map from prefix hash to block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # popped from the end: 0 first
        self._evictable: OrderedDict[int, None] = OrderedDict()  # longest free first
        self._by_hash: dict[bytes, int] = {}
        self._sealed: list[tuple[bytes, bytes] | None] = [None] * num_blocks

    def __repr__(self) -> str:
        held = self.num_blocks - self.num_free
        return f"<BlockPool {held} held, {self.num_evictable} evictable, {self.num_blank} blank>"

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: blank and evictable."""
        return len(self._blank) + len(self._evictable)

    @property
    def num_blank(self) -> int:
        """Free blocks that remember nothing."""
        return len(self._blank)

    @property
    def num_evictable(self) -> int:
        """Free blocks that still serve prefix hits."""
        return len(self._evictable)

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` blocks, each held once.

        Raises:
            InternalError: Fewer are free; nothing has changed. Callers ask ``num_free`` first.
        """
        if count > self.num_free:
            raise InternalError(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} free")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            self._forget(block)
        self._references[block] = 1
        return block

    def _forget(self, block: int) -> None:
        sealed = self._sealed[block]
        if sealed is not None:
            del self._by_hash[sealed[0]]
            self._sealed[block] = None

    def is_held(self, block: int) -> bool:
        """True while a sequence holds the block."""
        return self._references[block] > 0

    def lookup(self, block_hash: bytes, token_bytes: bytes) -> int | None:
        """Return the block that holds exactly this prefix, ``None`` if there is none."""
        block = self._by_hash.get(block_hash)
        if block is None or self._sealed[block] != (block_hash, token_bytes):
            return None
        return block

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold each of these blocks once more (after ``lookup``)."""
        for block in blocks:
            if self._references[block] == 0:
                del self._evictable[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of each of these blocks, which are one sequence's in its order.

        They become free last to first, so that eviction eats a prefix from its end.

        Raises:
            InternalError: A block is not held: somebody freed it twice.
        """
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise InternalError(f"block {block} was released, but nobody holds it")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._set_free(block)

    def _set_free(self, block: int) -> None:
        if self._sealed[block] is None:
            self._blank.append(block)
        else:
            self._evictable[block] = None

    def seal(self, block: int, block_hash: bytes, token_bytes: bytes) -> None:
        """Remember what a full, computed, held block holds. The first block of a prefix wins."""
        if block_hash in self._by_hash or self._sealed[block] is not None:
            return
        self._by_hash[block_hash] = block
        self._sealed[block] = (block_hash, token_bytes)

    def reset_cache(self) -> int:
        """Forget every prefix; return how many blocks were known. Held blocks stay held."""
        known = len(self._by_hash)
        self._by_hash.clear()
        self._sealed = [None] * self.num_blocks
        self._blank += self._evictable
        self._evictable.clear()
        return known

    def check_integrity(self) -> None:
        """Check every invariant of the pool.

        Raises:
            InternalError: One is broken; the message says which.
        """
        free = [*self._blank, *self._evictable]
        unheld = {block for block, count in enumerate(self._references) if count == 0}
        if len(set(free)) != len(free) or set(free) != unheld:
            raise InternalError(f"{self!r}: the free list and the reference counts disagree")
        if any(self._sealed[block] is not None for block in self._blank):
            raise InternalError(f"{self!r}: a blank block remembers a prefix")
        known = {sealed[0]: block for block, sealed in enumerate(self._sealed) if sealed}
        if known != self._by_hash or not set(self._evictable) <= set(known.values()):
            raise InternalError(f"{self!r}: the hash map and the blocks disagree")
