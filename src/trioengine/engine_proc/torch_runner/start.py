"""From options to a runner that has computed its first step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from trioengine.engine_proc.kv_sizing import CPU_SHARE, CUDA_SHARE, KVCacheRequest, num_kv_blocks
from trioengine.engine_proc.machine import available_memory_bytes, usable_cpus
from trioengine.engine_proc.torch_runner.model_loader import load_checkpoint
from trioengine.engine_proc.torch_runner.model_runner import TorchModelRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.config import EngineOptions
    from trioengine.engine_proc.torch_runner.model_loader import Checkpoint

__all__ = ["start"]

MAX_NUM_SEQS: Final = {"cpu": 64, "cuda": 256}
"""Defaults of ``--max-num-seqs``, which bound a cache whose size the user does not name."""


def start(
    model_dir: Path, options: EngineOptions, progress: Callable[[str, float], None]
) -> TorchModelRunner:
    """Load, size and allocate; see ``load``."""
    torch.set_num_threads(options.threads or usable_cpus())
    progress("loading weights", 0.3)
    checkpoint = load_checkpoint(model_dir, options)
    progress("allocating the KV cache", 0.9)
    runner = TorchModelRunner(
        checkpoint,
        block_size=options.block_size_tokens,
        num_blocks=num_kv_blocks(_cache_request(checkpoint, options)),
        profile_dir=None if options.profile_dir is None else Path(options.profile_dir),
    )
    progress("ready", 1.0)
    return runner


def _cache_request(checkpoint: Checkpoint, options: EngineOptions) -> KVCacheRequest:
    on_cuda = checkpoint.device.type == "cuda"
    return KVCacheRequest(
        bytes_per_token=sum(layer.bytes_per_token for layer in checkpoint.layers),
        block_size=options.block_size_tokens,
        max_model_len=checkpoint.max_model_len,
        max_num_seqs=options.max_num_seqs or MAX_NUM_SEQS[checkpoint.device.type],
        free_bytes=torch.cuda.mem_get_info()[0] if on_cuda else available_memory_bytes(),
        share=options.kv_cache_share or (CUDA_SHARE if on_cuda else CPU_SHARE),
        budget_gib=options.kv_cache_memory_gib,
    )
