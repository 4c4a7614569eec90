"""Sizes of models, from files made by hand."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from helpers.weightless import BODY, TABLE, checkpoint
from trioengine.bench.model_cost import ModelCost, read_model_cost
from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_tied_embedding_is_read_as_the_head(tmp_path: Path) -> None:
    cost = read_model_cost(checkpoint(tmp_path, {"embed": TABLE}, {"w": BODY}))
    assert cost == ModelCost(
        weight_bytes=2 * 880,
        body_params=800,
        head_params=80,
        kv_bytes_per_token=2 * 3 * 2 * (8 // 4) * 2,
    )
    assert (cost.body_flops, cost.head_flops) == (1600, 160)


def test_an_untied_embedding_is_not_read(tmp_path: Path) -> None:
    tensors = {"embed": TABLE, "lm_head": TABLE, "w": BODY}
    cost = read_model_cost(checkpoint(tmp_path, tensors, tie_word_embeddings=False))
    assert (cost.weight_bytes, cost.body_params, cost.head_params) == (2 * 880, 800, 80)


def test_each_type_has_its_size(tmp_path: Path) -> None:
    tensors = {"a": ("F32", [80]), "b": ("F8_E4M3", [80]), "c": ("I8", [80]), "d": ("BOOL", [80])}
    cost = read_model_cost(checkpoint(tmp_path, tensors))
    assert cost.weight_bytes == 80 * (4 + 1 + 1 + 1)


def test_head_dim_and_kv_heads_have_defaults(tmp_path: Path) -> None:
    cost = read_model_cost(checkpoint(tmp_path, {"w": BODY}, head_dim=16, num_key_value_heads=None))
    assert cost.kv_bytes_per_token == 2 * 3 * 4 * 16 * 2


def test_stored_otherwise(tmp_path: Path) -> None:
    cost = read_model_cost(checkpoint(tmp_path, {"embed": TABLE, "w": BODY}))
    stored = cost.stored_as(weight_bytes=500, kv_element_bytes=4)
    assert (stored.weight_bytes, stored.body_params) == (500, 800)
    assert stored.kv_bytes_per_token == 2 * cost.kv_bytes_per_token
    assert cost.stored_as(weight_bytes=None, kv_element_bytes=2) == cost


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": None}, "no hidden_size"),
        ({"num_hidden_layers": 0}, "no num_hidden_layers"),
        ({"num_experts": 8}, "mixture of experts"),
        ({"num_local_experts": 8}, "mixture of experts"),
    ],
)
def test_what_is_not_known_is_said(tmp_path: Path, config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model_cost(checkpoint(tmp_path, {"w": BODY}, **config))


@pytest.mark.parametrize("data", [None, b"", b"\xff" * 40, struct.pack("<Q", 4) + b"nope"])
def test_no_weights_or_broken_ones(tmp_path: Path, data: bytes | None) -> None:
    checkpoint(tmp_path)
    if data is not None:
        (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match="safetensors"):
        read_model_cost(tmp_path)
