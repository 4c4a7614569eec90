from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trioengine.engine_proc.native_runner.rope import RopeConfig, UnsupportedRopeError

BASE = {"model_type": "llama", "max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def parse(head_dim: int = 16, **raw: Any) -> RopeConfig:
    return RopeConfig.parse(BASE | raw, head_dim)


def test_the_default_is_a_geometric_series() -> None:
    frequencies, factor = parse(rope_theta=10_000.0).frequencies()
    np.testing.assert_allclose(frequencies, 10_000.0 ** -(np.arange(8) / 8), rtol=1e-6)
    assert factor == 1.0


def test_linear_divides() -> None:
    plain = parse().frequencies()[0]
    scaled = parse(rope_scaling={"type": "linear", "factor": 2.0}).frequencies()[0]
    np.testing.assert_array_equal(scaled, plain / 2)


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    plain, scaled = parse().frequencies()[0], parse(rope_parameters=LLAMA3).frequencies()[0]
    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 8
    assert (scaled <= plain).all()


def test_tables_hold_cos_and_sin_of_every_angle() -> None:
    rope = parse()
    cos, sin = rope.tables(50)
    assert cos.shape == sin.shape == (50, 8)
    np.testing.assert_allclose(cos**2 + sin**2, 1.0, atol=1e-6)
    np.testing.assert_allclose(sin[7], np.sin(7 * rope.frequencies()[0]), atol=1e-6)


def test_the_new_spelling_wins_over_the_old() -> None:
    new = parse(rope_theta=1.5, rope_parameters={"rope_theta": 500.0, "rope_type": "default"})
    assert new.theta == 500.0
    assert parse().theta == 10_000.0
    assert RopeConfig.parse(BASE | {"model_type": "smollm3"}, 16).theta == 2_000_000.0


@pytest.mark.parametrize(
    "params",
    [
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": "two"},
        {"rope_type": "longrope", "factor": 2.0},
        LLAMA3 | {"high_freq_factor": 0.0},
    ],
)
def test_unusable_parameters_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedRopeError):
        parse(rope_parameters=params)


@pytest.mark.model
@pytest.mark.parametrize(
    "params",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        LLAMA3,
        YARN,
        YARN | {"truncate": False, "beta_fast": 16, "mscale": 1.0, "mscale_all_dim": 0.5},
        YARN | {"attention_factor": 1.25},
    ],
)
def test_frequencies_equal_those_of_transformers(params: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    params = {**params, "rope_theta": 10_000.0}
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters=dict(params),
    )
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(200)[None])
    ours = parse(32, rope_parameters=params)
    np.testing.assert_allclose(ours.frequencies()[0], rotary.inv_freq.numpy(), rtol=3e-7)
    ours_cos, ours_sin = ours.tables(200)
    np.testing.assert_allclose(ours_cos, cos[0, :, :16].numpy(), atol=3e-5)
    np.testing.assert_allclose(ours_sin, sin[0, :, :16].numpy(), atol=3e-5)
