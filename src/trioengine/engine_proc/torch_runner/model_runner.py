"""The model runner on torch: one forward pass of transformers' own network per step.

The network sees one flat batch ``[1, num_tokens]`` with explicit positions and no cache of its own;
attention finds the paged cache through the step's plan. The head runs for the wanted rows only.

Rows of a step are computed by shared matrix products whose rounding may depend on the number of
rows, so outputs are equal alone and in company only as far as that rounding goes: on a CPU in
float32 logits differ by less than 1e-4 of their range.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from trioengine.engine_proc.runner import StepResult
from trioengine.engine_proc.torch_runner.attention import PagedAttention, bind
from trioengine.engine_proc.torch_runner.body import KeptBody
from trioengine.engine_proc.torch_runner.logit_edits import has_edits
from trioengine.engine_proc.torch_runner.paged_cache import LayerCache
from trioengine.engine_proc.torch_runner.profiler import TorchProfiler
from trioengine.engine_proc.torch_runner.row_logprobs import ROWS_AT_ONCE, read_logprobs
from trioengine.engine_proc.torch_runner.sampler import sample
from trioengine.engine_proc.torch_runner.shortage import memory_errors
from trioengine.engine_proc.torch_runner.step_plan import StepPlan, to_device
from trioengine.errors import InvalidRequestError
from trioengine.protocol import ModelInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from trioengine.engine_proc.runner import SamplingRows, StepBatch
    from trioengine.engine_proc.torch_runner.model_loader import Checkpoint

__all__ = ["TorchModelRunner"]


class TorchModelRunner:
    """Fulfils ``ModelRunner`` for any decoder of transformers, on a CPU or on CUDA.

    Args:
        checkpoint: A loaded network. The runner owns it from now on.
        block_size: Tokens per block.
        num_blocks: Blocks of the cache, which is allocated here.
        profile_dir: Where traces go unless a call says otherwise.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        block_size: int,
        num_blocks: int,
        profile_dir: Path | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.model = _describe(checkpoint)
        self._device = checkpoint.device
        self._mask_dtype = checkpoint.layers[0].dtype
        self._network: torch.nn.Module | None = checkpoint.network
        self._attention = PagedAttention(
            [LayerCache(s, num_blocks, block_size, self._device) for s in checkpoint.layers]
        )
        bind(checkpoint.network, self._attention)
        self._body = KeptBody(checkpoint.network)
        self._profiler = TorchProfiler()
        self._profile_dir = profile_dir

    def execute(self, batch: StepBatch) -> StepResult:
        """Compute one step; see ``ModelRunner``.

        Raises:
            MemoryError: There is not enough of it, here or on the device.
        """
        with memory_errors(), torch.inference_mode():
            rows = batch.sampling
            num_rows = len(batch.logits_rows)
            num_sampled = num_rows if rows.targets is None else int((rows.targets < 0).sum())
            # Rows that sample come first and stay together; there are few of them.
            chunks = self.logits_in_chunks(batch, max(num_sampled, ROWS_AT_ONCE))
            return _finish(chunks, rows, num_sampled)

    def logits(self, batch: StepBatch) -> torch.Tensor:
        """Compute the step and return its logits, ``[num_rows, vocab]`` in the network's dtype.

        Keys and values of all of the step's tokens are in the cache afterwards.
        """
        return self._forward(batch, batch.logits_rows)

    def logits_in_chunks(self, batch: StepBatch, rows_at_once: int) -> Iterator[torch.Tensor]:
        """Compute the step and return its logits, so many rows at a time, at least one chunk."""
        rows = batch.logits_rows
        if len(rows) <= rows_at_once or not self._body.separable:
            yield self.logits(batch)
            return
        with self._body.keep():
            for start in range(0, len(rows), rows_at_once):
                yield self._forward(batch, rows[start : start + rows_at_once])

    def _forward(self, batch: StepBatch, rows: npt.NDArray[np.int32]) -> torch.Tensor:
        if self._network is None:
            raise RuntimeError("the runner is closed")
        with torch.inference_mode():
            self._attention.plan = StepPlan(batch, self.block_size, self._mask_dtype, self._device)
            try:
                output = self._network(
                    input_ids=self._upload(batch.token_ids)[None],
                    position_ids=self._upload(batch.positions)[None],
                    use_cache=False,
                    logits_to_keep=self._upload(rows),
                )
            finally:
                self._attention.plan = None
            logits: torch.Tensor = output.logits[0]
            return logits

    def _upload(self, array: npt.NDArray[np.int32]) -> torch.Tensor:
        return to_device(array.astype(np.int64), self._device)

    def call(self, method: str, args: dict[str, object]) -> object:
        """Start or stop torch's profiler; ``stop_profile`` returns the path of the trace.

        Raises:
            KeyError: Another method.
            InvalidRequestError: No directory to write to, a profile runs already, or none does.
            OSError: The trace cannot be written.
        """
        if method == "start_profile":
            named = args.get("profile_dir")
            directory = self._profile_dir if named is None else Path(str(named))
            if directory is None:
                raise InvalidRequestError("profiling needs --profile-dir")
            self._profiler.start(directory)
            return None
        if method == "stop_profile":
            return self._profiler.stop()
        raise KeyError(method)

    def close(self) -> None:
        """Free weights and cache. Idempotent; nothing may be computed afterwards."""
        self._profiler.discard()
        self._network = None
        self._body.release()
        self._attention = PagedAttention([])
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _finish(chunks: Iterator[torch.Tensor], rows: SamplingRows, num_sampled: int) -> StepResult:
    """Give every row its token, and logprobs where they are wanted.

    Args:
        chunks: Logits of the rows, in order; all that sample are in the first chunk.
        rows: How.
        num_sampled: How many rows sample; the others have their token.
    """
    first = next(chunks)
    sampled = first[:num_sampled]
    if not len(rows.temperature):
        return StepResult(np.empty(0, np.int32))
    if rows.logprobs_k is None:
        return StepResult(_to_numpy(sample(sampled, rows)))
    if sampled.dtype == torch.float32 and has_edits(rows):
        sampled = sampled.clone()  # logprobs are of the logits before the edits
    tokens = _to_numpy(sample(sampled, rows))
    if rows.targets is not None:
        tokens = np.concatenate([tokens, rows.targets[num_sampled:]])
    logprobs = read_logprobs(itertools.chain([first], chunks), tokens, rows.logprobs_k)
    return StepResult(tokens, logprobs)


def _to_numpy(tokens: torch.Tensor) -> npt.NDArray[np.int32]:
    sampled: npt.NDArray[np.int32] = tokens.to(torch.int32).cpu().numpy()
    return sampled


def _describe(checkpoint: Checkpoint) -> ModelInfo:
    dtype = str(checkpoint.dtype).removeprefix("torch.")
    return ModelInfo(
        name=checkpoint.name,
        runner=f"torch {checkpoint.device.type} {dtype}",
        simulated=False,
        max_model_len=checkpoint.max_model_len,
        vocab_size=checkpoint.vocab_size,
        eos_token_ids=checkpoint.eos_token_ids,
    )
