"""From a checkpoint directory and options to a network ready to run, or one line why not.

transformers' own modelling code is used as it is. Only safetensors are read (mapped, not copied
through pickle), nothing is fetched, and no code that a checkpoint brings along is run.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import torch

from trioengine.engine_proc.kv_sizing import require_memory
from trioengine.engine_proc.machine import available_memory_bytes, fast_bfloat16
from trioengine.engine_proc.torch_runner.attention import (
    PAGED,
    UnsupportedAttentionError,
    register,
)
from trioengine.engine_proc.torch_runner.probe import probe_layers
from trioengine.engine_proc.torch_runner.rope import pin_rotary
from trioengine.errors import ConfigError, EngineStartError
from trioengine.models.safetensors_header import count_weights

if TYPE_CHECKING:
    from pathlib import Path

    from trioengine.config import EngineOptions
    from trioengine.engine_proc.torch_runner.paged_cache import LayerShape

__all__ = ["Checkpoint", "load_checkpoint", "resolve_device", "resolve_dtype"]


@dataclasses.dataclass(slots=True)
class Checkpoint:
    """A network on its device, and what the runner must know about it.

    Attributes:
        network: ``…ForCausalLM`` of transformers, in evaluation mode.
        name: Of the directory.
        device: Where the weights are.
        dtype: Of the weights.
        layers: What each attention layer stores, in order.
        max_model_len: Prompt plus output tokens of one sequence.
        vocab_size: Token ids are below this.
        eos_token_ids: Ids that end a sequence.
    """

    network: torch.nn.Module
    name: str
    device: torch.device
    dtype: torch.dtype
    layers: list[LayerShape]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def load_checkpoint(model_dir: Path, options: EngineOptions) -> Checkpoint:
    """Load a decoder of any architecture that routes its attention through transformers' registry.

    Raises:
        ConfigError: An option does not fit this machine or this model.
        EngineStartError: The directory does not hold a checkpoint that loads and runs.
    """
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    config = _read_config(model_dir)
    text_config = config.get_text_config(decoder=True)
    max_model_len = _resolve_max_model_len(text_config, options.max_model_len_tokens)
    _require_memory(model_dir, dtype, device)
    network = _read_network(model_dir, config, dtype, device)
    pin_rotary(network, max_model_len)
    try:
        layers = probe_layers(network, text_config, device)
    except UnsupportedAttentionError as error:
        kind = type(network).__name__
        raise EngineStartError(f"{kind} does not run on the torch engine: {error}") from error
    return Checkpoint(
        network=network,
        name=model_dir.name,
        device=device,
        dtype=dtype,
        layers=layers,
        max_model_len=max_model_len,
        vocab_size=text_config.vocab_size,
        eos_token_ids=_eos_token_ids(network, text_config),
    )


def resolve_device(device: str) -> torch.device:
    """Return the device to run on; ``auto`` takes CUDA where torch sees it.

    Raises:
        ConfigError: CUDA is asked for and not there.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: torch sees no CUDA device on this machine")
    return torch.device("cuda" if has_cuda and device != "cpu" else "cpu")


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype of weights and cache.

    ``auto`` asks the hardware and not the checkpoint, whose configuration often names the dtype it
    was trained in: bfloat16 where that is fast, else float16 on CUDA and float32 on a CPU.
    """
    if dtype != "auto":
        named: torch.dtype = getattr(torch, dtype)
        return named
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if fast_bfloat16() else torch.float32


def _read_config(model_dir: Path) -> Any:
    from transformers import AutoConfig

    if not (model_dir / "config.json").is_file():
        raise EngineStartError(f"{model_dir} holds no checkpoint: config.json is missing")
    try:
        return AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a damaged file makes transformers raise
        raise _does_not_load(model_dir, error) from error


def _require_memory(model_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse weights that do not fit. They come by way of the host's memory in any case."""
    try:
        num_weights, _ = count_weights(model_dir)
    except ConfigError as error:
        raise _does_not_load(model_dir, error) from error
    needed = num_weights * dtype.itemsize
    require_memory("the weights", needed, available_memory_bytes())
    if device.type == "cuda":
        require_memory("the weights", needed, torch.cuda.mem_get_info()[0])


def _read_network(
    model_dir: Path, config: Any, dtype: torch.dtype, device: torch.device
) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    register()
    logging.disable_progress_bar()  # standard error is the server's
    try:
        network, found = AutoModelForCausalLM.from_pretrained(
            model_dir,
            config=config,
            dtype=dtype,
            attn_implementation=PAGED,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        network.to(device)
    except KeyError as error:
        if error.args == (PAGED,):  # looked up in a table of its own
            raise EngineStartError(
                f"{config.architectures[0] if config.architectures else config.model_type} does "
                "not run on the torch engine: its attention is not in transformers' registry"
            ) from error
        raise _does_not_load(model_dir, error) from error
    except Exception as error:  # whatever a damaged file makes transformers raise
        raise _does_not_load(model_dir, error) from error
    _refuse_unfit(model_dir, network, found)
    module: torch.nn.Module = network.eval().requires_grad_(False)
    return module


def _refuse_unfit(model_dir: Path, network: torch.nn.Module, found: dict[str, Any]) -> None:
    """Refuse gaps, which transformers fills with random numbers, and heads that run for all."""
    missing = sorted(found["missing_keys"])
    if missing:
        raise EngineStartError(
            f"{model_dir} does not load: {len(missing)} weights are missing, {missing[0]} first"
        )
    if "logits_to_keep" not in inspect.signature(network.forward).parameters:
        raise EngineStartError(
            f"{type(network).__name__} does not run on the torch engine: it cannot compute the "
            "logits of chosen tokens only"
        )


def _does_not_load(model_dir: Path, error: Exception) -> EngineStartError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return EngineStartError(f"{model_dir} does not load: {lines[0]}")


def _resolve_max_model_len(config: Any, wanted: int | None) -> int:
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if limit is None and wanted is None:
        raise ConfigError("the model names no context length: set --max-model-len")
    if limit is not None and wanted is not None and wanted > limit:
        raise ConfigError(f"--max-model-len {wanted} exceeds the model's context of {limit} tokens")
    return wanted or limit or 0


def _eos_token_ids(network: Any, config: Any) -> tuple[int, ...]:
    """Return the ids of the generation configuration, where chat models name their end of turn."""
    generation = getattr(network, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
