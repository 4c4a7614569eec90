"""Clients that leave in any phase, and what a process holds on to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import trio

from helpers.sse_client import open_stream

if TYPE_CHECKING:
    import random

    from helpers.server_process import ServerProcess

__all__ = [
    "descriptors",
    "have_compiler",
    "leave_early",
    "resident_bytes",
    "threads",
    "total",
]


def resident_bytes(pid: int | str = "self") -> int:
    """Return the resident memory of a process."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def threads(pid: int) -> int:
    """Return how many threads a process has."""
    return len(os.listdir(f"/proc/{pid}/task"))


def descriptors(pid: int) -> dict[str, str]:
    """Return what each open descriptor of a process is."""
    found = {}
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            found[entry.name] = os.readlink(entry.path)
        except FileNotFoundError:
            continue
    return found


def have_compiler(server: ServerProcess) -> None:
    """See that the process which compiles grammars is there, with its pipes: it comes in time."""
    shaped = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"json": {}}}
    assert server.post("/v1/completions", shaped)[0] == 200


def total(metrics: dict[str, float], name: str) -> float:
    """Return a counter summed over its labels."""
    return sum(value for key, value in metrics.items() if key.partition("{")[0] == name)


async def leave_early(port: int, rng: random.Random, *, within_s: float = 1.0) -> None:
    """Open one request ``within_s`` and leave in some phase of it; or stay to the end."""
    phase = rng.choice(["sent", "head", "stream", "stream", "plain", "end"])
    body: dict[str, Any] = {
        "prompt": "x" * rng.randrange(1, 400),
        "max_tokens": rng.randrange(5, 60),
        "n": rng.choice([1, 1, 1, 3]),
        "ignore_eos": True,
        "stream": phase != "plain",
    }
    await trio.sleep(rng.random() * within_s)
    async with open_stream(port, body, read_head=phase not in ("sent", "plain")) as stream:
        if phase in ("sent", "plain"):
            await trio.sleep(rng.random() * 0.05)
        elif phase == "stream":
            for _ in range(rng.randrange(1, 10)):
                await stream.read_event()
        elif phase == "end":
            await stream.read_events()
