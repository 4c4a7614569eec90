"""Torch's many ways to say that there is no memory, and nothing else, become ``MemoryError``."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.model


def test_an_allocation_that_is_refused_is_a_memory_error() -> None:
    torch = pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.shortage import memory_errors

    with pytest.raises(MemoryError, match="memory") as caught, memory_errors():
        torch.empty(2**60, dtype=torch.uint8)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "\n" not in str(caught.value)


def test_an_accelerators_refusal_is_one_too() -> None:
    torch = pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.shortage import memory_errors

    with pytest.raises(MemoryError, match="no room"), memory_errors():
        raise torch.OutOfMemoryError("no room\nwith a long report")


def test_other_errors_stay_what_they_are() -> None:
    pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.shortage import memory_errors

    with pytest.raises(RuntimeError, match="shapes"), memory_errors():
        raise RuntimeError("shapes do not match")
