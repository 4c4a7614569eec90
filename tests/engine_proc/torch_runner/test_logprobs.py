"""Logprobs of prompts and answers equal transformers' own log-softmax in float32."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from helpers.logprob_check import check_logprobs
from helpers.reference import load_reference
from helpers.tiny_models import VOCAB

if TYPE_CHECKING:
    from helpers.torch_fixtures import Checkpoints, OpenRunner

pytestmark = pytest.mark.model

MODELS = ["llama-gqa2-hd64-tied", "gemma2", "phi3"]


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_equal_transformers(
    open_runner: OpenRunner, checkpoints: Checkpoints, name: str
) -> None:
    reference = load_reference(checkpoints(name))
    prompt = random.Random(1).choices(range(1, VOCAB), k=90)
    check_logprobs(open_runner(name), reference, prompt)
