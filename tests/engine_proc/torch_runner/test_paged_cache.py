from __future__ import annotations

import pytest

pytestmark = pytest.mark.model


def test_bytes_count_keys_and_values_of_every_head() -> None:
    torch = pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.paged_cache import LayerShape

    shape = LayerShape(num_kv_heads=3, key_dim=64, value_dim=48, dtype=torch.bfloat16)
    assert shape.bytes_per_token == 3 * (64 + 48) * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_written_by_slot_is_read_by_block(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.paged_cache import LayerCache, LayerShape

    shape = LayerShape(num_kv_heads=2, key_dim=8, value_dim=4, dtype=getattr(torch, dtype))
    cache = LayerCache(shape, num_blocks=6, block_size=4, device=torch.device("cpu"))
    keys = torch.randn(5, 2, 8).to(shape.dtype)
    values = torch.randn(5, 2, 4).to(shape.dtype)
    slots = torch.tensor([9, 20, 21, 22, 23])  # block 2 offset 1, then the whole of block 5
    cache.write(slots, keys, values)
    got_keys, got_values = cache.gather(torch.tensor([[5, 2], [0, 5]]))
    assert got_keys.shape == (2, 2, 8, 8)
    assert got_values.shape == (2, 2, 8, 4)
    assert torch.equal(got_keys[0, :, :4], keys[1:].transpose(0, 1))
    assert torch.equal(got_keys[0, :, 5], keys[0])
    assert torch.equal(got_values[1, :, 4:], values[1:].transpose(0, 1))
    assert not got_values[1, :, :4].any()  # a fresh block is zeros: padding must never hold NaN


def test_float16_overflow_is_stored_finite() -> None:
    torch = pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.paged_cache import LayerCache, LayerShape

    shape = LayerShape(num_kv_heads=1, key_dim=2, value_dim=2, dtype=torch.float16)
    cache = LayerCache(shape, num_blocks=1, block_size=1, device=torch.device("cpu"))
    poison = torch.tensor([[[torch.inf, torch.nan]]], dtype=torch.float16)
    cache.write(torch.tensor([0]), poison, poison)
    assert torch.isfinite(cache.keys).all()
    assert torch.isfinite(cache.values).all()
