"""Apply each mutant of the table to a copy of the sources, and see its tests go red.

    python tests/mutants/run.py [NAME…] [--jobs N]

A mutant is killed where its tests fail (or hang) and passes for dead only then. It is an error of
the table if the text to be replaced is not there exactly once, and if the mutant cannot even be
imported: such a thing proves nothing. Exit code 1 where anything survives or is in error.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutants.table import MUTANTS, Mutant  # noqa: E402 - wherever this is started from

PAGE = ROOT / "docs" / "invariants.md"
HEAD = """# What must never happen

Written by `python tests/mutants/run.py --write` from `tests/mutants/table.py`. Each line is an
invariant, and the slips that would break it: `nox -s mutants` makes each of them in a copy of the
sources and must see its tests go red. Most are killed by the random histories of a whole server
(`tests/property/test_server_histories.py`), in which clients ask, leave, half-close, read slowly
and cancel, time passes, frames are late or spoilt, and the engine stalls, sleeps, dies and comes
back.

| invariant | slips that break it |
|---|---|""".splitlines()
PATIENCE_S = 300.0
_TESTS_FAILED = 1  # pytest's exit code; any other says that they did not run
# An editable installation finds its own sources before PYTHONPATH has a word.
BOOTSTRAP = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]
sys.path.insert(0, sys.argv.pop(1))
import trioengine
assert trioengine.__file__.startswith(sys.path[0]), trioengine.__file__
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


class Verdict(NamedTuple):
    """What became of a mutant; ``problem`` is empty where it was killed."""

    mutant: Mutant
    seconds: float
    problem: str


def main() -> int:
    """Try the mutants that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true", help="write docs/invariants.md, and leave")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    unknown = set(options.names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"no mutant is called {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    began_s = time.monotonic()
    problems = [verdict for verdict in try_all(chosen, options.jobs) if verdict.problem]
    seconds = time.monotonic() - began_s
    say(f"{len(chosen) - len(problems)} of {len(chosen)} mutants killed in {seconds:.0f} s")
    return 1 if problems else 0


def page() -> str:
    """Return docs/invariants.md: every invariant with what breaks it."""
    slips: dict[str, list[str]] = {}
    for mutant in MUTANTS:
        slips.setdefault(mutant.invariant, []).append(f"`{mutant.name}`")
    rows = [f"| {invariant} | {', '.join(names)} |" for invariant, names in slips.items()]
    return "\n".join([*HEAD, *rows, ""])


def try_all(mutants: list[Mutant], jobs: int) -> list[Verdict]:
    """Try them, ``jobs`` at a time, each worker in a copy of its own."""
    with tempfile.TemporaryDirectory(prefix="mutants-of-trioengine-") as scratch:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(jobs):
            copy = Path(scratch) / str(number)
            shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
            copies.put(copy)

        def work(mutant: Mutant) -> Verdict:
            copy = copies.get()
            try:
                verdict = attempt(mutant, copy)
            finally:
                copies.put(copy)
            say(f"{verdict.problem or 'killed':<10} {mutant.name} ({verdict.seconds:.0f} s)")
            return verdict

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(work, mutants))


def attempt(mutant: Mutant, copy: Path) -> Verdict:
    """Try one mutant in ``copy``, which is as before when this returns."""
    began_s = time.monotonic()
    path = copy / "trioengine" / mutant.file
    original = path.read_text(encoding="utf-8")
    if original.count(mutant.old) != 1:
        found = original.count(mutant.old)
        return Verdict(mutant, 0.0, f"ERROR: its text is there {found} times in {mutant.file}")
    path.write_text(original.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        problem = run_tests(mutant, copy)
    finally:
        path.write_text(original, encoding="utf-8")
    return Verdict(mutant, time.monotonic() - began_s, problem)


def run_tests(mutant: Mutant, copy: Path) -> str:
    """Run the mutant's tests against ``copy``; return what is wrong where they are not red."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0"]
    command = [sys.executable, "-B", "-c", BOOTSTRAP, str(copy), *options, *mutant.tests]
    env = {**os.environ, "HYPOTHESIS_PROFILE": "mutants", "PYTHONPATH": str(copy)}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ""  # it hangs: as red as can be
    if done.returncode == 0:
        return "SURVIVED"
    if done.returncode != _TESTS_FAILED:
        return f"ERROR: its tests did not run\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return ""


def say(line: str) -> None:
    """Write a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
