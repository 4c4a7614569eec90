from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from helpers.tiny_models import save_tiny
from trioengine.config import EngineOptions
from trioengine.errors import ConfigError, EngineStartError, TrioEngineError

if TYPE_CHECKING:
    from pathlib import Path

    from helpers.torch_fixtures import Checkpoints
    from trioengine.engine_proc.torch_runner.model_loader import Checkpoint

pytestmark = pytest.mark.model

CPU = EngineOptions(device="cpu", dtype="float32")


def load(model_dir: Path, options: EngineOptions = CPU) -> Checkpoint:
    pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.model_loader import load_checkpoint

    return load_checkpoint(model_dir, options)


def copy_with(checkpoints: Checkpoints, tmp_path: Path, **changes: Any) -> Path:
    """Copy a checkpoint with changes to its configuration; ``None`` removes a field."""
    target = tmp_path / "changed"
    shutil.copytree(checkpoints("llama-mha"), target)
    edit_json(target / "config.json", changes)
    return target


def edit_json(path: Path, changes: dict[str, Any]) -> None:
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def one_line(error: TrioEngineError) -> bool:
    return "\n" not in error.message and 20 < len(error.message) < 400


def test_a_checkpoint_says_what_it_is(checkpoints: Checkpoints) -> None:
    torch = pytest.importorskip("torch")
    checkpoint = load(checkpoints("llama-gqa2-hd64-tied"))
    assert checkpoint.name == "llama-gqa2-hd64-tied"
    assert (checkpoint.max_model_len, checkpoint.vocab_size) == (512, 256)
    assert (checkpoint.dtype, checkpoint.device.type) == (torch.float32, "cpu")
    assert [layer.num_kv_heads for layer in checkpoint.layers] == [2, 2]
    assert [layer.key_dim for layer in checkpoint.layers] == [64, 64]
    assert not any(parameter.requires_grad for parameter in checkpoint.network.parameters())
    assert not checkpoint.network.training


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [(2, None, (2,)), (2, [5, 7], (5, 7)), (None, 9, (9,)), ([3, 4], None, (3, 4))],
)
def test_end_tokens_come_from_the_generation_configuration_first(
    checkpoints: Checkpoints,
    tmp_path: Path,
    in_config: int | list[int] | None,
    in_generation: int | list[int] | None,
    expected: tuple[int, ...],
) -> None:
    directory = copy_with(checkpoints, tmp_path, eos_token_id=in_config)
    (directory / "generation_config.json").unlink()
    if in_generation is not None:
        (directory / "generation_config.json").write_text(
            json.dumps({"eos_token_id": in_generation})
        )
    assert load(directory).eos_token_ids == expected


def test_a_model_without_an_end_token_has_none(checkpoints: Checkpoints) -> None:
    assert load(checkpoints("llama-mha")).eos_token_ids == ()


def test_the_length_may_be_lowered_and_not_raised(checkpoints: Checkpoints) -> None:
    directory = checkpoints("llama-mha")
    options = EngineOptions(device="cpu", dtype="float32", max_model_len_tokens=100)
    assert load(directory, options).max_model_len == 100
    options = EngineOptions(device="cpu", dtype="float32", max_model_len_tokens=513)
    with pytest.raises(ConfigError, match="513 exceeds the model's context of 512"):
        load(directory, options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_named_dtype_is_used_for_weights_and_cache(
    checkpoints: Checkpoints, dtype: Any
) -> None:
    torch = pytest.importorskip("torch")
    checkpoint = load(checkpoints("llama-mha"), EngineOptions(device="cpu", dtype=dtype))
    expected = getattr(torch, dtype)
    assert {p.dtype for p in checkpoint.network.parameters()} == {expected}
    assert {layer.dtype for layer in checkpoint.layers} == {expected}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(("fast", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_an_automatic_dtype_asks_the_processor(
    monkeypatch: pytest.MonkeyPatch, fast: bool, expected: str
) -> None:
    torch = pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner import model_loader

    monkeypatch.setattr(model_loader, "fast_bfloat16", lambda: fast)
    dtype = model_loader.resolve_dtype("auto", torch.device("cpu"))
    assert dtype == getattr(torch, expected)


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.model_loader import resolve_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto").type == "cuda"
    assert resolve_device("cpu").type == "cpu"


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"config\.json is missing") as caught:
        load(tmp_path)
    assert one_line(caught.value)


BROKEN_CONFIGS = [
    "",
    "{",
    "[]",
    '{"model_type": "no-such-architecture"}',
    '{"architectures": ["LlamaForCausalLM"]}',
]


@pytest.mark.parametrize("text", BROKEN_CONFIGS)
def test_a_broken_configuration_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(EngineStartError) as caught:
        load(tmp_path)
    assert one_line(caught.value)


def test_absent_weights_are_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    directory = copy_with(checkpoints, tmp_path)
    (directory / "model.safetensors").unlink()
    with pytest.raises(EngineStartError, match="does not load") as caught:
        load(directory)
    assert one_line(caught.value)


def test_pickled_weights_are_not_touched(checkpoints: Checkpoints, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    directory = copy_with(checkpoints, tmp_path)
    (directory / "model.safetensors").unlink()
    weights: Any = load(checkpoints("llama-mha")).network
    torch.save(weights.state_dict(), directory / "pytorch_model.bin")
    with pytest.raises(EngineStartError, match="does not load"):
        load(directory)


@pytest.mark.parametrize("keep_bytes", [0, 4, 100, 5000])
def test_truncated_weights_are_refused(
    checkpoints: Checkpoints, tmp_path: Path, keep_bytes: int
) -> None:
    directory = copy_with(checkpoints, tmp_path)
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep_bytes])
    with pytest.raises(EngineStartError, match="does not load") as caught:
        load(directory)
    assert one_line(caught.value)


def test_missing_weights_are_not_made_up(checkpoints: Checkpoints, tmp_path: Path) -> None:
    directory = copy_with(checkpoints, tmp_path, num_hidden_layers=3)
    with pytest.raises(EngineStartError, match=r"9 weights are missing, model\.layers\.2\."):
        load(directory)


def test_weights_of_another_shape_are_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    directory = copy_with(checkpoints, tmp_path, intermediate_size=32)
    with pytest.raises(EngineStartError, match="does not load") as caught:
        load(directory)
    assert one_line(caught.value)


def test_code_in_a_checkpoint_is_not_run(checkpoints: Checkpoints, tmp_path: Path) -> None:
    directory = copy_with(
        checkpoints,
        tmp_path,
        model_type="own",
        auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    )
    (directory / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(EngineStartError) as caught:
        load(directory)
    assert one_line(caught.value)
    assert not (tmp_path / "ran").exists()


def test_attention_outside_the_registry_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoConfig(
        vocab_size=64,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
    )
    transformers.GPTNeoForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(EngineStartError, match="GPTNeoForCausalLM does not run") as caught:
        load(tmp_path)
    assert one_line(caught.value)


def test_rotary_frequencies_are_pinned(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    save_tiny(tmp_path, "llama-mha", rope_parameters=rope)
    network: Any = load(tmp_path).network
    assert network.model.rotary_emb.rope_type != "dynamic"


def test_a_tied_head_is_not_a_missing_weight(tmp_path: Path) -> None:
    network = save_tiny(tmp_path, "llama-gqa2-hd64-tied")
    loaded: Any = load(tmp_path).network
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.lm_head.weight.equal(network.lm_head.weight)
