"""Slots for the tokens of a request: prefix match, growth, release.

A request is admitted with blocks for all tokens it has; while it decodes it grows by one block at a
time. Blocks become known to the prefix cache (are *sealed*) once they are full and computed, output
tokens included, and stay known after the request has gone.

Between its admission and the sealing of a prompt's blocks the prefix is *coming*: whoever wants the
same one is told to wait the few steps that this takes, instead of computing it a second time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioengine.engine_proc.kv_cache.block_pool import BlockPool, hash_block, root_hash
from trioengine.errors import InternalError

if TYPE_CHECKING:
    from trioengine.engine_proc.request import Request

__all__ = ["KVCacheManager"]


class KVCacheManager:
    """Give blocks to requests and take them back."""

    def __init__(self, pool: BlockPool, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self._caching = enable_prefix_caching
        self._coming: set[bytes] = set()  # hashes of full blocks that running requests compute

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def admit(self, request: Request, *, headroom: int) -> bool:
        """Give a request that holds nothing blocks for all its tokens, or change nothing.

        Leading blocks come from the prefix cache where it knows them (``num_computed`` says how
        far), but never all: at least one token is left to compute, since its logits are needed.
        Nothing changes either where the next block is coming.

        Args:
            request: Waiting or preempted.
            headroom: Blocks that have to stay free for those already running.
        """
        matched = self._match(request)
        if self._is_coming(request, len(matched)):
            return False
        fresh = self.num_blocks_for(len(request.tokens)) - len(matched)
        revived = sum(not self.pool.is_held(block) for block in matched)
        if fresh + revived + headroom > self.pool.num_free:
            return False
        self.pool.hold(matched)
        request.block_ids = matched + self.pool.allocate(fresh)
        request.capacity = len(request.block_ids) * self.block_size
        request.num_sealed = len(matched)
        request.num_computed = len(matched) * self.block_size
        self._announce(request)
        return True

    def _match(self, request: Request) -> list[int]:
        if not self._caching:
            return []
        matched: list[int] = []
        for index in range(self._num_matchable(request)):
            block = self.pool.lookup(self._hash(request, index), self._bytes(request, index))
            if block is None:
                break
            matched.append(block)
        return matched

    def _num_matchable(self, request: Request) -> int:
        if request.needs_all_logits:
            return 0
        return (len(request.tokens) - 1) // self.block_size

    def _is_coming(self, request: Request, index: int) -> bool:
        return (
            bool(self._coming)
            and index < self._num_matchable(request)
            and self._hash(request, index) in self._coming
        )

    def _announce(self, request: Request) -> None:
        if self._caching:
            full = range(request.num_sealed, len(request.tokens) // self.block_size)
            self._coming.update(self._hash(request, index) for index in full)

    def grow(self, request: Request, count: int = 1) -> bool:
        """Give a decoding request its next blocks, or change nothing where too few are free."""
        if self.pool.num_free < count:
            return False
        self.seal(request)
        request.block_ids += self.pool.allocate(count)
        request.capacity += count * self.block_size
        return True

    def seal(self, request: Request) -> None:
        """Tell the prefix cache of every block that is full and computed by now."""
        if not self._caching:
            return
        for index in range(request.num_sealed, request.num_computed // self.block_size):
            block_hash = self._hash(request, index)
            self.pool.seal(request.block_ids[index], block_hash, self._bytes(request, index))
            self._coming.discard(block_hash)
            request.num_sealed = index + 1

    def free(self, request: Request) -> None:
        """Take all blocks back; what is computed stays known until its blocks are needed."""
        self.seal(request)
        self._coming.difference_update(request.block_hashes[request.num_sealed :])
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.capacity = request.num_computed = request.num_sealed = 0

    def check_idle(self) -> None:
        """Check that nothing is held and nothing is coming: no request is left.

        Raises:
            InternalError: A request that has ended left something behind.
        """
        if self.pool.num_free != self.pool.num_blocks or self._coming:
            raise InternalError(
                f"no request is left, but {len(self._coming)} blocks are coming: {self.pool!r}"
            )

    def _hash(self, request: Request, index: int) -> bytes:
        """Return the hash of full block ``index``; its predecessors are hashed on the way."""
        hashes = request.block_hashes
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else root_hash(request.params.cache_salt)
            hashes.append(hash_block(parent, self._bytes(request, len(hashes))))
        return hashes[index]

    def _bytes(self, request: Request, index: int) -> bytes:
        start = index * self.block_size
        return request.tokens[start : start + self.block_size].tobytes()
