"""Where a ``ServerConfig`` comes from: flags > ``TRIOENGINE_*`` environment > TOML > defaults.

One table (``OPTIONS``) says everything about an option, so that the three sources and ``--help``
cannot disagree. An option ``--max-queue`` is ``TRIOENGINE_MAX_QUEUE`` in the environment and
``max-queue`` (or ``max_queue``) in the file; where it repeats, the environment separates by commas
and the file has a list.
"""

from __future__ import annotations

import math
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from trioengine.config import EngineOptions, ServerConfig
from trioengine.errors import ConfigError
from trioengine.option_values import READERS, Kind, is_blank
from trioengine.sampling_params import MAX_SEED, MIN_SEED

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["OPTIONS", "Option", "add_flags", "add_options", "load_config"]

MAX_THREADS: Final = 1024  # all that are asked for are started: a slip takes the machine down
BRIEF_S: Final = 0.001  # the least where 0 would mean never: no request, no step, no start in time


@dataclass(frozen=True)
class Option:
    """One option, in all its sources.

    Attributes:
        name: As in the file; ``--name`` is the flag.
        field: Field of ``ServerConfig``, or ``engine.`` and a field of ``EngineOptions``.
        help: One clause; default and unit are added.
        kind: How its text is read.
        unit: Metavariable, upper case.
        choices: All that a text may be.
        low: Smallest number.
        high: Largest number.
    """

    name: str
    field: str
    help: str
    kind: Kind = "text"
    unit: str = ""
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = math.inf

    @property
    def flag(self) -> str:
        """The long flag."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "TRIOENGINE_" + self.name.upper().replace("-", "_")

    @property
    def default(self) -> object:
        """What it is where no source names it."""
        owner, _, field = self.field.rpartition(".")
        return getattr(EngineOptions() if owner else ServerConfig(), field)

    def read(self, raw: object, source: str) -> object:
        """Return the value that ``raw`` (text, or a TOML value) stands for.

        Raises:
            ConfigError: It stands for none; the message names ``source``.
        """
        try:
            if is_blank(raw) and self.default != "":
                raise ValueError("must not be empty")
            value = READERS[self.kind](raw)
        except (ValueError, TypeError, OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{source}: {error}") from error
        if self.choices and value not in self.choices:
            raise ConfigError(f"{source}: must be one of {', '.join(self.choices)}, got {raw!r}")
        if self.kind in {"integer", "number"} and not self._in_range(value):
            raise ConfigError(f"{source}: must be {self._range()}, got {raw}")
        return value

    def _in_range(self, value: Any) -> bool:
        return bool(self.low <= value <= self.high) and math.isfinite(value)

    def _range(self) -> str:
        return f"in [{self.low:g}, {self.high:g}]" if self.high < math.inf else f">= {self.low:g}"


def _count(name: str, field: str, help_: str, unit: str = "N", low: int = 1) -> Option:
    return Option(name, field, help_, "integer", unit, low=low)


def _time(name: str, field: str, help_: str, low: float = 0) -> Option:
    return Option(name, field, help_, "number", "SECONDS", low=low)


OPTIONS: Final = (
    Option("host", "host", "address to listen on"),
    Option("port", "port", "port to listen on; 0 picks a free one", "integer", "PORT", high=65535),
    Option("uds", "uds", "listen on this Unix socket instead of a port", unit="PATH"),
    Option(
        "served-model-name",
        "served_model_names",
        "name of the model on the API; may be given several times",
        "list",
        "NAME",
    ),
    Option(
        "api-key",
        "api_keys",
        "key that clients must send; may be given several times (prefer the environment: "
        "other users of this machine can read a command line)",
        "list",
        "KEY",
    ),
    Option(
        "api-key-file",
        "api_key_weights",
        "file of keys, one a line, each with a weight if its share of the queue is not to be 1",
        "keys",
        "FILE",
    ),
    Option(
        "chat-template",
        "chat_template",
        "chat template, or a file that holds it",
        "template",
        "TEMPLATE",
    ),
    Option(
        "trust-request-chat-template",
        "trust_request_chat_template",
        "let requests bring their own chat template, which can keep the server busy",
        "switch",
    ),
    Option(
        "tool-call-parser",
        "tool_call_parser",
        "how the model spells tool calls; by default what its chat template teaches",
        choices=("hermes", "llama3_json", "mistral", "json"),
    ),
    Option("root-path", "root_path", "path prefix that a proxy in front strips", unit="PATH"),
    Option(
        "allowed-origins",
        "allowed_origins",
        "origin that browsers may call from; may be given several times",
        "list",
        "ORIGIN",
    ),
    Option("ssl-certfile", "ssl_certfile", "certificate chain, PEM; serves HTTPS", unit="FILE"),
    Option("ssl-keyfile", "ssl_keyfile", "key of the certificate, PEM", unit="FILE"),
    Option(
        "engine",
        "engine.backend",
        "what computes: auto is native where it fits, else torch; sim makes tokens up",
        choices=("auto", "native", "torch", "sim"),
    ),
    Option("engine-args", "engine.engine_args", "more options of that engine", "json", "JSON"),
    Option("device", "engine.device", "where it computes", choices=("auto", "cpu", "cuda")),
    Option(
        "dtype",
        "engine.dtype",
        "type of weights and activations",
        choices=("auto", "float32", "bfloat16", "float16"),
    ),
    Option(
        "quantization",
        "engine.quantization",
        "weights of the native engine: int8 and q4 round them while loading, gguf takes those of a "
        "GGUF file as they are, none is bfloat16",
        choices=("none", "int8", "q4", "gguf"),
    ),
    Option(
        "threads",
        "engine.threads",
        "threads that compute; by default the engine decides",
        "integer",
        "N",
        low=1,
        high=MAX_THREADS,
    ),
    _count(
        "max-model-len",
        "engine.max_model_len_tokens",
        "longest prompt plus output; by default the model's own limit",
        "TOKENS",
    ),
    _count(
        "max-num-seqs",
        "engine.max_num_seqs",
        "sequences that run at once; by default 64 on CPU and 256 on CUDA",
    ),
    _count(
        "max-num-batched-tokens", "engine.max_num_batched_tokens", "most tokens a step", "TOKENS"
    ),
    _count(
        "num-scheduler-steps",
        "engine.num_scheduler_steps",
        "tokens that each running sequence decodes between two looks at new requests and aborts",
    ),
    _count("block-size", "engine.block_size_tokens", "tokens of one KV-cache block", "TOKENS"),
    Option(
        "kv-cache-memory",
        "engine.kv_cache_memory_gib",
        "memory for the KV cache; by default a share of what is free",
        "number",
        "GIB",
    ),
    Option(
        "kv-cache-share",
        "engine.kv_cache_share",
        "share of the memory that is free once the weights are loaded, for the KV cache; by "
        "default 0.25 on CPU and 0.8 on CUDA",
        "number",
        "FRACTION",
        low=0.001,
        high=1,
    ),
    Option(
        "enable-prefix-caching",
        "engine.enable_prefix_caching",
        "reuse the KV cache of prompts that begin alike",
        "switch",
    ),
    Option(
        "seed",
        "engine.seed",
        "seed of requests that give none",
        "integer",
        "N",
        low=MIN_SEED,
        high=MAX_SEED,
    ),
    _count("max-queue", "max_queue_sequences", "sequences admitted at once, waiting and running"),
    _time("max-queue-time", "max_queue_time_s", "longest wait for a place in the engine"),
    _time(
        "request-timeout",
        "request_timeout_s",
        "longest life of a request; none by default",
        BRIEF_S,
    ),
    _count("max-body-bytes", "max_body_bytes", "largest request body", "BYTES"),
    _time("drain-timeout", "drain_timeout_s", "time that running requests get when asked to stop"),
    _time("death-grace", "death_grace_s", "time to tell clients of a dead engine before leaving"),
    _time("start-timeout", "start_timeout_s", "longest start of the engine", BRIEF_S),
    _time(
        "stall-timeout",
        "stall_timeout_s",
        "longest step before the engine counts as stalled",
        BRIEF_S,
    ),
    Option(
        "beat-timeout",
        "beat_timeout_s",
        "longest silence of the engine process, which beats once a second, before it counts as "
        "stalled",
        "number",
        "SECONDS",
        low=1.5,
    ),
    _time("slow-client-timeout", "slow_client_timeout_s", "patience with a client that reads not"),
    Option("log-format", "log_format", "shape of log lines", choices=("text", "json")),
    Option(
        "log-level",
        "log_level",
        "least level logged",
        choices=("debug", "info", "warning", "error"),
    ),
    Option("enable-admin", "enable_admin", "serve the administrative endpoints", "switch"),
    Option("profile-dir", "engine.profile_dir", "where profiles are written", unit="DIR"),
)

_MODEL: Final = Option("model", "model", "what to serve", unit="MODEL")  # has no flag: an argument


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` every option's flag. Absent flags stay ``None``: other sources fill in."""
    add_flags(parser, OPTIONS)
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these options")


