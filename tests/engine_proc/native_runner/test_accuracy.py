"""How near the native runner comes to transformers in float32, on the default model.

A few answers in the ordinary run; everything, with its table, in ``nox -s accuracy``.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any, Literal

import pytest

from helpers.accuracy import (
    TEXT,
    Accuracy,
    NativeSubject,
    TorchSubject,
    Yardstick,
    default_model_dir,
    move_off_the_grid,
    read_model,
    shipped_tokens,
    write_checkpoint,
    write_with_blocks,
)
from trioengine.config import EngineOptions
from trioengine.engine_proc import native_runner

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Quantization = Literal["none", "int8", "q4", "gguf"]
    Tell = Callable[[str, Accuracy, Yardstick], None]

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.usefixtures("extension")]

# Agreement at least, and perplexity at most, over that of float32.
BOUNDS = {
    "int8": (0.97, 1.02),
    "q4": (0.80, 1.25),
    "q8_0": (0.97, 1.02),
    "q4_1": (0.80, 1.45),
    "q4_0": (0.80, 1.35),
}


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return default_model_dir()


@pytest.fixture(scope="module")
def moved_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same model with weights that are not those of a 4-bit file already."""
    model = read_model(model_dir)
    move_off_the_grid(model)
    return write_checkpoint(model, model_dir, tmp_path_factory.mktemp("moved") / "model")


def yardstick(directory: Path, prompts: int, tokens: int, text: int | None = None) -> Yardstick:
    return Yardstick(shipped_tokens(directory)[:text], prompts, tokens)


def remembered(request: pytest.FixtureRequest, name: str, make: Callable[[], Any]) -> Any:
    """Return what transformers said last time, where nothing has changed since.

    It takes minutes, and pytest's cache (``--cache-clear``) keeps it from run to run.
    """
    import torch
    import transformers

    words = hashlib.sha256(TEXT.read_bytes()).hexdigest()[:16]
    key = f"accuracy/{name}-{torch.__version__}-{transformers.__version__}-{words}"
    cache = request.config.cache
    known = cache.get(key, None) if cache is not None else None
    if known is None:
        known = make()
        if cache is not None:
            cache.set(key, known)
    return known


def full_yardstick(request: pytest.FixtureRequest, directory: Path, name: str) -> Yardstick:
    stick = yardstick(directory, prompts=64, tokens=64)
    stick.know(remembered(request, name, lambda: stick.ask(TorchSubject(directory, "float32"))))
    return stick


@pytest.fixture(scope="module")
def plain(request: pytest.FixtureRequest, model_dir: Path) -> Yardstick:
    return full_yardstick(request, model_dir, f"{model_dir.name}-float32")


@pytest.fixture(scope="module")
def moved(request: pytest.FixtureRequest, model_dir: Path, moved_dir: Path) -> Yardstick:
    return full_yardstick(request, moved_dir, f"{model_dir.name}-moved-float32")


@pytest.fixture(scope="module")
def torch_bfloat16(request: pytest.FixtureRequest, model_dir: Path, plain: Yardstick) -> Accuracy:
    def make() -> dict[str, float]:
        return dataclasses.asdict(plain.measure(TorchSubject(model_dir, "bfloat16")))

    return Accuracy(**remembered(request, f"{model_dir.name}-bfloat16", make))


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Tell:
    """Print a line of the table, whatever captures output."""

    def tell_(name: str, figures: Accuracy, against: Yardstick) -> None:
        with capsys.disabled():
            print(f"\n{figures.row(name, against.exact)}", end="")  # noqa: T201

    return tell_


def native(directory: Path, quantization: Quantization = "none", isa: str = "") -> NativeSubject:
    options = EngineOptions(
        max_model_len_tokens=512,
        kv_cache_memory_gib=0.5,
        quantization=quantization,
        engine_args={"isa": isa} if isa else {},
    )
    return NativeSubject(native_runner.load(directory, options, lambda *_: None))


def test_a_few_answers(model_dir: Path, tell: Tell) -> None:
    stick = yardstick(model_dir, prompts=8, tokens=32, text=257)
    stick.know(stick.ask(TorchSubject(model_dir, "float32")))
    found = stick.measure(native(model_dir))
    tell("bfloat16", found, stick)
    assert found.agreement > 0.97
    assert found.perplexity < 1.01 * stick.exact.perplexity
    found = stick.measure(native(model_dir, "int8"))
    tell("int8", found, stick)
    assert found.agreement > 0.95
    assert found.perplexity < 1.02 * stick.exact.perplexity


# The whole ---------------------------------------------------------------------------------------


@pytest.mark.soak
def test_bfloat16_is_no_worse_than_transformers_own(
    model_dir: Path, plain: Yardstick, torch_bfloat16: Accuracy, isa: str, tell: Tell
) -> None:
    found = plain.measure(native(model_dir, isa=isa))
    if isa == "amx":
        tell("transformers, float32", plain.exact, plain)
        tell("transformers, bfloat16", torch_bfloat16, plain)
    tell(f"native, bfloat16, {isa}", found, plain)
    assert found.prefix >= torch_bfloat16.prefix
    assert found.agreement >= torch_bfloat16.agreement
    assert found.perplexity < 1.005 * plain.exact.perplexity


@pytest.mark.soak
def test_the_blocks_of_the_default_models_own_file_cost_little(
    model_dir: Path, plain: Yardstick, tell: Tell
) -> None:
    """Its weights are those of the checkpoint: what is rounded beside are the activations."""
    found = plain.measure(native(model_dir, "gguf"))
    tell("native, gguf, the file's own Q4_1", found, plain)
    assert found.agreement > 0.96
    assert found.perplexity < 1.02 * plain.exact.perplexity


@pytest.mark.soak
@pytest.mark.parametrize("kind", BOUNDS)
def test_quantised_weights_stay_near(
    moved_dir: Path, moved: Yardstick, tmp_path: Path, kind: str, tell: Tell
) -> None:
    agreement, perplexity = BOUNDS[kind]
    if kind == "int8":
        tell("off the grid: native, bfloat16", moved.measure(native(moved_dir)), moved)
    if kind in {"int8", "q4"}:
        subject = native(moved_dir, kind)  # type: ignore[arg-type]  # the two of its literals
    else:
        subject = native(write_with_blocks(moved_dir, tmp_path / "blocks", kind), "gguf")
    found = moved.measure(subject)
    tell(f"off the grid: native, {kind}", found, moved)
    assert found.agreement >= agreement
    assert found.perplexity < perplexity * moved.exact.perplexity
