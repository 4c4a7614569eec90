"""The machine's rates: plausible, and honest about caches. How high they are is not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from trioengine.bench import machine
from trioengine.bench.machine import Bandwidth, last_cache_bytes, measure_bandwidth

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


@pytest.mark.parametrize(("cache_bytes", "cached"), [(0, False), (8 * MIB, True)])
def test_bandwidth_of_a_buffer(cache_bytes: int, cached: bool) -> None:
    found = measure_bandwidth(4 * MIB, 2, cache_bytes=cache_bytes, patience_s=0.01)
    assert found.buffer_bytes == 4 * MIB
    assert found.cached == cached
    assert 1e7 < found.one_thread < 1e13
    assert 1e7 < found.all_threads < 1e13


def test_the_faster_counts() -> None:
    found = Bandwidth(buffer_bytes=1, cached=False, one_thread=2.0, all_threads=1.0)
    assert found.best == 2.0


def test_the_last_cache_is_the_largest(tmp_path: Path) -> None:
    for index, size in enumerate(["48K", "2048K", "480M", "32K"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert last_cache_bytes(tmp_path) == 480 * MIB
    assert last_cache_bytes(tmp_path / "none") == 0


def test_buffers_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 16 * MIB)
    monkeypatch.setattr(machine, "last_cache_bytes", lambda: 64 * MIB)
    monkeypatch.setattr(machine, "_measure_gemm", lambda threads, patience_s: None)
    found = machine.measure(10 << 30, patience_s=0.01)
    assert found.weights.buffer_bytes == found.memory.buffer_bytes == 4 * MIB
    assert found.memory.cached
    assert found.gemm is None


@pytest.mark.process
@pytest.mark.model
@pytest.mark.slow
def test_as_a_process() -> None:
    pytest.importorskip("torch")
    script = (
        "import sys\n"
        "from trioengine.bench import machine\n"
        "machine.PATIENCE_S = 0\n"
        "machine.GEMM_SIZES = (64,)\n"
        "machine.measure.__kwdefaults__['patience_s'] = 0.01\n"
        "machine.last_cache_bytes = lambda: 1 << 20\n"
        "machine.main(['1000'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    found = json.loads(done.stdout)
    assert found["gemm"]["float32"] > 1e6
    assert found["gemm"]["bfloat16"] > 1e6
    assert found["weights"]["buffer_bytes"] == 64 * MIB
