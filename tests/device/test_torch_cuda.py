"""The torch runner on CUDA against transformers in float32 on the CPU."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from helpers.reference import (
    MiniScheduler,
    Sampling,
    load_reference,
    reference_logits,
    sampling_rows,
    tap_logits,
)
from helpers.tiny_models import TINY, VOCAB

if TYPE_CHECKING:
    from helpers.torch_fixtures import Checkpoints, OpenRunner

pytestmark = [pytest.mark.gpu, pytest.mark.model, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(VOCAB), k=length)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 2e-3), ("bfloat16", 0.15)])
@pytest.mark.parametrize("name", TINY)
def test_every_architecture_stays_near_the_reference(
    checkpoints: Checkpoints, open_runner: OpenRunner, name: str, dtype: str, error: float
) -> None:
    if dtype == "bfloat16" and ("moe" in name or "oss" in name or "v3" in name):
        pytest.skip("a router may choose another expert after rounding")
    reference = load_reference(checkpoints(name))
    runner = open_runner(name, device="cuda", dtype=dtype)
    assert runner.model.runner == f"torch cuda {dtype}"
    with tap_logits(runner) as tap:
        scheduler = MiniScheduler(runner, seed=1, tap=tap)
        sequences = [scheduler.add(prompt(length)) for length in (1, 17, 70, 300)]
        scheduler.run(sequences, 4, chunk=61)
    for seq in sequences:
        expected = reference_logits(reference, seq.tokens[:-1], len(seq.output))
        deviation = np.array(seq.logits) - expected
        assert float(np.sqrt(np.mean(deviation**2))) < error


def test_the_sampler_draws_the_same_on_both_devices() -> None:
    torch = pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.sampler import sample

    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 2, (64, 5000)).astype(np.float32))
    rows = sampling_rows(
        [
            Sampling(
                temperature=(0.0, 0.7, 1.3)[i % 3],
                top_p=(1.0, 0.9)[i % 2],
                top_k=(0, 40, 500)[i % 3],
                min_p=(0.0, 0.05)[i // 32],
                seed=i,
                masked=(1, 2, 3),
            )
            for i in range(64)
        ]
    )
    on_cpu = sample(logits.clone(), rows).tolist()
    on_cuda = sample(logits.cuda(), rows).tolist()
    assert sum(a != b for a, b in zip(on_cpu, on_cuda, strict=True)) <= 1  # rounding at an edge


def test_the_cache_takes_a_share_of_the_device(open_runner: OpenRunner) -> None:
    runner = open_runner("llama-mha", device="cuda", kv_cache_memory_gib=None, max_num_seqs=5)
    assert runner.num_blocks == 5 * 512 // 16


def test_a_profile_sees_kernels(open_runner: OpenRunner, tmp_path: object) -> None:
    runner = open_runner("llama-mha", device="cuda")
    runner.call("start_profile", {"profile_dir": str(tmp_path)})
    scheduler = MiniScheduler(runner)
    scheduler.run([scheduler.add(prompt(20))], 2)
    path = str(runner.call("stop_profile", {}))
    with open(path) as file:
        assert '"cat": "kernel"' in file.read()
