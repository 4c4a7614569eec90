"""The runners, one after the other. To add one, add its name to ``RUNNERS`` and a branch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers.native_fixtures import extension, open_tiny
from helpers.numpy_llama import TinyShape
from helpers.tiny_models import VOCAB
from helpers.torch_fixtures import checkpoints, open_runner
from trioengine.engine_proc.sim_runner import SimModelRunner, SimScript

if TYPE_CHECKING:
    from helpers.native_fixtures import OpenTiny
    from helpers.torch_fixtures import OpenRunner
    from trioengine.engine_proc.runner import ModelRunner

__all__ = ["checkpoints", "extension", "open_runner", "open_tiny", "runner"]

RUNNERS = [
    "sim",
    "native",
    pytest.param("torch-llama", marks=pytest.mark.model),
    pytest.param("torch-gemma2", marks=pytest.mark.model),
]


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    if request.param == "sim":
        return SimModelRunner(SimScript(num_blocks=256), vocab_size=VOCAB, eos_token_ids=(0,))
    if request.param == "native":
        open_tiny: OpenTiny = request.getfixturevalue("open_tiny")
        return open_tiny(TinyShape(vocab=VOCAB), kv_cache_memory_gib=0.02)[0]
    open_runner: OpenRunner = request.getfixturevalue("open_runner")
    names = {"torch-llama": "llama-gqa2-hd64-tied", "torch-gemma2": "gemma2"}
    return open_runner(names[request.param])
