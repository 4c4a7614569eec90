"""From a checkpoint directory and options to a runner with weights packed and cache allocated."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Final

from trioengine.engine_proc.kv_sizing import (
    CPU_SHARE,
    KVCacheRequest,
    num_kv_blocks,
    require_memory,
)
from trioengine.engine_proc.machine import available_memory_bytes, usable_cpus
from trioengine.engine_proc.native_runner import _native
from trioengine.engine_proc.native_runner.assemble import (
    TensorSource,
    build_model,
    padded_head_dim,
)
from trioengine.engine_proc.native_runner.config import read_config
from trioengine.engine_proc.native_runner.gguf_weights import GgufCheckpoint
from trioengine.engine_proc.native_runner.model_runner import NativeModelRunner
from trioengine.engine_proc.native_runner.weights import Checkpoint
from trioengine.errors import ConfigError
from trioengine.models.checkpoint_files import eos_token_ids
from trioengine.models.safetensors_header import count_weights
from trioengine.protocol import ModelInfo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trioengine.config import EngineOptions
    from trioengine.engine_proc.native_runner.config import ModelConfig

__all__ = ["start"]

log = logging.getLogger(__name__)

MAX_NUM_SEQS: Final = 64
"""Default of ``--max-num-seqs``, which bounds a cache whose size the user does not name."""

BLOCK_MULTIPLE: Final = 16
"""Tokens of a tile of the KV cache."""

SMALL_MODEL_BYTES: Final = 16 * 2**20
"""Up to here one thread computes by default: a step is so short that a second thread, whose core
the server may have at the moment, is waited for longer than it helps."""

GGUF_NAME: Final = "model.gguf"
"""Beside a checkpoint that was converted from it."""

WEIGHT_BYTES: Final = {"none": 2.0, "int8": 1.0, "q4": 0.5}
"""What a weight takes at least, packed. Scales, and an embedding that stays bfloat16, come on top.
"""


def start(
    model_dir: Path, options: EngineOptions, progress: Callable[[str, float], None]
) -> NativeModelRunner:
    """Load, pack and allocate; see ``load``."""
    settings = _Settings.parse(options, model_dir)
    config = read_config(model_dir)
    max_model_len = _max_model_len(config, options.max_model_len_tokens)
    isa = _resolve_isa(settings.isa)
    source, quantization = _open_weights(model_dir, config, settings.quantization)
    settings = dataclasses.replace(settings, quantization=quantization)
    require_memory("the weights", _packed_bytes(model_dir, quantization), available_memory_bytes())
    builder = _pack(source, config, max_model_len, settings, progress)
    num_blocks = _num_blocks(config, max_model_len, options)
    runner = _native.Runner(
        builder,
        isa=isa,
        threads=settings.threads,
        max_tokens=options.max_num_batched_tokens,
        num_blocks=num_blocks,
        block_size=options.block_size_tokens,
    )
    progress("ready", 1.0)
    return NativeModelRunner(
        runner,
        ModelInfo(
            name=model_dir.name,
            runner=f"native cpu {settings.weights} ({isa}, {settings.threads} threads)",
            simulated=False,
            max_model_len=max_model_len,
            vocab_size=config.vocab_size,
            eos_token_ids=eos_token_ids(model_dir),
        ),
        block_size=options.block_size_tokens,
        num_blocks=num_blocks,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Settings:
    """What the options mean for this runner."""

    isa: str
    threads: int
    quantization: str

    @property
    def weights(self) -> str:
        """What the weights are, for people."""
        return "bfloat16" if self.quantization == "none" else self.quantization

    @classmethod
    def parse(cls, options: EngineOptions, model_dir: Path) -> _Settings:
        """Check everything that needs no weights.

        Raises:
            ConfigError: An option that this runner does not have.
        """
        args = dict(options.engine_args)
        isa = args.pop("isa", "")
        if not isinstance(isa, str):
            raise ConfigError(f"engine argument isa must be a string, got {isa!r}")
        if args:
            raise ConfigError(f"the native engine has no argument {sorted(args)[0]!r}")
        if options.device == "cuda":
            raise ConfigError("the native engine computes on the CPU, not on CUDA")
        if options.dtype not in {"auto", "bfloat16"}:
            raise ConfigError(f"the native engine has no weights in {options.dtype}")
        if options.block_size_tokens % BLOCK_MULTIPLE:
            raise ConfigError(
                f"--block-size {options.block_size_tokens}: the native engine's blocks hold a "
                f"multiple of {BLOCK_MULTIPLE} tokens"
            )
        return cls(isa, options.threads or _default_threads(model_dir), options.quantization)


def _default_threads(model_dir: Path) -> int:
    _, num_bytes = count_weights(model_dir)
    return 1 if 0 < num_bytes <= SMALL_MODEL_BYTES else usable_cpus()


def _resolve_isa(wanted: str) -> str:
    usable = _native.usable_isas()
    if not wanted:
        return usable[0]
    if wanted not in usable:
        raise ConfigError(f"isa {wanted!r} cannot be used here; usable: {', '.join(usable)}")
    return wanted


def _max_model_len(config: ModelConfig, wanted: int | None) -> int:
    limit = config.max_positions
    if wanted is not None and wanted > limit:
        raise ConfigError(f"--max-model-len {wanted} exceeds the model's context of {limit} tokens")
    return wanted or limit


def _pack(
    source: TensorSource,
    config: ModelConfig,
    max_model_len: int,
    settings: _Settings,
    progress: Callable[[str, float], None],
) -> _native.ModelBuilder:
    progress("loading weights", 0.0)
    return build_model(
        config,
        source,
        quantization="none" if settings.quantization == "gguf" else settings.quantization,
        max_model_len=max_model_len,
        threads=settings.threads,
        progress=lambda fraction: progress("loading weights", 0.95 * fraction),
    )


def _open_weights(
    model_dir: Path, config: ModelConfig, quantization: str
) -> tuple[TensorSource, str]:
    """Return where the weights come from, and what ``auto`` turned out to be."""
    path = model_dir / GGUF_NAME
    if quantization == "auto":
        quantization = "gguf" if path.exists() else "none"
        try:
            return _open_weights(model_dir, config, quantization)
        except ConfigError as error:
            if quantization == "none":
                raise
            log.warning("what the GGUF file was converted to is computed instead: %s", error)
            quantization = "none"
    if quantization != "gguf":
        return Checkpoint(model_dir), quantization
    if not path.exists():
        raise ConfigError(f"--quantization gguf needs a model that was a GGUF file: no {path}")
    heads = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads}
    return GgufCheckpoint(path, **heads), quantization


def _packed_bytes(model_dir: Path, quantization: str) -> int:
    """Return what the packed weights take at least."""
    if quantization == "gguf":
        return (model_dir / GGUF_NAME).stat().st_size
    num_weights, _ = count_weights(model_dir)
    return int(num_weights * WEIGHT_BYTES[quantization])


def _num_blocks(config: ModelConfig, max_model_len: int, options: EngineOptions) -> int:
    block_size = options.block_size_tokens
    block_bytes = _native.block_bytes(
        len(config.layers), config.num_kv_heads, padded_head_dim(config.head_dim), block_size
    )
    request = KVCacheRequest(
        bytes_per_token=block_bytes // block_size,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs or MAX_NUM_SEQS,
        free_bytes=available_memory_bytes(),
        share=options.kv_cache_share or CPU_SHARE,
        budget_gib=options.kv_cache_memory_gib,
    )
    return num_kv_blocks(request)
