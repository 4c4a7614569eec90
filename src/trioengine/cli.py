"""``trioengine``: the command line, and the exit codes of ``exit_codes.py``.

``serve`` starts the engine before it imports anything heavy, so that both processes import and load
side by side. Whatever ends it, the last line on standard error is one sentence with the cause.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

from trioengine.errors import TrioEngineError
from trioengine.exit_codes import ExitCode, judge_end
from trioengine.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trio.abc import Clock

    from trioengine.config import ServerConfig
    from trioengine.models.source import ModelSource
    from trioengine.process.last_resort import LastResort
    from trioengine.process.spawn import SpawnedEngine

__all__ = ["main"]

EPILOG: Final = (
    "Each option can also be an environment variable (--max-queue is TRIOENGINE_MAX_QUEUE) or a "
    "line of a TOML file (--config; max-queue = 512). A flag beats a variable, a variable the "
    "file. Exit codes: 0 asked to stop, 1 unexpected error, 2 usage or configuration, 3 the "
    "engine died, 4 the engine did not start."
)
LAST_WORDS_S: Final = 0.5
FETCH_PATIENCE_S: Final = 600.0  # without any progress
INTERRUPTED: Final = 130  # as shells have it: 128 and the number of SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; return the exit code."""
    _open_standard_streams()
    if (sys.argv[1:] if arguments is None else arguments)[:1] == ["serve"]:
        _on_stop_signals(lambda number, frame: os._exit(ExitCode.ASKED))  # until there is more
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except TrioEngineError as error:
        exit_code, cause = judge_end(error)
        code = int(exit_code)
    except KeyboardInterrupt:
        code, cause = INTERRUPTED, "interrupted"
    sys.stderr.write(f"trioengine: {cause}\n")
    return code


