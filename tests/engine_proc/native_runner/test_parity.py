"""The native runner against transformers' own modelling code, on tiny random checkpoints.

The reference rounds keys and values to bfloat16, as the paged cache does: with weights as large as
these, that alone would move logits by a tenth of their spread and hide what is to be seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from helpers.numpy_llama import make_batch
from helpers.reference import reference_logits
from helpers.tiny_models import save_tiny
from trioengine.config import EngineOptions
from trioengine.engine_proc import native_runner

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.model

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama-mha", {}),
    "llama-tied": ("llama-gqa2-hd64-tied", {}),
    "llama-tails": ("llama-gqa3-hd80", {"hidden_size": 42, "intermediate_size": 72}),
    "llama-rope3": ("llama-gqa8-rope3", {}),
    "llama-bias": ("llama-mha", {"attention_bias": True, "mlp_bias": True}),
    "llama-yarn": ("llama-mha", {"rope_parameters": YARN}),
    "qwen2": ("qwen2-bias", {}),
    "qwen2-window": (
        "qwen2-bias",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3-qk-norm", {}),
    "mistral-window": ("mistral-sliding", {}),
    "smollm3": ("smollm3-nope", {}),
    "smollm3-window": (
        "smollm3-nope",
        {"use_sliding_window": True, "sliding_window": 20},
    ),
}


def rounded_attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
) -> Any:
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    key, value = (x.to(torch.bfloat16).to(torch.float32) for x in (key, value))
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def load_rounded(model_dir: Path) -> Any:
    """Load a checkpoint with bf16 matrices, computed in float32 with a cache in bf16."""
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register("rounded", rounded_attention)
    AttentionMaskInterface.register("rounded", sdpa_mask)
    network = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="rounded"
    ).eval()
    for parameter in (p for p in network.parameters() if p.ndim == 2):
        parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)
    return network


@pytest.mark.slow
@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(tmp_path: Path, case: str) -> None:
    name, changes = CASES[case]
    save_tiny(tmp_path, name, **changes)
    tokens = np.random.default_rng(0).integers(0, 256, 100).tolist()
    expected = reference_logits(load_rounded(tmp_path), tokens, len(tokens))
    options = EngineOptions(kv_cache_memory_gib=0.01, threads=1, engine_args={"isa": "portable"})
    runner = native_runner.load(tmp_path, options, lambda *_: None)
    _, logits = runner.logits(make_batch([(tokens, 0, list(range(7)))], all_rows=True))
    error = np.abs(logits - expected) / expected.std()
    assert np.quantile(error, 0.9) < 1e-3
    assert error.max() < 0.02  # where a key fell on the edge of two bf16 numbers
