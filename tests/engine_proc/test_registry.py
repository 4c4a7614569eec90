"""From a configuration to a backend; which runner computes, and with which limits."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import pytest

from trioengine.config import EngineConfig, EngineOptions
from trioengine.engine_proc import registry
from trioengine.engine_proc.core import EngineCore
from trioengine.engine_proc.kv_sizing import KVCacheSizeError
from trioengine.engine_proc.registry import build_backend
from trioengine.engine_proc.sim_runner import SimModelRunner, SimScript
from trioengine.errors import ConfigError
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path


def build(model_dir: Path | None = None, **options: Any) -> EngineCore:
    config = EngineConfig(
        options=EngineOptions(**options),
        model_dir=None if model_dir is None else str(model_dir),
        model_name="a-name",
        commands_address="",
        outputs_address="",
        token="",
        heartbeat_path="",
        runtime_dir="",
    )
    backend = build_backend(config, lambda phase, fraction: None)
    assert isinstance(backend, EngineCore)
    return backend


def test_the_simulated_engine_needs_nothing() -> None:
    core = build(backend="sim")
    assert core.model.simulated
    assert core.model.name == "a-name"
    assert core.limits.max_num_seqs == 64
    core.add_request(Add(1, [300], SamplingParams(max_tokens=3)))
    text = "".join(output.text for _ in range(3) for output in core.step(list))
    assert len(text.split()) == 3
    assert text.isprintable()


def test_options_reach_the_engine(tmp_path: Path) -> None:
    core = build(
        backend="sim",
        max_num_seqs=3,
        max_num_batched_tokens=50,
        block_size_tokens=8,
        max_model_len_tokens=100,
        engine_args={"num_blocks": 20, "vocab_size": 400},
        profile_dir=str(tmp_path),
    )
    limits = core.limits
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (3, 50)
    assert (limits.block_size, limits.num_blocks) == (8, 20)
    assert (core.model.max_model_len, core.model.vocab_size) == (100, 400)
    core.call("start_profile", {})


def test_a_small_token_budget_makes_the_default_batch_smaller() -> None:
    assert build(backend="sim", max_num_batched_tokens=20).limits.max_num_seqs == 20
    with pytest.raises(ConfigError, match="max_num_seqs"):
        build(backend="sim", max_num_batched_tokens=20, max_num_seqs=21)


def test_a_script_with_a_mistake_is_refused() -> None:
    with pytest.raises(ConfigError, match="simulated engine"):
        build(backend="sim", engine_args={"no_such_thing": 1})


@pytest.mark.parametrize("backend", ["auto", "native", "torch"])
def test_a_real_engine_needs_a_checkpoint(backend: str) -> None:
    with pytest.raises(ConfigError, match="needs a checkpoint"):
        build(backend=backend)


class Loaders:
    """Stand-ins for the packages that load models; they note who was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, native_fits: bool) -> None:
        self.asked: list[str] = []
        self.device = "cpu"
        self.native_fits = native_fits
        self.refusal = ConfigError("not this architecture")
        for name in ("native", "torch"):
            module = types.ModuleType(f"{name}_runner")
            setattr(module, "load", getattr(self, name))  # noqa: B010
            monkeypatch.setitem(sys.modules, f"trioengine.engine_proc.{name}_runner", module)
            monkeypatch.setattr(registry.__package__ + f".{name}_runner", module, raising=False)
        vocab = types.SimpleNamespace(from_dir=lambda path: None)
        monkeypatch.setattr(registry, "DetokenizerVocab", vocab)

    def native(self, model_dir: Path, options: EngineOptions, progress: object) -> SimModelRunner:
        self.asked.append("native")
        if not self.native_fits:
            raise self.refusal
        return self.runner("native cpu")

    def torch(self, model_dir: Path, options: EngineOptions, progress: object) -> SimModelRunner:
        self.asked.append("torch")
        return self.runner(f"torch {self.device} bfloat16")

    def runner(self, words: str) -> SimModelRunner:
        runner = SimModelRunner(SimScript(), vocab_size=10, eos_token_ids=(0,))
        runner.model = type(runner.model)("m", words, False, 100, 10, (0,))
        return runner


@pytest.mark.parametrize(
    ("options", "native_fits", "asked"),
    [
        ({"backend": "auto"}, True, ["native"]),
        ({"backend": "auto"}, False, ["native", "torch"]),
        ({"backend": "auto", "device": "cuda"}, True, ["torch"]),
        ({"backend": "native"}, True, ["native"]),
        ({"backend": "torch"}, True, ["torch"]),
    ],
)
def test_who_computes(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: dict[str, Any],
    native_fits: bool,
    asked: list[str],
) -> None:
    loaders = Loaders(monkeypatch, native_fits=native_fits)
    monkeypatch.setattr(registry, "_NVIDIA_DRIVER", tmp_path / "none")
    core = build(tmp_path, **options)
    assert loaders.asked == asked
    assert core.model.name == "a-name"


def test_a_cache_that_has_no_room_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaders = Loaders(monkeypatch, native_fits=False)
    loaders.refusal = KVCacheSizeError("no room")
    with pytest.raises(ConfigError, match=r"^no room$"):
        build(tmp_path, backend="auto", device="cpu")
    assert loaders.asked == ["native"]


def test_native_by_name_does_not_fall_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Loaders(monkeypatch, native_fits=False)
    with pytest.raises(ConfigError, match="not this architecture"):
        build(tmp_path, backend="native")


def test_a_gpu_is_torchs_and_runs_more_sequences(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaders = Loaders(monkeypatch, native_fits=True)
    loaders.device = "cuda:0"
    monkeypatch.setattr(registry, "_NVIDIA_DRIVER", tmp_path)  # it exists
    assert build(tmp_path, backend="auto").limits.max_num_seqs == 256
    assert loaders.asked == ["torch"]


def test_quantised_weights_are_the_native_runners_or_nobodys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaders = Loaders(monkeypatch, native_fits=True)
    monkeypatch.setattr(registry, "_NVIDIA_DRIVER", tmp_path)  # a GPU does not make it torch's
    build(tmp_path, quantization="int8")
    loaders.native_fits = False
    build(tmp_path, backend="auto", device="cpu", quantization="auto")
    assert loaders.asked.pop() == "torch"
    assert loaders.asked.pop() == "native"
    refusal = "--quantization q4 is the native runner's, which does not fit: not this architecture"
    with pytest.raises(ConfigError, match=f"^{refusal}$"):
        build(tmp_path, quantization="q4")
    assert loaders.asked == ["native", "native"]


@pytest.mark.usefixtures("without_extension")
def test_what_computes_instead_of_a_runner_that_was_not_built_is_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(tmp_path, backend="auto")
    (record,) = caplog.records
    assert record.getMessage() == (
        "the native runner does not fit, torch computes instead: "
        "the native extension was not built (there was no C++ compiler)"
    )
    assert record.exc_info is None
    with pytest.raises(ConfigError, match=r"^the native extension was not built"):
        build(tmp_path, backend="native")


@pytest.fixture
def without_extension(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from trioengine.engine_proc import native_runner

    Loaders(monkeypatch, native_fits=True)
    name = "trioengine.engine_proc.native_runner"
    monkeypatch.setitem(sys.modules, name, native_runner)  # the real one again,
    monkeypatch.setitem(sys.modules, f"{name}._native", None)  # but without its extension
    monkeypatch.setattr(registry, "_NVIDIA_DRIVER", tmp_path / "none")
