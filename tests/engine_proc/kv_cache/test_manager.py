"""What a request gets from the cache, and what stays behind when it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers.requests import make_request
from trioengine.engine_proc.kv_cache.block_pool import BlockPool
from trioengine.engine_proc.kv_cache.manager import KVCacheManager
from trioengine.errors import InternalError
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trioengine.engine_proc.request import Request

BLOCK_SIZE = 4


def request(*tokens: int) -> Request:
    return make_request(tokens)


def manager(num_blocks: int = 8, *, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_blocks), BLOCK_SIZE, enable_prefix_caching=caching)


def compute(cache: KVCacheManager, one: Request, num_tokens: int) -> None:
    one.num_computed += num_tokens
    cache.seal(one)


def test_admission_gives_blocks_for_all_tokens() -> None:
    cache, one = manager(), request(*range(9))
    assert cache.admit(one, headroom=0)
    assert (len(one.block_ids), one.capacity, one.num_computed) == (3, 12, 0)


def test_admission_leaves_the_headroom_or_changes_nothing() -> None:
    cache, one = manager(4), request(*range(9))
    assert not cache.admit(one, headroom=2)
    assert (one.block_ids, cache.pool.num_free) == ([], 4)
    assert cache.admit(one, headroom=1)


def test_a_prefix_is_found_again_while_held_and_after() -> None:
    cache, one = manager(), request(*range(9))
    cache.admit(one, headroom=0)
    compute(cache, one, 9)
    two = request(*range(8), 77, 78)
    cache.admit(two, headroom=0)
    assert two.num_computed == 8
    assert two.block_ids[:2] == one.block_ids[:2]
    assert two.block_ids[2] != one.block_ids[2]
    cache.free(one)
    cache.free(two)
    three = request(*range(10))
    cache.admit(three, headroom=0)
    assert three.num_computed == 8


def test_a_prefix_is_shared_by_those_of_one_salt() -> None:
    cache = manager(12)
    for salt in ("", "mine", "yours"):
        params = SamplingParams(cache_salt=salt)
        for found in (0, 8):
            one = make_request(range(9), params=params)
            cache.admit(one, headroom=0)
            assert one.num_computed == found
            compute(cache, one, 9 - found)
            cache.free(one)


def test_never_the_whole_prompt() -> None:
    cache, one = manager(), request(*range(8))
    cache.admit(one, headroom=0)
    compute(cache, one, 8)
    two = request(*range(8))
    cache.admit(two, headroom=0)
    assert two.num_computed == 4


def test_output_tokens_are_found_too() -> None:
    cache, one = manager(), request(0, 1, 2)
    cache.admit(one, headroom=0)
    one.tokens.extend([3, 4])  # generated; the last is not computed
    compute(cache, one, 4)
    cache.free(one)
    two = request(0, 1, 2, 3, 4, 5)
    cache.admit(two, headroom=0)
    assert two.num_computed == 4


def test_a_block_is_sealed_only_once_it_is_computed() -> None:
    cache, one = manager(), request(*range(9))
    cache.admit(one, headroom=0)
    compute(cache, one, 7)
    cache.free(one)
    two = request(*range(9))
    cache.admit(two, headroom=0)
    assert two.num_computed == 4


def test_a_hit_on_free_blocks_counts_them_as_taken() -> None:
    cache, one = manager(3), request(*range(9))
    cache.admit(one, headroom=0)
    compute(cache, one, 9)
    cache.free(one)
    assert cache.pool.num_free == 3
    other = request(*range(50, 54))
    cache.admit(other, headroom=0)  # takes the blank block; two known ones are free
    assert not cache.admit(request(*range(9)), headroom=0)  # needs both and a third
    cache.pool.check_integrity()


def test_a_prefix_that_is_coming_is_waited_for() -> None:
    cache, one = manager(), request(*range(9))
    cache.admit(one, headroom=0)
    two = request(*range(9))
    assert not cache.admit(two, headroom=0)
    compute(cache, one, 4)
    assert not cache.admit(two, headroom=0), "the second block is still coming"
    compute(cache, one, 4)
    assert cache.admit(two, headroom=0)
    assert two.num_computed == 8


def test_what_will_not_come_is_not_waited_for() -> None:
    cache, one = manager(), request(*range(9))
    cache.admit(one, headroom=0)
    cache.free(one)  # aborted or preempted before it computed anything
    assert cache.admit(request(*range(9)), headroom=0)


def test_nobody_waits_for_a_prefix_shorter_than_a_block() -> None:
    cache = manager()
    cache.admit(request(*range(9)), headroom=0)
    assert cache.admit(request(0, 1, 2, 3), headroom=0)
    assert cache.admit(request(0, 1, 2, 99, 4), headroom=0)


def test_growth_by_one_block_until_none_is_free() -> None:
    cache, one = manager(2), request(*range(4))
    cache.admit(one, headroom=0)
    assert cache.grow(one)
    assert one.capacity == 8
    assert not cache.grow(one)
    assert len(one.block_ids) == 2


def test_without_caching_nothing_is_known() -> None:
    cache, one = manager(caching=False), request(*range(9))
    cache.admit(one, headroom=0)
    compute(cache, one, 9)
    cache.free(one)
    assert cache.pool.num_blank == 8
    cache.check_idle()


def test_leftovers_are_loud() -> None:
    cache, one = manager(), request(*range(9))
    cache.admit(one, headroom=0)
    with pytest.raises(InternalError, match="3 held"):
        cache.check_idle()
    cache.free(one)
    cache.check_idle()
