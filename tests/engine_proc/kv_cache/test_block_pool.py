"""Single facts about the pool; histories are in tests/property/test_block_pool.py."""

from __future__ import annotations

import pytest

from trioengine.engine_proc.kv_cache.block_pool import ROOT_HASH, BlockPool, hash_block
from trioengine.errors import InternalError


def sealed_pool() -> BlockPool:
    """Three blocks; 0 and 1 hold the prefix aa, bb and are free again."""
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    parent = hash_block(ROOT_HASH, b"aa")
    pool.seal(first, parent, b"aa")
    pool.seal(second, hash_block(parent, b"bb"), b"bb")
    pool.release([first, second])
    return pool


def test_a_hash_stands_for_the_whole_prefix() -> None:
    parent = hash_block(ROOT_HASH, b"aa")
    assert hash_block(parent, b"bb") != hash_block(ROOT_HASH, b"bb")
    assert hash_block(parent, b"bb") == hash_block(hash_block(ROOT_HASH, b"aa"), b"bb")


def test_a_collision_is_a_miss() -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    pool.seal(0, b"one hash", b"these tokens")
    assert pool.lookup(b"one hash", b"these tokens") == 0
    assert pool.lookup(b"one hash", b"other tokens") is None


def test_blank_blocks_go_before_known_ones() -> None:
    pool = sealed_pool()
    assert (pool.num_blank, pool.num_evictable) == (1, 2)
    assert pool.allocate(1) == [2]


def test_a_prefix_is_eaten_from_its_end() -> None:
    pool = sealed_pool()
    pool.allocate(2)
    parent = hash_block(ROOT_HASH, b"aa")
    assert pool.lookup(parent, b"aa") == 0
    assert pool.lookup(hash_block(parent, b"bb"), b"bb") is None


def test_a_hit_keeps_a_block_from_eviction() -> None:
    pool = sealed_pool()
    pool.hold([0])
    assert pool.num_evictable == 1
    assert set(pool.allocate(2)) == {1, 2}
    with pytest.raises(InternalError, match="0 of 3 free"):
        pool.allocate(1)


def test_the_first_block_of_a_prefix_wins() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    pool.seal(0, b"h", b"t")
    pool.seal(1, b"h", b"t")
    pool.release([1])
    assert pool.lookup(b"h", b"t") == 0
    assert (pool.num_blank, pool.num_evictable) == (1, 0)


def test_a_failed_allocation_changes_nothing() -> None:
    pool = sealed_pool()
    with pytest.raises(InternalError):
        pool.allocate(4)
    assert (pool.num_blank, pool.num_evictable) == (1, 2)


def test_reset_forgets_but_frees_nothing_that_is_held() -> None:
    pool = sealed_pool()
    pool.hold([0])
    assert pool.reset_cache() == 2
    assert pool.lookup(hash_block(ROOT_HASH, b"aa"), b"aa") is None
    assert (pool.num_free, pool.num_blank) == (2, 2)
    pool.check_integrity()


@pytest.mark.parametrize("damage", ["doubled", "lost", "unknown hash", "blank remembers"])
def test_integrity_check_sees(damage: str) -> None:
    pool = sealed_pool()
    if damage == "doubled":
        pool._blank.append(pool._blank[0])
    elif damage == "lost":
        pool._blank.clear()
    elif damage == "unknown hash":
        pool._by_hash.clear()
    else:
        pool._sealed[2] = (b"h", b"t")
    with pytest.raises(InternalError):
        pool.check_integrity()
