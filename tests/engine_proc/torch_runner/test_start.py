from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from trioengine.config import EngineOptions
from trioengine.engine_proc import torch_runner
from trioengine.engine_proc.machine import usable_cpus
from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from helpers.torch_fixtures import Checkpoints, OpenRunner

pytestmark = pytest.mark.model


def test_progress_rises_to_one(checkpoints: Checkpoints, open_runner: OpenRunner) -> None:
    seen: list[tuple[str, float]] = []
    options = EngineOptions(device="cpu", dtype="float32", threads=1)
    torch_runner.load(
        checkpoints("llama-mha"), options, lambda phase, done: seen.append((phase, done))
    ).close()
    fractions = [done for _, done in seen]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert all(phase for phase, _ in seen)


def test_threads_are_those_asked_for(open_runner: OpenRunner) -> None:
    torch = pytest.importorskip("torch")
    open_runner("llama-mha", threads=1)
    assert torch.get_num_threads() == 1
    open_runner("llama-mha", threads=None)
    assert torch.get_num_threads() == usable_cpus()


def test_the_cache_takes_the_memory_named(open_runner: OpenRunner) -> None:
    runner = open_runner("llama-mha", kv_cache_memory_gib=0.004, block_size_tokens=8)
    bytes_per_token = 2 * 4 * (16 + 16) * 4  # layers, heads, key and value, float32
    assert runner.block_size == 8
    assert runner.num_blocks == int(0.004 * 2**30) // (8 * bytes_per_token)


def test_without_a_size_the_cache_holds_all_sequences_at_full_length(
    open_runner: OpenRunner,
) -> None:
    runner = open_runner("llama-mha", kv_cache_memory_gib=None, max_num_seqs=3)
    assert runner.num_blocks == 3 * 512 // 16


def test_a_cache_too_small_for_one_sequence_is_refused(open_runner: OpenRunner) -> None:
    with pytest.raises(ConfigError, match="one sequence of 512 tokens needs"):
        open_runner("llama-mha", kv_cache_memory_gib=0.0001)


@pytest.mark.process
@pytest.mark.slow
def test_an_untouched_cache_costs_no_memory(checkpoints: Checkpoints) -> None:
    """A cache of a gigabyte must not be a gigabyte, nor a second, before it is used.

    In a process of its own: in one that other tests share, what they left to the allocator comes
    and goes meanwhile.
    """
    code = (
        "import os, pathlib, sys\n"
        "from trioengine.config import EngineOptions\n"
        "from trioengine.engine_proc import torch_runner\n"
        "def open_runner(gib):\n"
        "    options = EngineOptions(device='cpu', dtype='float32', threads=1,\n"
        "                            kv_cache_memory_gib=gib)\n"
        "    return torch_runner.load(pathlib.Path(sys.argv[1]), options, lambda *progress: None)\n"
        "def resident_bytes():\n"
        "    pages = open('/proc/self/statm').read().split()[1]\n"
        "    return int(pages) * os.sysconf('SC_PAGE_SIZE')\n"
        "first = open_runner(0.004)\n"  # what importing costs is not the cache's
        "before = resident_bytes()\n"
        "print(open_runner(1.0).num_blocks, resident_bytes() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(checkpoints("llama-mha"))],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    num_blocks, grown_bytes = map(int, done.stdout.split())
    assert num_blocks == 2**30 // (16 * 2 * 4 * 32 * 4)
    assert grown_bytes < 200 * 2**20


@pytest.mark.process
@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_wait_without_spinning_unless_told_otherwise(
    given: str | None, expected: str
) -> None:
    code = (
        "import os, pathlib, sys\n"
        "from trioengine.config import EngineOptions\n"
        "from trioengine.engine_proc import torch_runner\n"
        "sys.modules['torch'] = None\n"  # the import that must find it set
        "try:\n"
        "    torch_runner.load(pathlib.Path('.'), EngineOptions(), lambda *progress: None)\n"
        "except ImportError:\n"
        "    print(os.environ['OMP_WAIT_POLICY'])\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment,
    )
    assert done.stdout.strip() == expected


@pytest.mark.process
def test_importing_the_package_imports_no_torch() -> None:
    code = (
        "import sys, trioengine.engine_proc.torch_runner;"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
