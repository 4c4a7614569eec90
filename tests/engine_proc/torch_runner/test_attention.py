from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from trioengine.engine_proc.torch_runner.attention import AttentionCall

pytestmark = pytest.mark.model


class Recorder:
    """Remembers its calls and answers with the values, one KV head's for each query head."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        return call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], 1)


def bound_module(recorder: Recorder, **attributes: object) -> Any:
    torch = pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.attention import bind

    module = torch.nn.Module()
    module.layer_idx = 3
    for name, value in attributes.items():
        setattr(module, name, value)
    bind(module, recorder)
    return module


def call_registered(module: Any, **kwargs: Any) -> Any:
    """Attend with 4 query heads and 2 KV heads over 5 tokens, as a model's layer does."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from trioengine.engine_proc.torch_runner.attention import PAGED, register

    register()
    function = transformers.AttentionInterface()[PAGED]
    query, key = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)
    value = torch.arange(2 * 5 * 8.0).view(1, 2, 5, 8)
    return function(module, query, key, value, kwargs.pop("attention_mask", None), **kwargs)


def test_a_layers_call_arrives_flat_and_its_answer_leaves_as_models_expect() -> None:
    recorder = Recorder()
    output, weights = call_registered(
        bound_module(recorder), scaling=0.25, sliding_window=7, softcap=30.0
    )
    assert weights is None
    assert output.shape == (1, 5, 4, 8)
    (call,) = recorder.calls
    assert (call.layer, call.scale, call.window, call.softcap) == (3, 0.25, 7, 30.0)
    assert (call.query.shape, call.key.shape, call.value.shape) == (
        (5, 4, 16),
        (5, 2, 16),
        (5, 2, 8),
    )


def test_scale_and_limits_have_their_usual_defaults() -> None:
    recorder = Recorder()
    call_registered(bound_module(recorder), position_ids=object(), use_cache=False, anything=None)
    (call,) = recorder.calls
    assert (call.scale, call.window, call.softcap, call.sinks) == (0.25, None, None, None)


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"position_bias": object()}, "position_bias"),
        ({"cu_seq_lens_q": object()}, "cu_seq_lens_q"),
        ({"attention_mask": object()}, "attention_mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "is_causal=False"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(kwargs: dict[str, Any], named: str) -> None:
    pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.attention import UnsupportedAttentionError

    with pytest.raises(UnsupportedAttentionError, match=f"Module passes {named} to attention"):
        call_registered(bound_module(Recorder()), **kwargs)


def test_a_module_that_looks_both_ways_is_refused() -> None:
    pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.attention import UnsupportedAttentionError

    with pytest.raises(UnsupportedAttentionError, match="is_causal=False"):
        call_registered(bound_module(Recorder(), is_causal=False))


def test_two_models_in_one_process_do_not_meet() -> None:
    first, second = Recorder(), Recorder()
    one, other = bound_module(first), bound_module(second)
    call_registered(one)
    call_registered(other)
    call_registered(one)
    assert (len(first.calls), len(second.calls)) == (2, 1)


def test_no_mask_function_is_registered_so_that_models_build_no_mask() -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from trioengine.engine_proc.torch_runner.attention import PAGED, register

    register()
    assert PAGED in transformers.AttentionInterface()
    assert PAGED not in transformers.AttentionMaskInterface()


def test_attention_outside_a_step_is_an_error() -> None:
    pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.attention import PagedAttention

    recorder = Recorder()
    call_registered(bound_module(recorder))
    with pytest.raises(RuntimeError, match="outside a step"):
        PagedAttention([]).attend(recorder.calls[0])
