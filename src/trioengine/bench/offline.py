"""Run workloads through the library, with no HTTP between: what the server is to be held against.

All requests of a repeat are given at once, and as many run at a time as the workload has clients,
unless ``--max-num-seqs`` says otherwise: the engine sees the same batches as it does online.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from trioengine.bench.prompts import make_prompts
from trioengine.bench.summary import RunSummary
from trioengine.bench.workloads import WARM_UP_REP
from trioengine.closing import ClosedOnExit
from trioengine.llm import LLM
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trioengine.bench.prompts import SizingTokenizer
    from trioengine.bench.workloads import Workload

__all__ = ["OfflineBench"]


class OfflineBench(ClosedOnExit):
    """One model, loaded for one workload. A context manager."""

    def __init__(
        self,
        model: str | None,
        engine: Mapping[str, Any],
        workload: Workload,
        tokenizer: SizingTokenizer,
    ) -> None:
        """Load the model.

        Args:
            model: As on the command line.
            engine: Options of ``LLM``.
            workload: What is to be run.
            tokenizer: Of the model.

        Raises:
            ConfigError: As of ``LLM``.
            EngineStartError: The same.
        """
        self._tokenizer = tokenizer
        self._workload = workload
        self._llm = LLM(model, **{"max_num_seqs": workload.concurrency, **engine})

    def warm_up(self) -> None:
        """Run one batch of prompts that are never measured."""
        few = min(self._workload.concurrency, self._workload.num_requests)
        self._generate(msgspec.structs.replace(self._workload, num_requests=few), WARM_UP_REP)

    def run(self, rep: int) -> RunSummary:
        """Run the workload once, with the prompts of repeat ``rep``."""
        return self._generate(self._workload, rep)

    def _generate(self, workload: Workload, rep: int) -> RunSummary:
        prompts = make_prompts(workload, rep, self._tokenizer)
        params = SamplingParams(max_tokens=workload.output_tokens, temperature=0.0, ignore_eos=True)
        begin_s = time.perf_counter()
        results = self._llm.generate(prompts, params, progress=False)
        wall_s = time.perf_counter() - begin_s
        output_tokens = sum(len(result.token_ids) for result in results)
        odd = [
            len(result.prompt_token_ids) != workload.total_prompt_tokens
            or len(result.token_ids) != workload.output_tokens
            for result in results
        ]
        return RunSummary(
            num_ok=len(results),
            num_odd=sum(odd),
            wall_s=wall_s,
            output_tokens=output_tokens,
            tok_s=output_tokens / wall_s,
            req_s=len(results) / wall_s,
        )

    def close(self) -> None:
        """End the engine. Idempotent."""
        self._llm.close()
