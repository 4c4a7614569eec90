"""Are we slower than we were? Ratios measured now against the stored ones; `nox -s bench`.

    python benchmarks/regression.py            # exits with 1 where a ratio fell below 0.85
    python benchmarks/regression.py --store    # measure, and keep these from now on
    python benchmarks/regression.py --only W1 FE steps

What is compared are ratios to something measured in the same minutes on the same machine, never
figures: W1 to W4 and single steps as fractions of the machine's floor, as `trioengine bench serve`
and `native_step.py` tell them; online, the server beside the library on the same workload, in
turns; FE, whose model is of next to no size, as a fraction of the chunks that one thread of Python
encodes and writes when it does nothing else. They are stored by runner and instruction set.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from tiny_model import write_tiny_model

from trioengine.models.command import model_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STORED: Final = Path(__file__).parent / "stored_ratios.json"
TOLERATED: Final = 0.85
WORKLOADS: Final = ("W1", "W2", "W3", "W4")
FRONT_END: Final = "FE"
ONLINE: Final = "online"
STEPS: Final = "steps"
IN_TURN: Final = ("W2", "W3")  # what online and offline are compared on
CHUNKS: Final = 20_000
BURST: Final = 64  # chunks between two reads at the other end


def chunks_per_second() -> float:
    """Return how many events of a stream one thread encodes and writes; the best of five."""
    encode = msgspec.json.Encoder().encode
    prefix = b'data: {"id":"cmpl-%032d","object":"text_completion","choices":[{"text":' % 0
    suffix = b',"index":0,"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    ours, theirs = socket.socketpair()
    with ours, theirs:
        best_s = min(_write_chunks(ours, theirs, encode, prefix, suffix) for _ in range(5))
    return CHUNKS / best_s


def _write_chunks(
    ours: socket.socket, theirs: socket.socket, encode: Any, prefix: bytes, suffix: bytes
) -> float:
    begin_s = time.perf_counter()
    for number in range(CHUNKS):
        event = prefix + encode(" word") + suffix
        ours.send(b"%x\r\n%b\r\n" % (len(event), event))
        if number % BURST == BURST - 1:
            theirs.recv(1 << 20)
    return time.perf_counter() - begin_s


def report_of(*command: str) -> Any:
    """Return the JSON that a command of ours writes."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "report.json"
        subprocess.run([sys.executable, *command, "--json", str(path)], check=True)
        return json.loads(path.read_bytes())


def bench(kind: str, *arguments: str) -> Any:
    """Return the report of one ``trioengine bench``."""
    return report_of("-m", "trioengine", "bench", kind, *arguments)


def tokens_per_s(report: Any) -> float:
    """Return the median of a report on one workload."""
    return float(report["results"][0]["spreads"]["tok_s"]["median"])


def runner_of(report: Any) -> str:
    """Return what computed, such as ``native cpu bfloat16 (amx)``."""
    name, _, rest = report["server"].partition(" on ")[2].partition(",")
    return f"{name})" if "(" in name and rest else name


def workloads(names: Sequence[str], repeat: int) -> tuple[str, dict[str, float]]:
    """Return what computed, and the fraction of the floor of each workload."""
    report = bench("serve", "--workloads", *names, "--repeat", str(repeat))
    fractions = {r["workload"]["name"]: r["fractions"]["tok_s"] for r in report["results"]}
    return runner_of(report), fractions


def front_end(repeat: int) -> tuple[str, dict[str, float]]:
    """Return what computed, and the tokens that went out for each that Python could write."""
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(Path(directory), model_path())
        most = chunks_per_second()
        arguments = ("--model", directory, "--no-floor", "--repeat", str(repeat))
        report = bench("serve", "--workloads", FRONT_END, *arguments)
    return runner_of(report), {FRONT_END: tokens_per_s(report) / most}


def online(repeat: int) -> tuple[str, dict[str, float]]:
    """Return what computed, and the median of online / offline over pairs run in turn."""
    ratios: dict[str, float] = {}
    runner = ""
    for name in IN_TURN:
        arguments = ("--workloads", name, "--repeat", "1", "--no-floor")
        pairs = []
        for _ in range(repeat):
            served = bench("serve", *arguments)
            pairs.append(tokens_per_s(served) / tokens_per_s(bench("offline", *arguments)))
            runner = runner_of(served)
        ratios[f"{ONLINE} {name}"] = statistics.median(pairs)
    return runner, ratios


def steps() -> tuple[str, dict[str, float]]:
    """Return what computed, and the fraction of the floor of each step."""
    report = report_of(str(Path(__file__).parent / "native_step.py"), str(model_path()))
    return report["runner"], {
        f"{STEPS} {case['name']}": case["floor_ms"] / case["step_ms"] for case in report["steps"]
    }


def measure(only: list[str], repeat: int) -> tuple[str, dict[str, float]]:
    """Return what computed, and the ratios asked for."""
    runner = ""
    ratios: dict[str, float] = {}
    measured: list[Callable[[], tuple[str, dict[str, float]]]] = []
    if names := [name for name in WORKLOADS if name in only]:
        measured.append(lambda: workloads(names, repeat))
    if FRONT_END in only:
        measured.append(lambda: front_end(repeat))
    if ONLINE in only:
        measured.append(lambda: online(repeat))
    if STEPS in only:
        measured.append(steps)
    for take in measured:
        runner, more = take()
        ratios |= more
    return runner, ratios


def compare(stored: dict[str, float], ratios: dict[str, float]) -> list[str]:
    """Print each ratio beside the stored one; return the names of those that fell too far."""
    fallen = []
    for name, ratio in ratios.items():
        before = stored.get(name)
        share = f"{ratio / before:.2f} of the stored {before:.3g}" if before else "nothing stored"
        print(f"{name}: {ratio:.3g}, {share}")
        if before and ratio < TOLERATED * before:
            fallen.append(name)
    return fallen


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    every = [*WORKLOADS, FRONT_END, ONLINE, STEPS]
    parser.add_argument("--only", nargs="+", choices=every, default=every, metavar="NAME")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--store", action="store_true")
    options = parser.parse_args()
    kept = json.loads(STORED.read_bytes()) if STORED.exists() else {}
    runner, ratios = measure(options.only, options.repeat)
    print(f"\n{runner}")
    fallen = compare(kept.get(runner, {}), ratios)
    if options.store:
        kept[runner] = kept.get(runner, {}) | {
            name: float(f"{r:.3g}") for name, r in ratios.items()
        }
        STORED.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
    elif fallen:
        print(f"slower than {TOLERATED} of what is stored: {', '.join(fallen)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
