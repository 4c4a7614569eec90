"""What a server that has nothing to do costs, and what neither process loads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from helpers.server_process import ServerProcess
from helpers.tiny_native import save_tiny_native

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.process, pytest.mark.slow]

IDLE_S = 5.0
IDLE_SHARE = 0.01


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server on the native engine that has just answered."""
    pytest.importorskip("trioengine.engine_proc.native_runner._native")
    model = save_tiny_native(tmp_path_factory.mktemp("tiny"))
    with ServerProcess(str(model), "--threads", "2", engine="native") as server:
        server.wait_ready()
        status, _ = server.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 20})
        assert status == 200
        yield server


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far, all its living threads, to the nanosecond.

    Not from `stat`: that counts whole ticks of 10 ms by who runs when the tick comes, and a process
    that wakes on a timer runs just then.
    """
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def test_idle_processes_take_next_to_no_cpu(server: ServerProcess) -> None:
    """Also right after a step: the threads of the kernels must not go on spinning."""
    pids = (server.process.pid, server.engine_pid)
    server.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 20})
    before = [cpu_s(pid) for pid in pids]
    time.sleep(IDLE_S)
    taken = [cpu_s(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
    assert max(taken) <= IDLE_SHARE * IDLE_S


def test_neither_process_maps_what_it_does_not_need(server: ServerProcess) -> None:
    served = Path(f"/proc/{server.process.pid}/maps").read_text()
    engine = Path(f"/proc/{server.engine_pid}/maps").read_text()
    assert "zmq" in served  # it is the right file
    assert "_native" in engine
    assert not [name for name in ("torch", "numpy", "safetensors") if name in served]
    assert not [name for name in ("torch", "tokenizers", "safetensors") if name in engine]
