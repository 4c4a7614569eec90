"""How much is fuzzed, and what: `nox -s fuzz -- --cases 20000 --engine native`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from helpers.foreign_service import SERVER_PYTHON, START_S
from helpers.server_process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = ("--max-model-len", "128", "--max-num-seqs", "16", "--max-queue", "64")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, default=2000, help="requests in all; 2000 are the same")
    parser.addoption("--engine", default="sim", help="which engine answers: sim, native, torch")


@pytest.fixture(scope="session")
def cases(request: pytest.FixtureRequest) -> int:
    count: int = request.config.getoption("--cases")
    return count


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A server whose sequences are short, so that whatever is asked for ends soon."""
    engine: str = request.config.getoption("--engine")
    script = json.dumps({"vocab_size": 2048, "num_blocks": 512, "max_model_len": 128})
    flags = ("--engine-args", script) if engine == "sim" else ()
    command = (SERVER_PYTHON, "-m", "trioengine", "serve")
    with ServerProcess(*SMALL, *flags, engine=engine, command=command) as server:
        yield server.wait_ready(timeout_s=START_S)
