"""What the hardware gives: ``python -m trioengine.bench.machine NUM_BYTES_OF_WEIGHTS``.

Bandwidth is measured with as many bytes as the model's weights have, read over and over, since
that is what decoding does, and with a buffer larger than the last cache. Where the weights fit into
that cache the first figure is the cache's, and the report says so. Each figure is the best of many
passes: whatever else runs on the machine can only make one slower. It runs in a process of its own,
so that the memory is given back and its caller imports neither numpy nor torch.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from trioengine.engine_proc.machine import available_memory_bytes, usable_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

__all__ = ["Bandwidth", "Gemm", "Machine", "last_cache_bytes", "measure", "measure_bandwidth"]

PATIENCE_S: Final = 0.5  # for each figure, three passes at least
MIN_BYTES: Final = 64 << 20  # of a buffer: no model is so small that its weights' rate matters
MEMORY_SHARE: Final = 4  # the buffer takes at most one such part of what is free
GEMM_SIZES: Final = (1024, 2048)
_CPU: Final = Path("/sys/devices/system/cpu/cpu0/cache")
_CPUINFO: Final = Path("/proc/cpuinfo")
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Bandwidth(msgspec.Struct, frozen=True, kw_only=True):
    """Read bandwidth of a buffer that is read over and over, in bytes per second.

    Attributes:
        buffer_bytes: Its size.
        cached: It is no larger than the last cache, so the rate may be the cache's.
        one_thread: Of one thread.
        all_threads: Of one thread per processor.
    """

    buffer_bytes: int
    cached: bool
    one_thread: float
    all_threads: float

    @property
    def best(self) -> float:
        """The larger: on a busy machine one thread may read faster than all."""
        return max(self.one_thread, self.all_threads)


class Gemm(msgspec.Struct, frozen=True, kw_only=True):
    """Operations per second of square matrix products through torch, all threads."""

    bfloat16: float
    float32: float


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured.

    Attributes:
        cpu: Its name.
        num_cpus: That this process may use.
        cache_bytes: Size of the last cache; virtual machines tell of the whole host's.
        weights: Bandwidth of a buffer as large as the weights.
        memory: Bandwidth of a buffer larger than the last cache, or as large as memory allows.
        gemm: ``None`` without torch.
    """

    cpu: str
    num_cpus: int
    cache_bytes: int
    weights: Bandwidth
    memory: Bandwidth
    gemm: Gemm | None


def measure(weight_bytes: int, *, patience_s: float = PATIENCE_S) -> Machine:
    """Measure everything, in some eight times ``patience_s``.

    Args:
        weight_bytes: Size of the model's weights.
        patience_s: Time for each figure.
    """
    num_cpus, cache_bytes = usable_cpus(), last_cache_bytes()
    most = available_memory_bytes() // MEMORY_SHARE
    sizes = (max(weight_bytes, MIN_BYTES), max(2 * cache_bytes, 2 * MIN_BYTES))
    weights, memory = (
        measure_bandwidth(min(size, most), num_cpus, cache_bytes=cache_bytes, patience_s=patience_s)
        for size in sizes
    )
    return Machine(
        cpu=_cpu_name(),
        num_cpus=num_cpus,
        cache_bytes=cache_bytes,
        weights=weights,
        memory=memory,
        gemm=_measure_gemm(num_cpus, patience_s),
    )


def measure_bandwidth(
    num_bytes: int, num_threads: int, *, cache_bytes: int, patience_s: float
) -> Bandwidth:
    """Return the rate at which a buffer of about ``num_bytes`` can be read.

    Numpy's dot product and maximum both read each byte once, with vector instructions and the GIL
    released; the faster counts, since what is sought is the memory's rate and not theirs.
    """
    import numpy as np

    # Written, so that every page is there; numpy asks for huge ones.
    numbers = np.ones(num_bytes // 4, np.float32)
    one, several = (
        numbers.nbytes / _read_s(np.array_split(numbers, threads), patience_s)
        for threads in (1, num_threads)
    )
    return Bandwidth(
        buffer_bytes=numbers.nbytes,
        cached=numbers.nbytes <= cache_bytes,
        one_thread=one,
        all_threads=several,
    )


def _read_s(parts: list[npt.NDArray[np.float32]], patience_s: float) -> float:
    """Return the shortest time in which one thread for each part reads all of them."""
    import numpy as np

    with ThreadPoolExecutor(len(parts)) as pool:
        return min(
            _best_s(lambda: list(pool.map(np.dot, parts, parts)), patience_s / 2),
            _best_s(lambda: list(pool.map(np.max, parts)), patience_s / 2),
        )


def last_cache_bytes(directory: Path = _CPU) -> int:
    """Return the size of the largest cache of the first processor, 0 if the kernel tells none."""
    sizes = [0]
    for path in directory.glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KMG")) * _UNITS.get(text[-1:], 1))
    return max(sizes)


def _measure_gemm(num_threads: int, patience_s: float) -> Gemm | None:
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(num_threads)
    rates = {}
    for dtype in (torch.bfloat16, torch.float32):
        rates[dtype] = max(
            2 * size**3 / _best_s(_product(torch, size, dtype), patience_s / len(GEMM_SIZES))
            for size in GEMM_SIZES
        )
    return Gemm(bfloat16=rates[torch.bfloat16], float32=rates[torch.float32])


def _product(torch: Any, size: int, dtype: Any) -> Callable[[], object]:
    left, right = (torch.rand(size, size).to(dtype) for _ in range(2))
    return lambda: torch.mm(left, right)


def _best_s(work: Callable[[], object], patience_s: float) -> float:
    """Return the shortest time of ``work``, which is done three times at least."""
    deadline_s = time.perf_counter() + patience_s
    times: list[float] = []
    while len(times) < 3 or time.perf_counter() < deadline_s:
        begin_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin_s)
    return min(times)


def _cpu_name() -> str:
    for line in _CPUINFO.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return os.uname().machine


def main(arguments: Sequence[str]) -> None:
    """Print what was measured for weights of ``arguments[0]`` bytes, as JSON."""
    sys.stdout.buffer.write(msgspec.json.encode(measure(int(arguments[0]))))


if __name__ == "__main__":
    main(sys.argv[1:])
