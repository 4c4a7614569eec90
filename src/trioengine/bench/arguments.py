"""The arguments of ``trioengine bench``. Imported with the command line, so nothing heavy here."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

from trioengine.options import OPTIONS
from trioengine.settings import add_flags

if TYPE_CHECKING:
    from collections.abc import Callable

    Command = Callable[[argparse.Namespace], int]

__all__ = ["ENGINE_OPTIONS", "add_bench"]

ENGINE_OPTIONS: Final = tuple(
    option
    for option in OPTIONS
    if (option.field.startswith("engine.") and option.name != "profile-dir")
    or option.name == "start-timeout"
)
"""Those of ``trioengine serve`` that are measured here: the engine's."""

WORKLOAD_NAMES: Final = ("W1", "W2", "W3", "W4", "FE")
DEFAULT_WORKLOADS: Final = ("W1", "W2", "W3", "W4")
SILENCE_S: Final = 600.0


def add_bench(commands: Any, command: Command) -> None:
    """Add ``bench`` and its three kinds to the parser; each runs ``command``."""
    bench = commands.add_parser("bench", help="measure a server, the library, or one stream")
    kinds = bench.add_subparsers(required=True, metavar="KIND", dest="kind")
    serve = kinds.add_parser(
        "serve",
        help="many streams through HTTP",
        description="Drive an OpenAI server: any at --url, or one of our own, started for it.",
    )
    offline = kinds.add_parser(
        "offline",
        help="the same through the library",
        description="Run the workloads through trioengine.LLM, with no HTTP between.",
    )
    latency = kinds.add_parser(
        "latency",
        help="one stream, its percentiles",
        description="Send one request at a time through HTTP; tell time to first token and gaps.",
    )
    for parser in (serve, offline):
        parser.add_argument(
            "--workloads",
            nargs="+",
            choices=WORKLOAD_NAMES,
            default=DEFAULT_WORKLOADS,
            metavar="NAME",
            help=f"any of {', '.join(WORKLOAD_NAMES)} (default: {' '.join(DEFAULT_WORKLOADS)})",
        )
        parser.add_argument(
            "--requests", type=_count, metavar="N", help="instead of the workload's"
        )
    _add_latency(latency)
    for parser in (serve, latency):
        _add_server(parser)
    for parser in (serve, offline, latency):
        _add_common(parser)
        parser.set_defaults(command=command)


def _add_latency(parser: argparse.ArgumentParser) -> None:
    for name, default in (("prompt-tokens", 64), ("output-tokens", 128), ("requests", 10)):
        parser.add_argument(
            f"--{name}", type=_count, default=default, metavar="N", help=f"(default: {default})"
        )


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="a server that runs, such as http://127.0.0.1:8000")
    parser.add_argument(
        "--api-key", metavar="KEY", help="key for --url (or TRIOENGINE_API_KEY, which nobody sees)"
    )
    parser.add_argument(
        "--silence",
        type=_seconds,
        default=SILENCE_S,
        metavar="SECONDS",
        help=f"longest silence before what runs counts as failed (default: {SILENCE_S:g})",
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        help="what to serve; with --url, the model that runs there, which sizes prompts and floor "
        "(default: smollm2-135m-instruct)",
    )
    parser.add_argument(
        "--repeat", type=_count, default=3, metavar="N", help="runs of each workload (default: 3)"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything here too")
    parser.add_argument(
        "--no-floor", action="store_true", help="do not measure the machine beforehand"
    )
    add_flags(parser.add_argument_group("options of the engine"), ENGINE_OPTIONS)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text}")
    return value
