from __future__ import annotations

from typing import Any

import pytest

from helpers.tiny_models import tiny_model

pytestmark = pytest.mark.model

LONG: Any = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "short_factor": [1.0] * 6,
        "long_factor": [float(2 + i) for i in range(6)],
    },
}
LAST_SHORT, LAST_LONG = 63, 64


def embed(network: Any, *positions: int) -> Any:
    """Return the rotary embedding of position 5 in a batch with ``positions``."""
    torch = pytest.importorskip("torch")
    cos, sin = network.model.rotary_emb(torch.zeros(1), torch.tensor([[5, *positions]]))
    return torch.cat([cos[0, 0], sin[0, 0]])


def test_unpinned_frequencies_depend_on_batch_mates() -> None:
    pytest.importorskip("torch")  # the trap itself: if this fails, pinning may go
    network = tiny_model("phi3", **LONG)
    assert not embed(network, LAST_SHORT).equal(embed(network, LAST_LONG))


@pytest.mark.parametrize(("max_model_len", "as_at"), [(64, LAST_SHORT), (512, LAST_LONG)])
def test_pinned_frequencies_are_those_of_the_longest_sequence_allowed(
    max_model_len: int, as_at: int
) -> None:
    pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.rope import pin_rotary

    network = tiny_model("phi3", **LONG)
    expected = embed(network, as_at)
    assert not embed(network, LAST_SHORT + LAST_LONG - as_at).equal(expected)
    pin_rotary(network, max_model_len)
    for mates in ((), (LAST_SHORT,), (LAST_LONG,), (500,)):
        assert embed(network, *mates).equal(expected)


def test_dynamic_frequencies_are_pinned_too() -> None:
    pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.rope import pin_rotary

    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    network = tiny_model("llama-mha", rope_parameters=rope)
    pin_rotary(network, 512)
    before = embed(network)
    assert embed(network, 5000).equal(before)


def test_frequencies_per_layer_type_are_pinned() -> None:
    torch = pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.rope import pin_rotary

    chosen: list[tuple[str, int]] = []

    class PerLayerType(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.rope_type = {"full_attention": "longrope", "sliding_attention": "default"}
            self.register_buffer("inv_freq", torch.ones(4))

        def forward(self, x: Any, position_ids: Any, layer_type: str) -> None:
            chosen.append((layer_type, int(position_ids.max())))

    module = PerLayerType()
    pin_rotary(module, 100)
    assert chosen == [("full_attention", 99)]
    assert module.rope_type["full_attention"] not in {"longrope", "dynamic"}
    assert module.rope_type["sliding_attention"] == "default"


def test_ordinary_frequencies_are_left_alone() -> None:
    pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.rope import pin_rotary

    network = tiny_model("llama-gqa8-rope3")
    before = embed(network)
    pin_rotary(network, 512)
    assert embed(network).equal(before)
    assert network.model.rotary_emb.rope_type == "llama3"
