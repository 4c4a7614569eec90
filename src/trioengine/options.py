"""Every option there is, once: its names, its help, and how each source's text is read.

One table (``OPTIONS``) says everything about an option, so that flags, environment, file and
``--help`` cannot disagree. An option ``--max-queue`` is ``TRIOENGINE_MAX_QUEUE`` in the environment
and ``max-queue`` (or ``max_queue``) in the file; where it repeats, the environment separates by
commas and the file has a list.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from trioengine.config import EngineOptions, ServerConfig
from trioengine.errors import ConfigError
from trioengine.option_values import READERS, Kind, is_blank
from trioengine.sampling_params import MAX_SEED, MIN_SEED

__all__ = ["MODEL", "OPTIONS", "Option"]

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
        hidden: Not in ``--help``.
    """

    name: str
    field: str
    help: str
    kind: Kind = "text"
    unit: str = ""
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = math.inf
    hidden: bool = False

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
        "GGUF file as they are, none is bfloat16, auto is gguf for such a file, else none",
        choices=("auto", "none", "int8", "q4", "gguf"),
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
    _count(
        "engine-restarts",
        "engine_restarts",
        "times that an engine which dies is started again, within any 10 minutes of service; the "
        "next death ends the server",
        low=0,
    ),
    Option(
        "replay",
        "replay",
        "when an engine that died is started again, send it the requests of which nobody has seen "
        "an answer yet, each at most once",
        "switch",
    ),
    _time(
        "stall-timeout",
        "stall_timeout_s",
        "longest step before the engine counts as stalled",
        BRIEF_S,
    ),
    Option(
        "on-stall",
        "on_stall",
        "what to do about a stalled engine: report it, kill it and restart (as --engine-restarts "
        "allows), or kill it and exit",
        choices=("report", "restart", "exit"),
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
    Option(
        "wake-on-request",
        "wake_on_request",
        "let a request wake an engine that was put to sleep, and wait for it",
        "switch",
    ),
    Option("profile-dir", "engine.profile_dir", "where profiles are written", unit="DIR"),
    Option(
        "fault-plan",
        "engine.fault_plan",
        "what goes wrong on purpose",
        "faults",
        "FILE",
        hidden=True,
    ),
)

MODEL: Final = Option("model", "model", "what to serve", unit="MODEL")  # has no flag: an argument
