"""Floors: the published reckoning for SmolLM2-135M, and sums done step by step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.bench.floor import Rates, decode_step_s, floor_of, prefill_s
from trioengine.bench.model_cost import ModelCost
from trioengine.bench.workloads import WORKLOADS, Workload

SMOLLM2 = ModelCost(
    weight_bytes=269_030_016,
    body_params=106_203_456,
    head_params=28_311_552,
    kv_bytes_per_token=23_040,
)
ZEN5 = Rates(bytes_per_s=47e9, flops=1e12)


@pytest.mark.parametrize(
    ("batch", "context", "tok_s"), [(1, 128, 171), (16, 256, 2070), (64, 256, 2540)]
)
def test_steps_of_smollm2_on_two_zen5_cores(batch: int, context: int, tok_s: float) -> None:
    step_s = decode_step_s(SMOLLM2, ZEN5, batch=batch, context=context)
    assert batch / step_s == pytest.approx(tok_s, rel=0.015)


def test_prefill_of_smollm2_on_two_zen5_cores() -> None:
    assert 1024 / prefill_s(SMOLLM2, ZEN5, num_tokens=1024) == pytest.approx(4700, rel=0.01)


def test_one_stream_is_its_steps_one_after_the_other() -> None:
    w1 = WORKLOADS["W1"]
    floor = floor_of(w1, SMOLLM2, Rates(bytes_per_s=47e9, flops=None))
    steps_s = SMOLLM2.weight_bytes / 47e9  # the prefill, which reads no cache
    steps_s += sum(
        (SMOLLM2.weight_bytes + context * SMOLLM2.kv_bytes_per_token) / 47e9
        for context in range(65, 192)
    )
    assert floor.tok_s == pytest.approx(128 / steps_s, rel=1e-9)
    assert floor.decode_tok_s == pytest.approx(127 / (steps_s - 269_030_016 / 47e9), rel=1e-3)


small = st.integers(1, 9)


@given(streams=small, requests=small, shared=st.integers(0, 9), prompt=small, outputs=small)
def test_bytes_and_operations_of_any_workload(
    streams: int, requests: int, shared: int, prompt: int, outputs: int
) -> None:
    """Against counting them one by one, with rates that make each kind visible alone."""
    workload = Workload(
        name="T",
        concurrency=streams,
        num_requests=requests,
        shared_tokens=shared,
        prompt_tokens=prompt,
        output_tokens=outputs,
    )
    body = shared
    head = kv = 0
    for _ in range(requests):
        body += prompt
        head += 1
        for made in range(1, outputs):
            body += 1
            head += 1
            kv += prompt + made
    rounds = -(-requests // streams)
    kv += rounds * (outputs - 1) * shared
    cost = ModelCost(weight_bytes=1000, body_params=3, head_params=7, kv_bytes_per_token=2)
    tokens = requests * outputs

    def total_s(rates: Rates) -> float:
        return tokens / floor_of(workload, cost, rates).tok_s

    read_only = total_s(Rates(bytes_per_s=1.0, flops=None))
    assert read_only == pytest.approx(rounds * outputs * 1000 + 2 * kv)
    slow_arithmetic = total_s(Rates(bytes_per_s=1.0, flops=1e-6))
    assert slow_arithmetic == pytest.approx((6 * body + 14 * head) * 1e6 + 2 * kv)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_better_machine_has_a_higher_floor(name: str) -> None:
    floor = floor_of(WORKLOADS[name], SMOLLM2, ZEN5)
    better = floor_of(WORKLOADS[name], SMOLLM2, Rates(bytes_per_s=94e9, flops=2e12))
    assert better.tok_s == pytest.approx(2 * floor.tok_s)
    assert better.decode_tok_s == pytest.approx(2 * floor.decode_tok_s)
    assert better.ttft_ms == pytest.approx(floor.ttft_ms / 2)


def test_a_shared_prefix_is_paid_once() -> None:
    w4 = WORKLOADS["W4"]
    alone = Workload(
        name="T", concurrency=16, num_requests=32, prompt_tokens=1056, output_tokens=32
    )
    assert floor_of(w4, SMOLLM2, ZEN5).tok_s > 4 * floor_of(alone, SMOLLM2, ZEN5).tok_s
    assert floor_of(w4, SMOLLM2, ZEN5).ttft_ms < floor_of(alone, SMOLLM2, ZEN5).ttft_ms / 4
