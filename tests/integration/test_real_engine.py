"""A real, tiny, random model through the whole of it: torch in its process, HTTP and library."""

from __future__ import annotations

import itertools
import json
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from helpers import tiny_tokenizers
from helpers.chat_templates import CHATML
from helpers.server_process import ServerProcess, process_lives, wait_until
from trioengine import LLM, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.model]

START_S = 120.0  # importing torch on a busy machine
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def network(model_dir: Path) -> Any:
    from helpers.tiny_models import save_tiny

    return save_tiny(model_dir, "llama-gqa2-hd64-tied", vocab_size=512)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny_tokenizers.byte_level()
    return tiny_tokenizers.save(
        tokenizer, directory, chat_template=CHATML, eos_token="<|endoftext|>"
    )


def greedy(network: Any, prompt: list[int]) -> list[int]:
    """Return what transformers makes of ``prompt``."""
    import torch

    with torch.inference_mode():
        output = network.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
        )
    ids: list[int] = output[0, len(prompt) :].tolist()
    return ids


def test_the_library_computes_what_transformers_computes(network: Any, model_dir: Path) -> None:
    prompts = [[5, 6, 7], list(range(20, 60)), [9]]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(str(model_dir), engine="torch", dtype="float32") as llm:
        results = llm.generate(prompts, params)
        assert llm.chat([{"role": "user", "content": "hi"}], params)[0].prompt_token_ids
    assert [result.token_ids for result in results] == [greedy(network, p) for p in prompts]


def test_the_server_says_the_same_streamed_and_whole(network: Any, model_dir: Path) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    with ServerProcess(str(model_dir), "--dtype", "float32", engine="torch") as server:
        server.wait_ready(timeout_s=START_S)
        assert server.get("/v1/models")[1]["data"][0]["simulated"] is False
        status, answer = server.post("/v1/completions", body)
        assert status == 200
        text = answer["choices"][0]["text"]
        _, streamed = server.request("POST", "/v1/completions", body | {"stream": True})
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    tokenizer = tiny_tokenizers.byte_level()
    assert text == tokenizer.decode(greedy(network, [5, 6, 7]))
    events = [line for line in streamed.decode().split("\n\n") if line.startswith("data: {")]
    assert len(events) > 2


def tokens_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    logprobs = choice["logprobs"]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))


def about(tokens: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Torch's arithmetic depends on what shares the batch."""
    return [
        (name, value if value is None else pytest.approx(value, abs=1e-4)) for name, value in tokens
    ]


def joined(streamed: bytes) -> dict[int, Any]:
    """What a client makes of a streamed completion, by choice."""
    choices: dict[int, Any] = {}
    for line in streamed.decode().split("\n\n"):
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                whole = choices.setdefault(choice["index"], {"text": "", "tokens": []})
                whole["text"] += choice["text"]
                whole["tokens"] += tokens_of(choice) if choice["logprobs"] else []
                whole["finish_reason"] = choice["finish_reason"]
    return choices


def test_parameters_on_a_real_engine(network: Any, model_dir: Path) -> None:
    """Streams join to wholes, a score is transformers' own, and a bias has its way."""
    import torch

    ids = [5, 6, 7, 300]
    base = {"prompt": [ids, [9, 10]], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with ServerProcess(str(model_dir), "--dtype", "float32", engine="torch") as server:
        server.wait_ready(timeout_s=START_S)
        for n, stop, logprobs, echo in itertools.product([1, 2], [None, "e"], [0, 2], [0, 1]):
            body = base | {"n": n, "stop": stop, "logprobs": logprobs, "echo": bool(echo)}
            status, whole = server.post("/v1/completions", body)
            assert status == 200, whole
            _, streamed = server.request("POST", "/v1/completions", body | {"stream": True})
            assert joined(streamed) == {
                choice["index"]: {
                    "text": choice["text"],
                    "tokens": about(tokens_of(choice)),
                    "finish_reason": choice["finish_reason"],
                }
                for choice in whole["choices"]
            }
        scoring = {"prompt": [ids], "max_tokens": 0, "echo": True, "logprobs": 1}
        _, scored = server.post("/v1/completions", scoring)
        biased = base | {"prompt": ids, "logit_bias": {"77": 100}, "return_token_ids": True}
        _, forced = server.post("/v1/completions", biased)
    with torch.inference_mode():
        expected = network(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    scores = scored["choices"][0]["logprobs"]["token_logprobs"]
    own = [expected[at, token_id].item() for at, token_id in enumerate(ids[1:])]
    assert scores == [None, *(pytest.approx(value, abs=1e-3) for value in own)]
    assert forced["choices"][0]["token_ids"] == [77] * 6


def test_killed_while_torch_is_imported_the_server_leaves_no_engine(
    network: Any, model_dir: Path
) -> None:
    with ServerProcess(str(model_dir), engine="torch") as server:
        server.wait_line("importing torch")
        engine_pid = server.engine_pid
        server.send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        wait_until(lambda: not process_lives(engine_pid), what="the engine is gone")
        assert time.monotonic() - killed_s < 1.0
