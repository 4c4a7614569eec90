"""Paged attention behind transformers' attention registry.

Theory of operation
-------------------
Every decoder of transformers asks one registry for its attention function and hands it queries,
keys and values after its own projections, norms and rotary embedding. We register one function
there, so that any architecture runs on our cache with its own modelling code. No mask function is
registered under the same name, on purpose: models then build no mask at all, and who sees what is
the plan's business. What belongs to one model travels on its own modules (``bind``), not in
globals, so that two runners can live in one process.

An argument that changes the result and that this function does not honour is refused, never
ignored; the loader's probe meets it before any request does.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioengine.engine_proc.torch_runner.paged_cache import LayerCache
    from trioengine.engine_proc.torch_runner.step_plan import (
        DecodeGroup,
        PrefillChunk,
        QueryTile,
        StepPlan,
    )

__all__ = [
    "PAGED",
    "Attends",
    "AttentionCall",
    "PagedAttention",
    "UnsupportedAttentionError",
    "bind",
    "register",
]

PAGED: Final = "trioengine_paged"
"""Name of the implementation in transformers' registry."""

_HARMLESS: Final = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_router_logits"}
)
"""Arguments that models pass along and that do not change what is computed."""


class UnsupportedAttentionError(Exception):
    """The architecture wants something of attention that this runner does not compute."""


@dataclasses.dataclass(slots=True)
class AttentionCall:
    """One layer's attention over the flat tokens of a step.

    Attributes:
        layer: Index of the layer.
        query: ``[num_tokens, num_heads, key_dim]``.
        key: ``[num_tokens, num_kv_heads, key_dim]``.
        value: ``[num_tokens, num_kv_heads, value_dim]``.
        scale: Factor on the scores.
        window: A query sees its own position and the ``window - 1`` before it; ``None``: all.
        softcap: Scores ``s`` become ``softcap · tanh(s / softcap)``; ``None``: as they are.
        sinks: ``[num_heads]``, one extra score per head that takes weight and gives no value.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class Attends(Protocol):
    """What a model's attention modules are bound to: the paged cache, or the loader's probe."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return ``[num_tokens, num_heads, value_dim]``."""


def register() -> None:
    """Put ``PAGED`` into transformers' registry. Harmless when repeated."""
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, _registered)


def bind(network: torch.nn.Module, attends: Attends) -> None:
    """Let every attention module of ``network`` compute through ``attends`` from now on."""
    for module in network.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.trioengine_attends = attends  # type: ignore[assignment]  # not a tensor


