from __future__ import annotations

from typing import Any

import pytest

from helpers.tiny_models import tiny_model

pytestmark = pytest.mark.model

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def probe(network: Any, config: Any = None) -> list[Any]:
    torch = pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.attention import PAGED, register
    from trioengine.engine_proc.torch_runner.probe import probe_layers

    register()
    network.set_attn_implementation(PAGED)
    return probe_layers(network, config or network.config, torch.device("cpu"))


def refused(network: Any, match: str, config: Any = None) -> None:
    pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.attention import UnsupportedAttentionError

    with pytest.raises(UnsupportedAttentionError, match=match):
        probe(network, config)


def test_shapes_come_from_what_layers_really_pass() -> None:
    pytest.importorskip("torch")
    shapes = probe(tiny_model("llama-gqa3-hd80"))
    assert [(s.num_kv_heads, s.key_dim, s.value_dim) for s in shapes] == [(1, 80, 80)] * 2
    shapes = probe(tiny_model("deepseek-v3-mla"))
    assert [(s.num_kv_heads, s.key_dim, s.value_dim) for s in shapes] == [(4, 24, 16)] * 2


def test_alibi_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2)
    refused(transformers.BloomForCausalLM(config).eval(), "of 2 layers, 0 use")


def test_chunked_attention_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Llama4TextConfig(
        **SMALL,
        head_dim=16,
        intermediate_size=32,
        intermediate_size_mlp=32,
        num_local_experts=2,
        attention_chunk_size=8,
        pad_token_id=None,
    )
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    refused(network, "layer 0 is of type chunked_attention")


def test_layers_without_attention_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Lfm2Config(
        **SMALL,
        intermediate_size=32,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
        pad_token_id=None,
    )
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    refused(network, "of 2 layers, 1 use")


def test_a_window_that_only_the_mask_knows_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    network = tiny_model("llama-mha")
    config = transformers.MistralConfig(num_hidden_layers=2, sliding_window=20)
    refused(network, "layer 0 does not say its sliding window", config)
    config = transformers.Qwen2Config(
        num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"]
    )
    refused(network, "layer 1 does not say its sliding window", config)


def test_a_window_switched_off_is_no_window() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2MoeConfig(
        num_hidden_layers=2, sliding_window=20, use_sliding_window=False
    )
    assert len(probe(tiny_model("llama-mha"), config)) == 2
