"""How fast a workload could be at best on a machine whose bandwidth and arithmetic are known.

A step that reads every weight once and multiplies each token with them takes at least the longer
of the two, the memory's time and the arithmetic's (the roofline). Attention comes between those
products and waits for them, so the time to read keys and values is added:

    time >= max(FLOPs / FLOP rate, weight reads * weight bytes / bandwidth) + KV bytes / bandwidth

Over a whole workload the operations are those of all tokens, and the weights are read at least as
often as the longest chain of steps that wait for each other: one client's, one step a token. That
holds for any schedule, also where prompts are computed beside decodes; speculation and a batch
that is split to overlap attention with products would be beyond it. What a processor does not need
to read from memory, since a cache held it, is accounted for by measuring the bandwidth on a buffer
of the weights' size.

Source: Williams, Waterman and Patterson 2009, CACM 52(4), "Roofline".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from trioengine.bench.model_cost import ModelCost
    from trioengine.bench.workloads import Workload

__all__ = ["Floor", "Rates", "decode_step_s", "floor_of", "prefill_s"]


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine gives.

    Attributes:
        bytes_per_s: Read bandwidth of all processors together.
        flops: Floating-point operations per second; ``None`` if unknown, which leaves the
            arithmetic out of account (a lower bound all the same).
    """

    bytes_per_s: float
    flops: float | None


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """The best that a workload's figures can be.

    Attributes:
        tok_s: Output tokens per second of the whole run.
        decode_tok_s: Tokens per second of one stream after its first token, if nothing but the
            decodes of as many streams as there are clients were computed meanwhile.
        ttft_ms: Of a request that is alone, where a shared prefix has been computed before.
    """

    tok_s: float
    decode_tok_s: float
    ttft_ms: float


def floor_of(workload: Workload, cost: ModelCost, rates: Rates) -> Floor:
    """Return the floor of a workload; a shared prefix is computed and stored once."""
    streams, outputs = workload.concurrency, workload.output_tokens
    rounds = -(-workload.num_requests // streams)
    prompt_flops = workload.shared_tokens * cost.body_flops
    prompt_flops += workload.num_requests * workload.prompt_tokens * cost.body_flops
    decodes = workload.num_requests * (outputs - 1)
    flops = prompt_flops + decodes * cost.body_flops
    flops += workload.num_requests * outputs * cost.head_flops
    # Decode number i (from 1) attends to the prompt and the first i tokens of the answer.
    own_tokens = (outputs - 1) * workload.prompt_tokens + outputs * (outputs - 1) // 2
    kv_tokens = workload.num_requests * own_tokens
    kv_tokens += rounds * (outputs - 1) * workload.shared_tokens  # once for the whole batch
    total_s = _time_s(cost, rates, flops=flops, weight_reads=rounds * outputs, kv_tokens=kv_tokens)
    middle = workload.prompt_tokens + outputs // 2
    step_s = decode_step_s(
        cost, rates, batch=streams, context=middle, shared=workload.shared_tokens
    )
    first_s = prefill_s(cost, rates, num_tokens=workload.prompt_tokens)
    return Floor(
        tok_s=workload.num_requests * outputs / total_s,
        decode_tok_s=1 / step_s,
        ttft_ms=first_s * 1e3,
    )


def decode_step_s(
    cost: ModelCost, rates: Rates, *, batch: int, context: int, shared: int = 0
) -> float:
    """Return the least time of a step that decodes ``batch`` sequences.

    Args:
        cost: Of the model.
        rates: Of the machine.
        batch: Sequences.
        context: Tokens that each attends to, beside shared ones.
        shared: Tokens that all attend to, read once.
    """
    return _time_s(
        cost,
        rates,
        flops=batch * (cost.body_flops + cost.head_flops),
        weight_reads=1,
        kv_tokens=batch * context + shared,
    )


def prefill_s(cost: ModelCost, rates: Rates, *, num_tokens: int) -> float:
    """Return the least time from a prompt of ``num_tokens`` to its first token."""
    flops = num_tokens * cost.body_flops + cost.head_flops
    return _time_s(cost, rates, flops=flops, weight_reads=1, kv_tokens=0)


def _time_s(
    cost: ModelCost, rates: Rates, *, flops: int, weight_reads: int, kv_tokens: int
) -> float:
    """See the module for the formula."""
    arithmetic_s = 0.0 if rates.flops is None else flops / rates.flops
    weights_s = weight_reads * cost.weight_bytes / rates.bytes_per_s
    kv_s = kv_tokens * cost.kv_bytes_per_token / rates.bytes_per_s
    return max(arithmetic_s, weights_s) + kv_s
