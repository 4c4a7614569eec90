"""The cache's memory is there before a step needs it: as much again as has been used."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from helpers.numpy_llama import TinyShape, make_batch

if TYPE_CHECKING:
    from helpers.native_fixtures import OpenTiny

pytestmark = pytest.mark.slow

MIB = 2**20
EARLY = 128 * MIB
PATIENCE_S = 30.0
SHAPE = TinyShape(layers=3, heads=3, kv_heads=1)
BLOCK_BYTES = 3 * 2 * 16 * 32 * 2  # no whole pages, on purpose


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def wait_resident(least: int) -> None:
    """Wait for memory that another thread supplies; the system tells nobody when it has."""
    end_s = time.monotonic() + PATIENCE_S
    while resident_bytes() < least:
        assert time.monotonic() < end_s, f"{resident_bytes() // MIB} MiB of {least // MIB}"
        time.sleep(0.01)


def test_it_stays_as_far_ahead_as_was_used(open_tiny: OpenTiny) -> None:
    before = resident_bytes()
    runner, _ = open_tiny(SHAPE, kv_cache_memory_gib=0.375)
    wait_resident(before + EARLY)
    for used in (80 * MIB + 1, 90 * MIB, 100 * MIB):
        block = used // BLOCK_BYTES
        runner.execute(make_batch([([1, 2, 3], 0, [block])]))
        wait_resident(before + 2 * used)
    time.sleep(0.2)  # nothing tells that nothing more will come
    assert resident_bytes() < before + 2 * used + 64 * MIB  # and no further
