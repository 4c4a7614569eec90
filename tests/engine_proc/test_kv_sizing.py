from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.engine_proc.kv_sizing import (
    GIB,
    KVCacheRequest,
    KVCacheSizeError,
    num_kv_blocks,
    require_memory,
)
from trioengine.errors import ConfigError

REQUEST = KVCacheRequest(
    bytes_per_token=1024,
    block_size=16,
    max_model_len=1000,
    max_num_seqs=4,
    free_bytes=GIB,
    share=0.5,
)


def test_the_users_size_is_taken_whole() -> None:
    request = dataclasses.replace(REQUEST, budget_gib=0.25)
    assert num_kv_blocks(request) == GIB // 4 // (1024 * 16)


def test_without_a_size_there_is_no_more_than_all_sequences_can_use() -> None:
    assert num_kv_blocks(REQUEST) == 4 * 63  # 63 blocks hold 1,000 tokens


def test_without_a_size_a_share_of_free_memory_is_taken() -> None:
    request = dataclasses.replace(REQUEST, free_bytes=3 * 2**20)
    assert num_kv_blocks(request) == 3 * 2**19 // (1024 * 16)


def test_a_size_beyond_free_memory_is_refused_with_both_numbers() -> None:
    request = dataclasses.replace(REQUEST, budget_gib=1.5)
    with pytest.raises(ConfigError, match=r"1\.5 GiB exceeds the free memory, 1\.00 GiB"):
        num_kv_blocks(request)


def test_a_cache_below_one_sequence_is_refused_with_the_length_that_fits() -> None:
    request = dataclasses.replace(REQUEST, max_model_len=10_000, budget_gib=16 * 100 / 2**20)
    with pytest.raises(ConfigError, match=r"10000 tokens needs 0\.01 GiB.*at most 1600, or"):
        num_kv_blocks(request)


def test_a_cache_below_one_block_is_refused_without_a_length() -> None:
    request = dataclasses.replace(REQUEST, budget_gib=0.0)
    with pytest.raises(KVCacheSizeError, match=r" free\): raise --kv-cache-memory or"):
        num_kv_blocks(request)


def test_what_there_is_is_told_in_tokens_and_in_requests(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        num_kv_blocks(dataclasses.replace(REQUEST, budget_gib=4000 * 1024 / GIB))
    assert "0.00 of 1.00 GiB free, 4000 tokens, 4.0 requests of 1000 tokens" in caplog.text


def test_weights_that_do_not_fit_are_refused_with_both_numbers() -> None:
    require_memory("the weights", GIB, GIB)
    with pytest.raises(ConfigError, match=r"the weights take 1\.50 GiB and 1\.00 GiB are free"):
        require_memory("the weights", 3 * GIB // 2, GIB)


@given(
    st.builds(
        KVCacheRequest,
        bytes_per_token=st.integers(1, 10**6),
        block_size=st.integers(1, 64),
        max_model_len=st.integers(1, 10**5),
        max_num_seqs=st.integers(1, 256),
        free_bytes=st.integers(0, 10**12),
        share=st.floats(0.1, 0.9),
        budget_gib=st.none() | st.floats(0.001, 500.0),
    )
)
def test_what_is_granted_fits_and_holds_one_sequence(request: KVCacheRequest) -> None:
    try:
        blocks = num_kv_blocks(request)
    except ConfigError:
        return
    assert blocks * request.block_size * request.bytes_per_token <= request.free_bytes
    assert blocks * request.block_size >= request.max_model_len
