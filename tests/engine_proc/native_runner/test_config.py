from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from helpers.numpy_llama import TinyShape
from trioengine.engine_proc.native_runner.config import (
    LayerConfig,
    UnsupportedModelError,
    read_config,
)
from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from trioengine.engine_proc.native_runner.config import ModelConfig


def parse(tmp_path: Path, **changes: Any) -> ModelConfig:
    config = TinyShape().config() | changes
    dropped = {name for name, value in config.items() if value == "absent"}
    kept = {name: value for name, value in config.items() if name not in dropped}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    return read_config(tmp_path)


def test_a_plain_model_is_read(tmp_path: Path) -> None:
    config = parse(tmp_path)
    assert (config.hidden, config.num_heads, config.num_kv_heads, config.head_dim) == (72, 6, 2, 20)
    assert config.layers == (LayerConfig(0, True), LayerConfig(0, True))
    assert config.tied is False


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is none"),
        ({"model_type": "absent"}, "None is none"),
        ({"hidden_act": "gelu"}, "not silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised in a format of its own"),
        ({"head_dim": 21}, "odd"),
        ({"head_dim": 1024}, "above"),
        ({"num_key_value_heads": 4}, "do not share"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"intermediate_size": "absent"}, "intermediate_size is None"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "bad or missing"),
        ({"partial_rotary_factor": 0.5}, "only 0.5 of each head"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "layers of different"),
        ({"model_type": "qwen3", "head_dim": "absent"}, "head_dim is None"),
        ({"model_type": "mistral", "num_key_value_heads": "absent"}, "num_key_value_heads is None"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["chunked", "x"]},
            "type 'chunked'",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": []},
            "one entry per layer",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "one entry per layer"),
    ],
)
def test_what_is_not_computed_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        parse(tmp_path, **changes)


def test_no_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json is missing"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8}, [0, 0]),  # Llama knows no windows
        ({"model_type": "mistral", "sliding_window": 8}, [8, 8]),
        ({"model_type": "mistral", "sliding_window": None}, [0, 0]),
        ({"model_type": "mistral"}, [4096, 4096]),
        ({"model_type": "qwen2", "sliding_window": 8}, [0, 0]),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            [0, 8],
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            [8, 0],
        ),
        (
            {
                "model_type": "smollm3",
                "sliding_window": 8,
                "use_sliding_window": True,
                "no_rope_layers": [0, 1],
            },
            [8, 0],
        ),
    ],
)
def test_windows_per_layer(tmp_path: Path, changes: dict[str, Any], windows: list[int]) -> None:
    assert [layer.window for layer in parse(tmp_path, **changes).layers] == windows


def test_layers_without_rotation(tmp_path: Path) -> None:
    config = parse(tmp_path, model_type="smollm3", no_rope_layers=[1, 0])
    assert [layer.rotate for layer in config.layers] == [True, False]
    config = parse(tmp_path, model_type="smollm3", num_hidden_layers=8)
    assert [layer.rotate for layer in config.layers] == [True, True, True, False] * 2


def test_fields_that_llama_may_leave_out(tmp_path: Path) -> None:
    config = parse(
        tmp_path, num_key_value_heads="absent", head_dim="absent", tie_word_embeddings="absent"
    )
    assert (config.num_kv_heads, config.head_dim, config.tied) == (6, 12, None)