def _registered(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with transformers' signature; tensors are ``[1, heads, num_tokens, dim]``."""
    _refuse_unknown(module, attention_mask, dropout, is_causal, extra)
    attends: Attends = module.trioengine_attends  # type: ignore[assignment]
    call = AttentionCall(
        layer=module.layer_idx,  # type: ignore[arg-type]
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return attends.attend(call)[None], None


def _refuse_unknown(
    module: torch.nn.Module,
    attention_mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool | None,
    extra: dict[str, Any],
) -> None:
    unknown = sorted(
        name for name, value in extra.items() if value is not None and name not in _HARMLESS
    )
    if attention_mask is not None:
        unknown.append("attention_mask")
    if dropout:
        unknown.append("dropout")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        unknown.append("is_causal=False")
    if unknown:
        raise UnsupportedAttentionError(
            f"{type(module).__name__} passes {', '.join(unknown)} to attention"
        )


class PagedAttention:
    """All attention layers of one model over one paged cache. Fulfils ``Attends``."""

    def __init__(self, layers: Sequence[LayerCache]) -> None:
        self._layers = layers
        self.plan: StepPlan | None = None
        """The running step, set by the runner before the network is called."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Write this step's keys and values, then attend. See ``Attends``."""
        plan = self.plan
        if plan is None:
            raise RuntimeError("attention outside a step")
        cache = self._layers[call.layer]
        cache.write(plan.slots, call.key, call.value)
        size = (plan.num_tokens, call.query.shape[1], call.value.shape[2])
        output = call.query.new_empty(size)
        for group in plan.decodes(call.window):
            output[group.tokens] = _decode(call, cache, group)
        for chunk in plan.chunks(call.window):
            _prefill(call, cache, chunk, output[chunk.tokens])
        return output


def _decode(call: AttentionCall, cache: LayerCache, group: DecodeGroup) -> torch.Tensor:
    """Attend with one query per sequence; return ``[b, num_heads, value_dim]``.

    The query heads that share a KV head are laid out as if they were consecutive queries of it,
    so that grouped heads cost no copy of keys.
    """
    keys, values = cache.gather(group.blocks)
    query = call.query[group.tokens]
    grouped = query.reshape(len(query), keys.shape[1], -1, query.shape[2])
    if _is_plain(call):
        result = functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=group.mask, scale=call.scale
        )
    else:
        result = _explicit(call, grouped[:, :, :, None], keys, values, group.mask[:, None])
    return result.reshape(len(query), query.shape[1], -1)


def _prefill(
    call: AttentionCall, cache: LayerCache, chunk: PrefillChunk, output: torch.Tensor
) -> None:
    """Attend with the queries of one chunk into ``output``, ``[length, num_heads, value_dim]``."""
    query = call.query[chunk.tokens].transpose(0, 1)[None]
    if chunk.blocks is None:
        keys = call.key[chunk.tokens].transpose(0, 1)[None]
        values = call.value[chunk.tokens].transpose(0, 1)[None]
    else:
        keys, values = cache.gather(chunk.blocks)
    attend = _plain_tile if _is_plain(call) else _explicit_tile
    for tile in chunk.tiles:
        result = attend(
            call, query[:, :, tile.queries], keys[:, :, tile.keys], values[:, :, tile.keys], tile
        )
        output[tile.queries] = result[0].transpose(0, 1)


def _is_plain(call: AttentionCall) -> bool:
    """Say whether torch's own fused attention computes this call."""
    return call.softcap is None and call.sinks is None


def _plain_tile(
    call: AttentionCall,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tile: QueryTile,
) -> torch.Tensor:
    # With a mask, CUDA's fused kernels want as many KV heads as query heads; the CPU's do not.
    if query.is_cuda and tile.mask is not None and keys.shape[1] != query.shape[1]:
        repeats = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    return functional.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=tile.mask,
        is_causal=tile.mask is None,
        scale=call.scale,
        enable_gqa=keys.shape[1] != query.shape[1],
    )


def _explicit_tile(
    call: AttentionCall,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tile: QueryTile,
) -> torch.Tensor:
    length = query.shape[2]
    mask = tile.mask
    if mask is None:
        mask = query.new_full((length, length), -torch.inf).triu_(1)
    grouped = query.reshape(1, keys.shape[1], -1, length, query.shape[3])
    return _explicit(call, grouped, keys, values, mask).flatten(1, 2)


def _explicit(
    call: AttentionCall,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Attention written out, for what the fused kernels cannot do.

    Args:
        call: Scale, soft cap and sinks.
        query: ``[b, num_kv_heads, group, num_queries, key_dim]``.
        keys: ``[b, num_kv_heads, num_keys, key_dim]``.
        values: ``[b, num_kv_heads, num_keys, value_dim]``.
        mask: Additive, broadcast to ``[b, num_kv_heads, group, num_queries, num_keys]``.

    Returns:
        ``[b, num_kv_heads, group, num_queries, value_dim]``.

    Source: soft cap, Gemma 2 report, arXiv:2408.00118, section 2; sinks, gpt-oss model card,
    arXiv:2508.10925, section 2.
    """
    scores = torch.matmul(query, keys[:, :, None].transpose(3, 4)) * call.scale
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores + mask
    if call.sinks is not None:
        sinks = call.sinks.to(scores.dtype).view(1, query.shape[1], query.shape[2], 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights[..., : keys.shape[2]], values[:, :, None])
