"""Tiny random checkpoints of real architectures, written to disk in a tenth of a second.

Weights are larger than a trained model's initial ones, and norms and biases random too: attention
then matters for every token, and a swapped head or a missing bias is seen in the first logit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["TINY", "VOCAB", "save_tiny", "tiny_model"]

VOCAB: Final = 256
_BASE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE: Final = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_SLIDING: Final = {"sliding_window": 20}

TINY: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama-mha": ("Llama", {"num_key_value_heads": 4, "head_dim": 16}),
    "llama-gqa2-hd64-tied": ("Llama", {"head_dim": 64, "tie_word_embeddings": True}),
    "llama-gqa3-hd80": (
        "Llama",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 80},
    ),
    "llama-gqa8-rope3": (
        "Llama",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_parameters": _LLAMA3_ROPE,
        },
    ),
    "qwen2-bias": ("Qwen2", {}),
    "qwen3-qk-norm": ("Qwen3", {"head_dim": 16}),
    "mistral-sliding": ("Mistral", {"head_dim": 16, **_SLIDING}),
    "gpt2": ("GPT2", {"n_inner": 64}),
    "gpt-neox": ("GPTNeoX", {"rotary_pct": 0.5, "use_parallel_residual": True}),
    "phi3": ("Phi3", {}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
            "layer_types": ["sliding_attention", "full_attention"],
            **_SLIDING,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
        },
    ),
    "gpt-oss-sinks": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": _LLAMA3_ROPE,
            **_SLIDING,
        },
    ),
    "granite-scales": (
        "Granite",
        {
            "attention_multiplier": 0.6,
            "logits_scaling": 0.5,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.8,
        },
    ),
    "smollm3-nope": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "deepseek-v3-mla": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
}
"""Name → (prefix of transformers' classes, what differs from the base)."""


def tiny_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """Build the random network ``TINY[name]``, float32, with ``changes`` to its configuration."""
    import torch
    import transformers

    kind, special = TINY[name]
    config = getattr(transformers, f"{kind}Config")(**{**_BASE, **special, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in network.parameters():
            _randomise(parameter.data)
    return network.eval()


def _randomise(weight: Any) -> None:
    if weight.ndim == 1:  # norms and biases: away from 1 and 0, whichever they are
        weight.add_(weight.clone().normal_(0.0, 0.2))
    else:
        weight.normal_(0.0, 1.5 / weight.shape[-1] ** 0.5)


def save_tiny(directory: Path, name: str, seed: int = 0, **changes: Any) -> Any:
    """Write the checkpoint ``TINY[name]`` and return the network it was made from."""
    network = tiny_model(name, seed, **changes)
    network.save_pretrained(directory)
    return network