def _open_standard_streams() -> None:
    """Open on nothing whichever of the descriptors 0, 1 and 2 we were started without.

    Else the next socket gets its number, and what is meant for people is written to a stranger.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def _on_stop_signals(handler: Callable[[int, object], object] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _parser() -> argparse.ArgumentParser:
    from trioengine.settings import add_options

    parser = argparse.ArgumentParser(
        prog="trioengine", description="An OpenAI-compatible server for language models."
    )
    parser.add_argument("--version", action="version", version=f"trioengine {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="serve a model", description="Serve a model over HTTP.", epilog=EPILOG
    )
    serve.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a checkpoint's directory, a .gguf file, a packaged model's name, or a hub id "
        "(default: smollm2-135m-instruct)",
    )
    add_options(serve)
    serve.set_defaults(command=_serve)
    _add_models(commands)
    _add_bench(commands)
    return parser


def _add_models(commands: Any) -> None:
    models = commands.add_parser("models", help="look at, fetch and find models")
    actions = models.add_subparsers(required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="list the packaged models")
    listing.set_defaults(command=_list_models)
    fetch = actions.add_parser("fetch", help="fetch and convert a model into the cache")
    fetch.add_argument("name", metavar="NAME")
    fetch.set_defaults(command=_fetch_model)
    path = actions.add_parser("path", help="print the directory of a model in the cache")
    path.add_argument("name", nargs="?", metavar="NAME", help="(default: the default model)")
    path.set_defaults(command=_print_path)


def _add_bench(commands: Any) -> None:
    from trioengine.bench.arguments import add_bench

    add_bench(commands, _bench)


# serve -------------------------------------------------------------------------------------------


def _serve(options: argparse.Namespace) -> int:
    from trioengine import log
    from trioengine.models.source import find_model
    from trioengine.process.descriptors import allow_descriptors
    from trioengine.process.last_resort import LastResort, end_process
    from trioengine.settings import load_config

    last_resort = LastResort(end_process)
    _leave_when_asked(last_resort)
    config = load_config(vars(options))
    log.configure(config.log_format, config.log_level)
    allow_descriptors(config.max_queue_sequences)
    source = find_model(config)
    spawned = _spawn_early(config, source)
    code, cause = _run(config, source, spawned, last_resort)
    # Nothing is left that a signal could hurry, and the interpreter's own end would die of one.
    _on_stop_signals(signal.SIG_IGN)
    if cause:
        log.sink().write(f"trioengine: {cause}\n".encode(errors="replace"))
    log.sink().close(LAST_WORDS_S)
    return code


def _leave_when_asked(last_resort: LastResort) -> None:
    """Answer SIGTERM and SIGINT where the supervisor does not listen: before it and after it."""

    def leave(number: int, frame: object) -> None:
        del number, frame
        os._exit(last_resort.code)  # an engine, if there is one, follows through its lifeline

    last_resort.code = ExitCode.ASKED
    _on_stop_signals(leave)


def _spawn_early(config: ServerConfig, source: ModelSource) -> SpawnedEngine | None:
    """Start the engine, if there is nothing to be prepared before."""
    from trioengine.process.spawn import spawn_engine

    if source.model_dir is None and not source.simulated:
        return None
    options = source.fit(config.engine)
    return spawn_engine(options, model_dir=source.model_dir, model_name=source.name)


def _run(
    config: ServerConfig,
    source: ModelSource,
    spawned: SpawnedEngine | None,
    last_resort: LastResort,
) -> tuple[int, str]:
    """Serve to the end; return the exit code and, where something went wrong, its cause."""
    from functools import partial

    import trio

    from trioengine.supervisor import serve

    serving = partial(serve, config, source, spawned=spawned, last_resort=last_resort)
    # Thousands of live requests make young collections dear, and little here is cyclic garbage:
    # at 2,000 streams the default thresholds cost a sixth of the server's time. What there is, some
    # 1.2 kB a request, must be collected all the same: old ones, too, every ten thousand requests.
    gc.set_threshold(20_000, 4, 4)
    try:
        trio.run(serving, clock=_clock(config))
    except BaseException as error:  # noqa: ASYNC103 - outside Trio: the end becomes a code
        code, cause = judge_end(error)
        if code is ExitCode.UNEXPECTED:
            logging.getLogger(__name__).critical("unexpected error", exc_info=error)
    else:
        code, cause = ExitCode.ASKED, ""
    last_resort.code, last_resort.cause = code, cause
    return code, cause


def _clock(config: ServerConfig) -> Clock | None:
    """Return Trio's own clock (``None``), unless a fault plan makes time jump."""
    if config.engine.fault_plan is None:
        return None
    from trioengine.process.faults import faulty_clock

    return faulty_clock(config.engine.fault_plan)


# models ------------------------------------------------------------------------------------------


def _list_models(options: argparse.Namespace) -> int:
    from trioengine.models.command import list_models

    del options
    for line in list_models():
        print(line)
    return ExitCode.ASKED


def _fetch_model(options: argparse.Namespace) -> int:
    from functools import partial

    import trio

    from trioengine import log
    from trioengine.models.resolve import resolve_model
    from trioengine.process.model_preparation import prepare_in_child
    from trioengine.progress_display import Narrator, terminal_drawer

    resolve_model(options.name)  # what is not there needs no child to say so
    log.configure("text", "info")
    sink = log.sink()
    narrator = Narrator(terminal_drawer(sink.show_status))
    try:
        path = trio.run(
            partial(prepare_in_child, patience_s=FETCH_PATIENCE_S),
            *(options.name, narrator.tell, sink.write),
        )
    finally:
        narrator.end()
        sink.close(LAST_WORDS_S)
    print(path)
    return ExitCode.ASKED


def _print_path(options: argparse.Namespace) -> int:
    from trioengine.models.command import model_path

    print(model_path(options.name) if options.name else model_path())
    return ExitCode.ASKED


# bench -------------------------------------------------------------------------------------------


def _bench(options: argparse.Namespace) -> int:
    from trioengine.bench.command import run_bench

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what it has started ends with it
    report = run_bench(options, print)
    if report.failures:
        sys.stderr.write(f"trioengine: {report.failures}\n")
        return ExitCode.UNEXPECTED
    return ExitCode.ASKED
