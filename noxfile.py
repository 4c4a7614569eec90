"""Every check of this project, one session each. `nox` alone runs what CI runs.

The sessions that need torch share one environment (it is hundreds of megabytes, and building it is
most of a first run); the matrix over other Pythons runs on the simulated engine, without torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.error_on_missing_interpreters = False  # nobody need have all three
nox.options.sessions = [
    "lint", "typing", "layers", "tests", "property", "integration", "tests_without_torch",
    "fuzz",
]  # fmt: skip

ROOT = Path(__file__).parent
SHARED_ENV = ROOT / ".nox" / "shared"
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
MINORS = ("3.11", "3.12", "3.13")
LOWEST = ("trio", "quart-trio", "hypercorn", "pyzmq", "msgspec")
# What only a session of its own runs.
ELSEWHERE = "not soak and not gpu and not ecosystem"
SERIAL = ("--durations=10", "-q")
FLAKE8_ASYNC = (
    "--enable=ASYNC1",
    # 109: `timeout` is a field of the API. 124: a route is async whether it awaits or not.
    # 128: a task_status that is handed on is started by whoever gets it.
    "--disable=ASYNC109,ASYNC124,ASYNC128",
    "--startable-in-context-manager=serve_http,run_incarnation,run,_serve,_serve_http",
)


def offer_pyenv_versions() -> None:
    """Name the Pythons that pyenv has: it hides those which are not its user's default."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [path.name for minor in MINORS for path in sorted(versions.glob(f"{minor}.*"))[-1:]]
    if found:
        os.environ.setdefault("PYENV_VERSION", ":".join(found))


offer_pyenv_versions()


def group(*names: str) -> list[str]:
    """Requirements of these dependency groups. Any pip can install a list; not any pip a group."""
    return list(nox.project.dependency_groups(PYPROJECT, *names))


def shared_python(session: nox.Session) -> str:
    """Return the interpreter of the shared environment, made or brought up to date if need be."""
    python = str(SHARED_ENV / "bin" / "python")
    digest = hashlib.sha256(sys.version.encode())
    for path in (ROOT / "pyproject.toml", *sorted((ROOT / "native").rglob("*.*"))):
        digest.update(path.read_bytes())
    stamp = SHARED_ENV / digest.hexdigest()[:16]
    if not stamp.exists():
        session.run(sys.executable, "-m", "venv", "--clear", str(SHARED_ENV), external=True)
        wanted = group("test", "lint", "typing", "layers")
        # Most of torch is never imported: compiling all of it would be half of the installation.
        install = ("-m", "pip", "install", "-q", "--no-compile")
        session.run(python, *install, "-e", str(ROOT), *wanted, external=True)
        stamp.touch()
    return python


def run(session: nox.Session, module: str, *args: str, **env: str) -> None:
    """Run a module in the shared environment."""
    python = shared_python(session)
    session.run(python, "-m", module, *args, external=True, env={**os.environ, **env})


def pytest(session: nox.Session, *args: str, profile: str = "ci") -> None:
    """Run pytest in the shared environment, with any arguments given after `--`."""
    run(session, "pytest", *SERIAL, *args, *session.posargs, HYPOTHESIS_PROFILE=profile)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style and the async rules that ruff lacks."""
    run(session, "ruff", "check", ".")
    run(session, "ruff", "format", "--check", ".")
    sources = (str(path) for path in sorted((ROOT / "src").rglob("*.py")))
    bin_dir = Path(shared_python(session)).parent
    session.run(str(bin_dir / "flake8-async"), *FLAKE8_ASYNC, *sources, external=True)


@nox.session(venv_backend="none")
def typing(session: nox.Session) -> None:
    """Mypy, strict, over sources and tests."""
    run(session, "mypy")


@nox.session(venv_backend="none")
def layers(session: nox.Session) -> None:
    """Which room may know which."""
    session.run(str(Path(shared_python(session)).parent / "lint-imports"), external=True)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Every room by itself: in memory, on a virtual clock, and each runner against transformers."""
    pytest(session, "tests", "--ignore=tests/property", "--ignore=tests/integration",
           "-m", ELSEWHERE)  # fmt: skip


@nox.session(venv_backend="none")
def property(session: nox.Session) -> None:
    """Hypothesis: state machines, round trips, histories with faults."""
    pytest(session, "tests/property", "-m", ELSEWHERE)


@nox.session(venv_backend="none")
def integration(session: nox.Session) -> None:
    """Real processes: the command, signals, kill -9 on either side, real clients."""
    pytest(session, "tests/integration", "-m", ELSEWHERE)


@nox.session(python=MINORS[1:])
def tests_without_torch(session: nox.Session) -> None:
    """The other Pythons, on the simulated engine, with neither torch nor transformers."""
    session.install("-q", *group("runtime-without-torch", "test"))
    session.install("-q", "--no-deps", "-C", "wheel.cmake=false", "-e", str(ROOT))
    quick = f"{ELSEWHERE} and not model and not slow"
    session.run("pytest", *SERIAL, "-m", quick, *session.posargs, env={"HYPOTHESIS_PROFILE": "dev"})


