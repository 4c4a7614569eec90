"""What the engine's own Python costs: the real core, loop codec included, over a model of no cost.

    python benchmarks/engine_overhead.py            # tokens/s and µs by number of sequences
    python benchmarks/engine_overhead.py --profile  # where the time goes, 64 sequences
    python benchmarks/engine_overhead.py --num-scheduler-steps 8

A step's arithmetic must be read beside it: at 64 sequences the engine adds 64 times the last
column. Times are CPU times of this process, so that a busy machine spoils them less.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time

from trioengine.engine_proc.core import EngineCore
from trioengine.engine_proc.detokenizer import Detokenizer, simulated_vocab
from trioengine.engine_proc.sim_runner import SimModelRunner, SimScript
from trioengine.protocol import Add, FrameEncoder, Outputs
from trioengine.sampling_params import SamplingParams

VOCAB_SIZE = 49_152
PROMPT_TOKENS = 16


def make_core(num_seqs: int, num_steps: int) -> EngineCore:
    """Return a core with room for ``num_seqs`` sequences, and so many steps to a plan."""
    vocab = simulated_vocab(VOCAB_SIZE)
    runner = SimModelRunner(
        SimScript(num_blocks=num_seqs * 64, max_model_len=1024),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(0,),
        speakable=range(257, VOCAB_SIZE),
    )
    return EngineCore(
        runner,
        lambda params: Detokenizer(vocab, stop=params.stop),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(2048, num_seqs * PROMPT_TOKENS),
        num_scheduler_steps=num_steps,
    )


def run(
    num_seqs: int, num_tokens: int, num_steps: int, profile: cProfile.Profile | None = None
) -> float:
    """Return seconds per token of ``num_seqs`` sequences that decode side by side."""
    core, encoder = make_core(num_seqs, num_steps), FrameEncoder()
    for request_id in range(num_seqs):
        prompt = [300 + request_id] * PROMPT_TOKENS
        core.add_request(Add(request_id, prompt, SamplingParams(max_tokens=num_tokens)))
    core.step(list)
    gc.collect()
    gc.freeze()
    if profile is not None:
        profile.enable()
    produced, step, begin_s = 0, 0, time.process_time()
    while core.has_work():
        deltas = core.step(list)
        step += 1
        encoder.encode(Outputs(step, deltas, core.stats()))
        produced += sum(len(delta.token_ids) for delta in deltas)
    elapsed_s = time.process_time() - begin_s
    if profile is not None:
        profile.disable()
    return elapsed_s / produced


def main() -> None:
    """Measure, or profile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--num-scheduler-steps", type=int, default=1)
    arguments = parser.parse_args()
    num_steps = arguments.num_scheduler_steps
    if arguments.profile:
        profile = cProfile.Profile()
        run(64, arguments.tokens, num_steps, profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)
        return
    for num_seqs in (1, 16, 64, 256):
        per_token_s = statistics.median(
            run(num_seqs, arguments.tokens, num_steps) for _ in range(3)
        )
        step_us = per_token_s * num_seqs * 1e6
        print(
            f"{num_seqs:4} sequences: {1 / per_token_s:9,.0f} tok/s, "
            f"{step_us:6.1f} µs a step, {per_token_s * 1e6:5.2f} µs a token"
        )


if __name__ == "__main__":
    main()