def add_flags(parser: argparse._ActionsContainer, options: Iterable[Option]) -> None:
    """Give ``parser``, or a group of one, the flags of these options."""
    import argparse

    for option in options:
        help_ = option.help + ("" if _unsaid(option.default) else f" (default: {option.default})")
        help_ = help_.replace("%", "%%")
        if option.kind == "switch":
            action = argparse.BooleanOptionalAction if option.default else "store_true"
            parser.add_argument(option.flag, action=action, default=None, help=help_)
        elif option.kind == "list":
            parser.add_argument(option.flag, action="append", metavar=option.unit, help=help_)
        else:
            metavar = option.unit or (
                "{" + ",".join(option.choices) + "}" if option.choices else None
            )
            parser.add_argument(option.flag, metavar=metavar, help=help_)


def load_config(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> ServerConfig:
    """Return the configuration that flags, environment and file add up to.

    Args:
        flags: What ``argparse`` found: ``model``, ``config`` and the options' destinations.
        environ: ``os.environ`` unless given.

    Raises:
        ConfigError: A value, a key or the file is unusable; one sentence that names its source.
    """
    environ = os.environ if environ is None else environ
    file = _read_file(_config_path(flags, environ))
    engine: dict[str, object] = {}
    server: dict[str, object] = {}
    for option in OPTIONS:
        for raw, source in _sources(option, flags, environ, file):
            owner, _, field = option.field.rpartition(".")
            (engine if owner else server)[field] = option.read(raw, source)
            break
    for raw, source in _sources(_MODEL, flags, environ, file):
        server["model"] = _MODEL.read(raw, source)
        break
    config = msgspec.convert({**server, "engine": engine}, ServerConfig)
    if (config.ssl_certfile is None) != (config.ssl_keyfile is None):
        raise ConfigError("--ssl-certfile and --ssl-keyfile need each other")
    if config.engine.kv_cache_memory_gib is not None and config.engine.kv_cache_share is not None:
        raise ConfigError("--kv-cache-memory and --kv-cache-share exclude each other")
    _check_quantization(config.engine)
    return config


def _check_quantization(engine: EngineOptions) -> None:
    """Refuse at once what no engine that these options could mean would do."""
    if engine.quantization == "none":
        return
    if engine.backend not in {"auto", "native"}:
        other = f"--engine {engine.backend}"
    elif engine.device == "cuda":
        other = "--device cuda"
    else:
        return
    raise ConfigError(
        f"--quantization {engine.quantization} is the native engine's, on the CPU: not with {other}"
    )


def _sources(
    option: Option, flags: Mapping[str, Any], environ: Mapping[str, str], file: Mapping[str, Any]
) -> Iterator[tuple[object, str]]:
    flag = flags.get(option.name.replace("-", "_"))
    if flag is not None:
        yield flag, "MODEL" if option is _MODEL else option.flag
    if not is_blank(environ.get(option.variable, "")):  # set to nothing is how many say unset
        yield environ[option.variable], option.variable
    if option.name in file:
        yield file[option.name], f"{option.name} in the configuration file"


def _config_path(flags: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    flag = flags.get("config")
    if is_blank(flag):
        raise ConfigError("--config: must not be empty")
    return flag or environ.get("TRIOENGINE_CONFIG") or None


def _read_file(path: str | None) -> dict[str, Any]:
    """Return the options of a TOML file, their names with dashes; nothing without a file."""
    if path is None:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = {key.replace("_", "-"): value for key, value in tomllib.loads(text).items()}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    known = {option.name for option in OPTIONS} | {"model"}
    if unknown := sorted(found.keys() - known):
        raise ConfigError(f"--config {path}: unknown option {unknown[0]!r}")
    return found


def _unsaid(default: object) -> bool:
    return default is None or default is False or default in ("", (), {})
