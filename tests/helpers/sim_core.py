"""The real engine core over the simulated runner."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from trioengine.engine_proc.core import EngineCore
from trioengine.engine_proc.detokenizer import Detokenizer, simulated_vocab
from trioengine.engine_proc.faults import EngineFaults
from trioengine.engine_proc.sim_runner import SimModelRunner, SimScript
from trioengine.engine_proc.structured_output.compilations import Compilations
from trioengine.engine_proc.structured_output.guidance import GuidanceCompiler
from trioengine.fault_plan import FaultPlan
from trioengine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from trioengine.engine_proc.profiling import StepTimeline
    from trioengine.sampling_params import SamplingParams

__all__ = ["VOCAB_SIZE", "compilations_of", "sim_core", "simulated_compiler"]

VOCAB_SIZE = 2048

_simulated_vocab = functools.cache(simulated_vocab)  # nobody changes it, and it takes 2 ms


@functools.cache
def simulated_compiler(vocab_size: int) -> GuidanceCompiler:
    return GuidanceCompiler(
        lambda: Tokenizer.simulated(vocab_size).to_json(),
        vocab_size=vocab_size,
        eos_token_ids=(0,),
    )


def sim_core(
    script: SimScript | None = None,
    *,
    vocab_size: int = VOCAB_SIZE,
    block_size: int = 16,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 2048,
    enable_prefix_caching: bool = True,
    prefill_tokens_beside_decodes: int = 256,
    num_scheduler_steps: int = 1,
    seed: int = 0,
    profile_dir: Path | None = None,
    timeline: StepTimeline | None = None,
    faults: EngineFaults | None = None,
) -> tuple[EngineCore, SimModelRunner]:
    """Return a core over the simulated runner, and the runner."""
    vocab = _simulated_vocab(vocab_size)
    runner = SimModelRunner(
        script or SimScript(num_blocks=256, max_model_len=1024),
        vocab_size=vocab_size,
        eos_token_ids=(0,),
        speakable=range(257, vocab_size),
        block_size=block_size,
    )

    def make_text(params: SamplingParams) -> Detokenizer:
        return Detokenizer(
            vocab,
            stop=params.stop,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )

    faults = faults or EngineFaults(FaultPlan())
    core = EngineCore(
        faults.runner(runner),
        faults.make_text(make_text),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
        prefill_tokens_beside_decodes=prefill_tokens_beside_decodes,
        num_scheduler_steps=num_scheduler_steps,
        seed=seed,
        grammars=Compilations(
            faults.compile(simulated_compiler(vocab_size)),
            start=lambda work: work(),
        ),
        profile_dir=profile_dir,
        timeline=timeline,
    )
    return core, runner


def compilations_of(core: EngineCore) -> Compilations:
    """Return what compiles the grammars of a core that takes some."""
    compilations = core._grammars._compilations
    assert compilations is not None
    return compilations
