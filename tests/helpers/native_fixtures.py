"""Fixtures of every test that runs the native engine; a conftest imports them by name.

They need the extension, but neither torch nor a real model.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

from helpers.numpy_llama import NumpyLlama, TinyShape
from trioengine.config import EngineOptions
from trioengine.engine_proc import native_runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trioengine.engine_proc.native_runner.model_runner import NativeModelRunner

    OpenTiny = Callable[..., tuple[NativeModelRunner, NumpyLlama]]

__all__ = ["ISAS", "extension", "isa", "open_tiny"]

ISAS = ("amx", "avx512_bf16", "avx512", "avx2", "portable")


@pytest.fixture(scope="session")
def extension() -> Any:
    """Return the C++ module; skip where it was not built."""
    name = "trioengine.engine_proc.native_runner._native"
    if importlib.util.find_spec(name) is None:
        pytest.skip("the native extension is not built")
    return importlib.import_module(name)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, extension: Any) -> str:
    """Return each instruction set in turn; skip those that this machine has not."""
    name: str = request.param
    if name not in extension.usable_isas():
        pytest.skip(f"no {name} on this machine")
    return name


@pytest.fixture
def open_tiny(extension: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenTiny]:
    """Load a tiny random model; return its runner and what it must compute."""
    opened: list[NativeModelRunner] = []

    def open_(
        shape: TinyShape | NumpyLlama | None = None,
        *,
        isa: str = "",
        threads: int = 2,
        **options: Any,
    ) -> tuple[NativeModelRunner, NumpyLlama]:
        model = shape if isinstance(shape, NumpyLlama) else NumpyLlama(shape or TinyShape())
        directory = model.write(tmp_path_factory.mktemp("tiny"))
        args = {**options.pop("engine_args", {}), **({"isa": isa} if isa else {})}
        chosen: dict[str, Any] = {"kv_cache_memory_gib": 0.02, "threads": threads, **options}
        opened.append(
            native_runner.load(
                directory, EngineOptions(engine_args=args, **chosen), lambda phase, fraction: None
            )
        )
        return opened[-1], model

    yield open_
    for runner in opened:
        runner.close()
