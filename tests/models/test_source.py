"""What MODEL means to the command line, before anything is started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from trioengine.config import EngineOptions, ServerConfig
from trioengine.errors import ConfigError
from trioengine.models.source import ModelSource, find_model

if TYPE_CHECKING:
    from pathlib import Path

SIM = EngineOptions(backend="sim")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_a_directory_is_ready_as_it_is(checkpoint: Path) -> None:
    assert find_model(ServerConfig(model=str(checkpoint))) == ModelSource(
        str(checkpoint), checkpoint
    )


def test_a_hub_id_is_still_to_be_prepared() -> None:
    assert find_model(ServerConfig(model="owner/name")) == ModelSource("owner/name", None)


def gguf_file(directory: Path) -> Path:
    path = directory / "x.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    return path


def test_a_gguf_file_is_told_from_what_is_made_of_one(tmp_path: Path) -> None:
    named = find_model(ServerConfig(model=str(gguf_file(tmp_path))))
    assert named.is_gguf
    assert not find_model(ServerConfig()).is_gguf


@pytest.mark.parametrize(
    ("is_gguf", "options", "expected"),
    [
        (True, {}, "auto"),
        (False, {}, "none"),
        (True, {"dtype": "bfloat16"}, "none"),
        (True, {"quantization": "none"}, "none"),
        (False, {"quantization": "gguf"}, "gguf"),
    ],
)
def test_only_a_named_file_offers_its_blocks(
    is_gguf: bool, options: dict[str, Any], expected: str
) -> None:
    source = ModelSource("x", None, is_gguf=is_gguf)
    assert source.fit(EngineOptions(**options)).quantization == expected


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="not found"):
        find_model(ServerConfig(model="/does/not/exist"))


def test_the_simulated_engine_needs_no_model() -> None:
    assert find_model(ServerConfig(engine=SIM)) == ModelSource("sim", None, simulated=True)


def test_the_simulated_engine_takes_a_name() -> None:
    config = ServerConfig(engine=SIM, model="a-name")
    assert find_model(config) == ModelSource("a-name", None, simulated=True)


def test_the_simulated_engine_takes_the_words_of_a_checkpoint(checkpoint: Path) -> None:
    config = ServerConfig(engine=SIM, model=str(checkpoint))
    assert find_model(config) == ModelSource(str(checkpoint), checkpoint, simulated=True)
