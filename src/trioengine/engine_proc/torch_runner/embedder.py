"""Embeddings on torch: one forward pass over a padded batch, pooled as the checkpoint says.

Sequences are padded on the right to the longest of their batch and masked, so an embedding depends
on its batch only by rounding: in float32 by less than 1e-5 of its length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from trioengine.engine_proc.machine import usable_cpus
from trioengine.engine_proc.torch_runner.model_loader import resolve_device
from trioengine.engine_proc.torch_runner.shortage import memory_errors
from trioengine.errors import ConfigError, EngineStartError
from trioengine.protocol import EmbeddingInfo, ModelInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from trioengine.config import EngineOptions
    from trioengine.models.embedding_files import EmbeddingFiles, Pooling

__all__ = ["TorchEmbedder", "load_embedder", "pool"]

_LEAST_LENGTH: Final = 1e-12  # of a vector that is divided by its length


def load_embedder(
    model_dir: Path,
    files: EmbeddingFiles,
    options: EngineOptions,
    progress: Callable[[str, float], None],
) -> TorchEmbedder:
    """Load an encoder or decoder of transformers for its hidden states.

    Raises:
        ConfigError: An option does not fit this machine or this model.
        EngineStartError: The directory does not hold a checkpoint that loads.
    """
    torch.set_num_threads(options.threads or usable_cpus())
    progress("loading weights", 0.3)
    device = resolve_device(options.device)
    dtype: torch.dtype = torch.float32
    if options.dtype != "auto":
        dtype = getattr(torch, options.dtype)
    network = _read_network(model_dir, dtype, device)
    progress("ready", 1.0)
    return TorchEmbedder(network, files, device, _max_len(network.config, files, options))


class TorchEmbedder:
    """Fulfils ``EmbeddingRunner``.

    Args:
        network: ``AutoModel`` of transformers, in evaluation mode.
        files: How to pool.
        device: Where it is.
        max_len: Most tokens of an input.
    """

    def __init__(
        self, network: Any, files: EmbeddingFiles, device: torch.device, max_len: int
    ) -> None:
        config = network.config.get_text_config(decoder=False)
        self._network = network
        self._files = files
        self._device = device
        self._pad_id = getattr(config, "pad_token_id", None) or 0
        dtype = str(next(network.parameters()).dtype).removeprefix("torch.")
        self.model = ModelInfo(
            name="",
            runner=f"torch {device.type} {dtype}",
            simulated=False,
            max_model_len=max_len,
            vocab_size=config.vocab_size,
            eos_token_ids=(),
            embedding=EmbeddingInfo(config.hidden_size, files.any_dimensions, files.dimensions),
        )

    def embed(self, sequences: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """Return the embeddings, float32 ``[n, size]``.

        Raises:
            MemoryError: There is not enough of it, here or on the device.
        """
        lengths = torch.tensor([len(ids) for ids in sequences])
        longest = int(lengths.max())
        padded = torch.tensor([[*ids, *[self._pad_id] * (longest - len(ids))] for ids in sequences])
        mask = (torch.arange(longest)[None] < lengths[:, None]).long()
        with memory_errors(), torch.inference_mode():
            states = self._network(
                input_ids=padded.to(self._device), attention_mask=mask.to(self._device)
            ).last_hidden_state.float()
            vectors = pool(states, mask.to(self._device), self._files.pooling)
            if self._files.normalize:
                vectors = torch.nn.functional.normalize(vectors, dim=-1, eps=_LEAST_LENGTH)
        array: npt.NDArray[np.float32] = vectors.cpu().numpy()
        return array

    def call(self, method: str, args: dict[str, object]) -> object:
        """Know no method. Raises ``KeyError``."""
        raise KeyError(method)

    def close(self) -> None:
        """Free the weights."""
        self._network = None


def pool(states: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Return one vector a sequence.

    Args:
        states: ``[n, length, size]``.
        mask: 1 for tokens, 0 for padding behind them, ``[n, length]``.
        pooling: What to take.
    """
    if pooling == "cls":
        return states[:, 0]
    if pooling == "last":
        return states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]
    there = mask[..., None].bool()
    if pooling == "max":
        return states.masked_fill(~there, float("-inf")).amax(1)
    return states.masked_fill(~there, 0.0).sum(1) / mask.sum(1, keepdim=True)


def _read_network(model_dir: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()  # standard error is the server's
    try:
        network, found = AutoModel.from_pretrained(
            model_dir,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # whatever a damaged file makes transformers raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise EngineStartError(f"{model_dir} does not load: {lines[0]}") from error
    # A pooler on top is not used, and many checkpoints come without its weights.
    missing = sorted(key for key in found["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise EngineStartError(
            f"{model_dir} does not load: {len(missing)} weights are missing, {missing[0]} first"
        )
    return network.to(device).eval().requires_grad_(False)


def _max_len(config: Any, files: EmbeddingFiles, options: EngineOptions) -> int:
    limits = [getattr(config, "max_position_embeddings", None), files.max_seq_len]
    limit = min((each for each in limits if each), default=None)
    wanted = options.max_model_len_tokens
    if limit is None and wanted is None:
        raise ConfigError("the model names no context length: set --max-model-len")
    if limit is not None and wanted is not None and wanted > limit:
        raise ConfigError(f"--max-model-len {wanted} exceeds the model's {limit} tokens")
    return wanted or limit or 0
