"""The native runner against transformers' own modelling code, on tiny random checkpoints.

Layer by layer: a checkpoint is compared after its first layer, its first two, and so on, always
through norm and head, so that what one layer does wrong cannot hide behind the others.

The reference rounds keys and values to bfloat16, as the paged cache does: with weights as large as
these, that alone would move logits by a tenth of their spread and hide what is to be seen.
"""

from __future__ import annotations

import json
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

    import numpy.typing as npt

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
    "smollm3": ("smollm3-nope", {"no_rope_layers": [1, 0, 1, 0]}),
    "smollm3-window": (
        "smollm3-nope",
        {"no_rope_layers": [1, 1, 0, 1], "use_sliding_window": True, "sliding_window": 20},
    ),
    "llama-odd": ("llama-gqa3-hd80", {"head_dim": 18, "hidden_size": 42, "vocab_size": 203}),
    "mistral-odd": ("mistral-sliding", {"sliding_window": None, "head_dim": 6, "vocab_size": 77}),
    "qwen2-tied": ("qwen2-bias", {"tie_word_embeddings": True, "vocab_size": 131}),
    "qwen3-odd": ("qwen3-qk-norm", {"head_dim": 20, "hidden_size": 50, "vocab_size": 65}),
}
DEPTH = 4
ROUNDED = {"amx", "avx512_bf16"}  # multiply bf16 activations: three significant digits
EXACT, COARSE = (1e-3, 0.02), (0.012, 0.15)
"""Root mean square and worst error of the logits after one layer, in units of their spread. A bf16
activation costs as much again in each layer; a key on the edge of two bf16 numbers, more."""


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


def cut(directory: Path, whole: Path, depth: int) -> Path:
    """Link a checkpoint into ``directory``, with a configuration of its first layers only."""
    directory.mkdir()
    (directory / "model.safetensors").symlink_to(whole / "model.safetensors")
    config = json.loads((whole / "config.json").read_text())
    for name, value in config.items():
        if isinstance(value, list) and len(value) == DEPTH:  # one entry a layer
            config[name] = value[:depth]
    config["num_hidden_layers"] = depth
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def logits_of(directory: Path, isa: str, tokens: list[int]) -> npt.NDArray[np.float32]:
    options = EngineOptions(kv_cache_memory_gib=0.01, threads=1, engine_args={"isa": isa})
    runner = native_runner.load(directory, options, lambda *_: None)
    blocks = list(range(-(-len(tokens) // 16)))
    return runner.logits(make_batch([(tokens, 0, blocks)], all_rows=True))[1]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_after_every_layer(
    tmp_path: Path, extension: Any, case: str
) -> None:
    name, changes = CASES[case]
    whole = tmp_path / "whole"
    save_tiny(whole, name, num_hidden_layers=DEPTH, **changes)
    network = load_rounded(whole)
    layers, vocab = network.model.layers, network.config.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab, 100).tolist()
    for depth in range(1, DEPTH + 1):
        network.model.layers = layers[:depth]
        expected = reference_logits(network, tokens, len(tokens))
        directory = cut(tmp_path / str(depth), whole, depth)
        for isa in extension.usable_isas():
            error = (logits_of(directory, isa, tokens) - expected) / expected.std()
            mean, worst = np.array(COARSE) * depth if isa in ROUNDED else EXACT
            assert np.sqrt((error**2).mean()) < mean, (depth, isa)
            assert np.abs(error).max() < worst, (depth, isa)
