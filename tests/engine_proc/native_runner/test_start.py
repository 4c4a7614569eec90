from __future__ import annotations

import gc
import json
import mmap
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from helpers.numpy_llama import NumpyLlama, TinyShape
from helpers.server_process import wait_until
from trioengine.config import EngineOptions
from trioengine.engine_proc import native_runner
from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MADV_POPULATE_WRITE = 23  # Linux 5.14


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return NumpyLlama(TinyShape()).write(tmp_path / "tiny")


def load(directory: Path, **options: Any) -> Any:
    return native_runner.load(
        directory, EngineOptions(**({"kv_cache_memory_gib": 0.01} | options)), lambda *_: None
    )


@pytest.mark.usefixtures("extension")
def test_a_model_of_next_to_no_size_is_computed_by_one_thread(tiny: Path) -> None:
    assert load(tiny).model.runner.endswith(", 1 threads)")
    assert load(tiny, threads=2).model.runner.endswith(", 2 threads)")


@pytest.mark.usefixtures("extension")
def test_a_runner_describes_itself(tiny: Path) -> None:
    runner = load(tiny, threads=1, engine_args={"isa": "portable"}, max_model_len_tokens=100)
    model = runner.model
    assert model.name == "tiny"
    assert model.runner == "native cpu bfloat16 (portable, 1 threads)"
    assert (model.max_model_len, model.vocab_size, model.eos_token_ids) == (100, 203, (1,))
    assert not model.simulated


@pytest.mark.usefixtures("extension")
def test_progress_rises_to_one(tiny: Path) -> None:
    told: list[tuple[str, float]] = []
    options = EngineOptions(kv_cache_memory_gib=0.01)
    native_runner.load(tiny, options, lambda phase, part: told.append((phase, part)))
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    assert told[-1] == ("ready", 1.0)


@pytest.mark.usefixtures("extension")
def test_the_cache_takes_what_it_was_given(tiny: Path) -> None:
    runner = load(tiny, kv_cache_memory_gib=0.01)
    per_block = 2 * 2 * 2 * 16 * 32 * 2  # layers, KV heads, keys and values, tokens, dims, bytes
    assert runner.num_blocks == int(0.01 * 2**30) // per_block
    assert load(tiny, kv_cache_memory_gib=None, max_num_seqs=3).num_blocks == 3 * 32


@pytest.mark.usefixtures("extension")
def test_a_share_of_what_is_free(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trioengine.engine_proc.native_runner import start

    monkeypatch.setattr(start, "available_memory_bytes", lambda: 4 * 2**20)
    per_block = 2 * 2 * 2 * 16 * 32 * 2
    runner = load(tiny, kv_cache_memory_gib=None, kv_cache_share=0.5)
    assert runner.num_blocks == 2 * 2**20 // per_block


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize(("quantization", "factor"), [("none", 2), ("int8", 1), ("q4", 0.5)])
def test_weights_beyond_free_memory_are_refused(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, quantization: str, factor: float
) -> None:
    from trioengine.engine_proc.native_runner import start
    from trioengine.models.safetensors_header import count_weights

    least = int(count_weights(tiny)[0] * factor)
    monkeypatch.setattr(start, "available_memory_bytes", lambda: least - 1)
    with pytest.raises(ConfigError, match="the weights take"):
        load(tiny, quantization=quantization)


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"device": "cuda"}, "not on CUDA"),
        ({"dtype": "float32"}, "no weights in float32"),
        ({"block_size_tokens": 8}, "multiple of 16"),
        ({"engine_args": {"isa": "mmx"}}, "'mmx' cannot be used here; usable: "),
        ({"engine_args": {"isa": 3}}, "must be a string"),
        ({"engine_args": {"turbo": True}}, "no argument 'turbo'"),
        ({"max_model_len_tokens": 513}, "exceeds the model's context of 512"),
        ({"kv_cache_memory_gib": 1e6}, "exceeds the free memory"),
        ({"kv_cache_memory_gib": 1e-5}, "one sequence of 512 tokens needs"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(
    tiny: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        load(tiny, **options)


@pytest.mark.usefixtures("extension")
def test_a_model_of_another_family_is_refused_with_the_reason(tiny: Path) -> None:
    assert native_runner.supported(tiny) is None
    config = json.loads((tiny / "config.json").read_text()) | {"model_type": "gpt2"}
    (tiny / "config.json").write_text(json.dumps(config))
    reason = native_runner.supported(tiny)
    assert reason is not None
    with pytest.raises(ConfigError) as caught:
        load(tiny)
    assert caught.value.message == reason


@pytest.mark.usefixtures("extension")
def test_a_missing_tensor_is_named(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text()) | {"num_hidden_layers": 3}
    (tiny / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"model.layers.2.self_attn.q_proj.weight is missing"):
        load(tiny)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Put something else in the extension's place, and forget what has imported it."""

    def put(stand_in: object) -> None:
        name = "trioengine.engine_proc.native_runner"
        for module in ("_native", "start", "assemble"):
            monkeypatch.delitem(sys.modules, f"{name}.{module}", raising=False)
            monkeypatch.delattr(native_runner, module, raising=False)
        monkeypatch.setitem(sys.modules, f"{name}._native", stand_in)

    return put


def test_without_the_extension_the_runner_is_left_out(
    tiny: Path, without: Callable[[object], None]
) -> None:
    without(None)
    reason = "the native extension was not built (there was no C++ compiler)"
    assert native_runner.supported(tiny) == reason
    with pytest.raises(ConfigError) as caught:
        load(tiny)
    assert caught.value.message == reason


@pytest.mark.usefixtures("extension")
def test_an_extension_that_does_not_load_is_left_out(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, without: Callable[[object], None]
) -> None:
    class Broken:
        def find_spec(self, name: str, *rest: object) -> None:
            if name.endswith("._native"):
                raise ImportError("undefined symbol: x")

    without(None)
    del sys.modules["trioengine.engine_proc.native_runner._native"]
    monkeypatch.setattr(native_runner, "_is_built", lambda: True)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ConfigError, match="cannot be loaded: undefined symbol: x"):
        load(tiny)


@pytest.mark.usefixtures("extension")
def test_loading_imports_no_torch(tiny: Path) -> None:
    import subprocess

    code = (
        "import sys, pathlib; from trioengine.config import EngineOptions;"
        "from trioengine.engine_proc import native_runner;"
        f"native_runner.load(pathlib.Path({str(tiny)!r}),"
        "EngineOptions(kv_cache_memory_gib=0.01), lambda *_: None);"
        "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def resident_mib() -> float:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE / 2**20


def system_populates() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(MADV_POPULATE_WRITE)
        except OSError:
            return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(not system_populates(), reason="Linux from 5.14 on supplies pages unasked")
@pytest.mark.usefixtures("extension")
def test_the_first_part_of_the_cache_has_its_memory_before_any_request(tiny: Path) -> None:
    before = resident_mib()
    runner = load(tiny, kv_cache_memory_gib=0.25)
    wait_until(lambda: resident_mib() - before > 120)  # by a thread of its own
    del runner
    gc.collect()
    assert resident_mib() - before < 60


@pytest.mark.usefixtures("extension")
def test_a_runner_need_not_wait_for_its_memory_to_end(tiny: Path) -> None:
    before = len(os.listdir("/proc/self/task"))
    for _ in range(5):
        load(tiny, kv_cache_memory_gib=0.25)
        gc.collect()
        assert len(os.listdir("/proc/self/task")) == before
