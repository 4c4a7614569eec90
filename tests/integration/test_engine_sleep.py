"""Real engines are put to sleep: their memory is the system's, and their answers stay the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers import tiny_tokenizers
from helpers.server_process import ServerProcess, process_lives

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow]

START_S = 120.0  # importing torch on a busy machine
BODY = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0, "seed": 1}


def test_asleep_there_is_no_engine_and_awake_it_answers_as_before() -> None:
    args = '{"tokens_from": "seed"}'
    with ServerProcess("--enable-admin", "--engine-args", args) as server:
        server.wait_ready()
        before = server.post("/v1/completions", BODY)[1]["choices"]
        assert server.post("/sleep?level=2", None) == (200, {"is_sleeping": True})
        assert not process_lives(server.engine_pid)
        status, answer = server.post("/v1/completions", BODY)
        assert (status, answer["error"]["code"]) == (503, "sleeping")
        status, health = server.get("/health/ready")
        assert (status, health["status"]) == (503, "sleeping")
        assert server.get("/health/live")[0] == 200
        assert server.post("/wake_up", None) == (200, {"is_sleeping": False})
        assert server.post("/v1/completions", BODY)[1]["choices"] == before


def test_a_request_wakes_it() -> None:
    with ServerProcess("--enable-admin", "--wake-on-request") as server:
        server.wait_ready()
        assert server.post("/sleep", None)[0] == 200
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 3})[0] == 200
        assert server.get("/is_sleeping") == (200, {"is_sleeping": False})


@pytest.mark.model
@pytest.mark.parametrize("engine", ["native", "torch"])
def test_a_real_model_gives_its_memory_back_and_answers_as_before(
    engine: str, tmp_path: Path
) -> None:
    model_dir = tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path / "tiny")
    from helpers.tiny_models import save_tiny

    save_tiny(model_dir, "llama-gqa2-hd64-tied", vocab_size=512)
    with ServerProcess(str(model_dir), "--enable-admin", engine=engine) as server:
        server.wait_ready(timeout_s=START_S)
        before = server.post("/v1/completions", BODY)[1]["choices"]
        first = server.engine_pid
        assert server.post("/sleep", None)[0] == 200
        assert not process_lives(first)
        assert server.post("/wake_up", None)[0] == 200
        assert server.post("/v1/completions", BODY)[1]["choices"] == before
