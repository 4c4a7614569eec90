"""Frozen configuration of the server and of the engine. Units are in the names.

``ServerConfig`` is what the command line, a TOML file and the environment end up as.
``EngineConfig`` is what one engine process is told, as one line of JSON on its standard input
(never in ``argv``, which every user of the machine can read).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from trioengine.fault_plan import FaultPlan

__all__ = ["EngineConfig", "EngineOptions", "ServerConfig"]


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user may choose about the engine; the same whatever incarnation runs.

    ``None`` means that the engine decides when it knows device and model; of ``fault_plan``, that
    nothing goes wrong on purpose.

    Attributes:
        quantization: Of the native runner's weights: ``none`` (bfloat16), ``int8`` and ``q4`` round
            them while loading, ``gguf`` takes the blocks of the GGUF file that the checkpoint was
            converted from as they are, ``auto`` does so where the user named such a file. Only the
            native runner has any but ``none``.
    """

    backend: Literal["auto", "native", "torch", "sim"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["auto", "none", "int8", "q4", "gguf"] = "auto"
    max_model_len_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 2048
    num_scheduler_steps: int = 1
    block_size_tokens: int = 16
    kv_cache_memory_gib: float | None = None
    kv_cache_share: float | None = None
    enable_prefix_caching: bool = True
    seed: int = 0
    threads: int | None = None
    engine_args: dict[str, str | int | float | bool] = {}
    profile_dir: str | None = None
    fault_plan: FaultPlan | None = None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One incarnation of the engine process.

    Attributes:
        options: The user's choices.
        model_dir: Directory of a converted checkpoint; ``None`` for the simulated engine.
        model_name: Name for people.
        commands_address: zmq address the engine's PULL connects to.
        outputs_address: zmq address the engine's PUSH connects to.
        token: Secret of this incarnation, to be said in ``Hello``.
        heartbeat_path: File of the heartbeat page.
        runtime_dir: The 0700 directory with sockets and page. The lifeline removes it when the
            parent is gone.
    """

    options: EngineOptions
    model_dir: str | None
    model_name: str
    commands_address: str
    outputs_address: str
    token: str
    heartbeat_path: str
    runtime_dir: str


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything ``trioengine serve`` can be told. Defaults are those of ``--help``."""

    model: str = "smollm2-135m-instruct"
    engine: EngineOptions = EngineOptions()
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    api_key_weights: dict[str, float] = {}
    chat_template: str | None = None
    tool_call_parser: Literal["hermes", "llama3_json", "mistral", "json"] | None = None
    trust_request_chat_template: bool = False
    root_path: str = ""
    allowed_origins: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    max_queue_sequences: int = 1024
    max_queue_time_s: float = 120.0
    request_timeout_s: float | None = None
    max_body_bytes: int = 16 * 2**20
    drain_timeout_s: float = 30.0
    death_grace_s: float = 2.0
    start_timeout_s: float = 600.0
    engine_restarts: int = 0
    replay: bool = False
    stall_timeout_s: float = 60.0
    on_stall: Literal["report", "restart", "exit"] = "report"
    beat_timeout_s: float = 5.0
    slow_client_timeout_s: float = 30.0
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    enable_admin: bool = False
    wake_on_request: bool = False
