"""No history of allocate, share, seal and release loses, doubles or misremembers a block."""

from __future__ import annotations

import collections

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from trioengine.engine_proc.kv_cache.block_pool import ROOT_HASH, BlockPool, hash_block
from trioengine.errors import InternalError

NUM_BLOCKS = 6
Table = tuple[int, ...]


class BlockPoolMachine(RuleBasedStateMachine):
    """The model: a multiset of holders, and what each known block holds."""

    tables: Bundle[Table] = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: collections.Counter[int] = collections.Counter()
        self.content: dict[int, tuple[bytes, bytes]] = {}  # block: (hash, token bytes)
        self.freed: list[int] = []  # known blocks that nobody holds, longest free first

    @rule(target=tables, count=st.integers(1, 4))
    def allocate(self, count: int) -> Table | MultipleResults[Table]:
        if count > self.pool.num_free:
            with pytest.raises(InternalError):
                self.pool.allocate(count)
            return multiple()
        blank = self.pool.num_blank
        blocks = self.pool.allocate(count)
        evicted = self.freed[
            : max(0, count - blank)
        ]  # least recently freed go first, and only then
        del self.freed[: len(evicted)]
        for block in evicted:
            del self.content[block]
        assert set(evicted) <= set(blocks)
        assert not any(self.holders[block] for block in blocks), "a held block was handed out"
        assert not set(blocks) & set(self.content)
        self.holders.update(blocks)
        return tuple(blocks)

    @rule(table=consumes(tables))
    def release(self, table: tuple[int, ...]) -> None:
        self.pool.release(table)
        self.holders.subtract(table)
        for block in reversed(table):
            if self.holders[block] == 0 and block in self.content:
                self.freed.append(block)

    @rule(table=tables, text=st.integers(0, 2))
    def seal(self, table: tuple[int, ...], text: int) -> None:
        if not all(self.holders[block] for block in table):
            return  # hypothesis may draw a table whose twin was consumed
        parent = ROOT_HASH
        for index, block in enumerate(table):
            token_bytes = bytes([text if index else 0])  # first blocks are shared by all texts
            parent = hash_block(parent, token_bytes)
            self.pool.seal(block, parent, token_bytes)
            known = {block_hash for block_hash, _ in self.content.values()}
            if block not in self.content and parent not in known:
                self.content[block] = (parent, token_bytes)

    @rule(target=tables, text=st.integers(0, 2), length=st.integers(1, 4))
    def hit(self, text: int, length: int) -> Table | MultipleResults[Table]:
        parent, blocks = ROOT_HASH, []
        for index in range(length):
            token_bytes = bytes([text if index else 0])
            parent = hash_block(parent, token_bytes)
            block = self.pool.lookup(parent, token_bytes)
            expected = [b for b, known in self.content.items() if known == (parent, token_bytes)]
            if block is None:
                assert not expected
                break
            assert [block] == expected
            blocks.append(block)
        if not blocks:
            return multiple()
        self.pool.hold(blocks)
        self.holders.update(blocks)
        self.freed = [block for block in self.freed if block not in blocks]
        return tuple(blocks)

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_cache() == len(self.content)
        self.content.clear()
        self.freed.clear()

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def double_free_is_loud(self) -> None:
        block = next(b for b in range(NUM_BLOCKS) if not self.holders[b])
        with pytest.raises(InternalError):
            self.pool.release([block])

    @invariant()
    def blocks_are_conserved(self) -> None:
        self.pool.check_integrity()
        in_use = {block for block, count in self.holders.items() if count}
        assert self.pool.num_free + len(in_use) == NUM_BLOCKS
        assert self.pool.num_evictable == len(self.freed)
        assert all(self.pool.is_held(block) == (block in in_use) for block in range(NUM_BLOCKS))


TestBlockPool = BlockPoolMachine.TestCase