@nox.session(venv_backend="venv")
def ecosystem(session: nox.Session) -> None:
    """Foreign clients, in an environment of their own, against a server of the shared one.

    They warn about their own dependencies, which is no business of ours.
    """
    session.install("-q", "--no-compile", *group("test", "ecosystem"))
    server = {"TRIOENGINE_SERVER_PYTHON": shared_python(session)}
    session.run("pytest", *SERIAL, "-W", "default", "-p", "no:warnings", "-m", "ecosystem",
                "tests/ecosystem", *session.posargs, env=server)  # fmt: skip


@nox.session(venv_backend="venv")
def fuzz(session: nox.Session) -> None:
    """Thousands of requests made from /openapi.json, the same ones each time unless told more."""
    session.install("-q", "--no-compile", *group("test", "fuzz"))
    server = {"TRIOENGINE_SERVER_PYTHON": shared_python(session)}
    # One test of minutes: to look at its stack from another thread reads frames that are freed
    # meanwhile, and has ended it with SIGSEGV. Each answer has a limit of its own.
    session.run("pytest", *SERIAL, "-W", "default", "-p", "no:warnings", "-o",
                "faulthandler_timeout=0", "tests/fuzz", *session.posargs,
                env=server)  # fmt: skip


@nox.session(venv_backend="venv")
def lowest(session: nox.Session) -> None:
    """The oldest versions that pyproject.toml admits of what we lean on hardest."""
    floors = [
        f"{name}=={floor.group(1)}"
        for requirement in PYPROJECT["project"]["dependencies"]
        for name in LOWEST
        if (floor := re.match(rf"{name}>=([\d.]+)", requirement))
    ]
    session.install("-q", *group("runtime-without-torch", "test"), *floors)
    session.install("-q", "--no-deps", "-C", "wheel.cmake=false", "-e", str(ROOT))
    session.run("pytest", *SERIAL, "-m", f"{ELSEWHERE} and not model", *session.posargs)


@nox.session(venv_backend="venv")
def sanitizers(session: nox.Session) -> None:
    """The native runner on every instruction set of this machine, watched for a wrong access.

    AddressSanitizer and UndefinedBehaviorSanitizer end the process at the first one.
    """
    session.install("-q", *group("runtime-without-torch", "test"))
    build = {
        "build-dir": "build/sanitizers",
        "cmake.build-type": "RelWithDebInfo",
        "cmake.define.TRIOENGINE_SANITIZE": "address,undefined",
    }
    options = [part for name, value in build.items() for part in ("-C", f"{name}={value}")]
    session.install("-q", "--no-deps", *options, str(ROOT))
    env = sanitizer_environment(session)
    # A build that fails leaves the extension out, and its tests would be skipped.
    session.run("python", "-c", "import trioengine.engine_proc.native_runner._native", env=env)
    quick = f"{ELSEWHERE} and not model"
    target = session.posargs or ["tests/engine_proc/native_runner", "-m", quick]
    # Looking at a slow test's stack from another thread reads frames that are freed meanwhile.
    session.run("pytest", *SERIAL, "-o", "faulthandler_timeout=0", *target,
                env={**env, "HYPOTHESIS_PROFILE": "ci"})  # fmt: skip


def sanitizer_environment(session: nox.Session) -> dict[str, str]:
    """Return the variables under which a Python that was built without sanitizers bears them."""
    compiler = os.environ.get("CXX", "c++")
    # libstdc++ too: the sanitizer wants to find what throws exceptions when it is loaded.
    libraries = [
        str(session.run(compiler, f"-print-file-name={name}", external=True, silent=True)).strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    return {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",  # Python itself leaks at its end
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # so that the sanitizer sees each object by itself
    }


@nox.session(venv_backend="none")
def accuracy(session: nox.Session) -> None:
    """Greedy agreement and perplexity of every precision against float32: the table in docs/."""
    run(session, "pytest", "-q", "-o", "faulthandler_timeout=900",
        "tests/engine_proc/native_runner/test_accuracy.py", *session.posargs)  # fmt: skip


@nox.session(venv_backend="none")
def histories(session: nox.Session) -> None:
    """100,000 histories of a whole server with faults, on every core; `-- N` for another number."""
    session.run(shared_python(session), str(ROOT / "tests" / "soak_histories.py"),
                *session.posargs, external=True)  # fmt: skip


@nox.session(venv_backend="none")
def mutants(session: nox.Session) -> None:
    """Break the sources on purpose, in a copy, and see the tests go red: `-- NAME` for one."""
    session.run(shared_python(session), str(ROOT / "tests" / "mutants" / "run.py"),
                *session.posargs, external=True)  # fmt: skip


@nox.session(venv_backend="none")
def soak(session: nox.Session) -> None:
    """Minutes to hours: a million messages, ten million steps, 100,000 histories a property."""
    session.run(shared_python(session), str(ROOT / "tests" / "soak_histories.py"), external=True)
    pytest(session, "tests", "-m", "not gpu", "-o", "faulthandler_timeout=0",
           "--deselect=tests/property/test_server_histories.py", profile="soak")  # fmt: skip


@nox.session(venv_backend="none")
def device(session: nox.Session) -> None:
    """What needs a GPU."""
    pytest(session, "tests/device", "-m", "gpu")


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Speed: fails where a ratio to the floor fell below 0.85 of the one that is stored."""
    script = str(ROOT / "benchmarks" / "regression.py")
    session.run(shared_python(session), script, *session.posargs, external=True)
