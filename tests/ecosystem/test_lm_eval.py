"""``lm_eval --model local-completions`` on tasks that lie beside this file.

Three ways to score, each with prompts as text or as token ids, and what the harness makes of the
answers is compared with what this model is known to know.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from helpers.foreign_service import SERVER_PYTHON

if TYPE_CHECKING:
    from helpers.foreign_service import Service

if importlib.util.find_spec("lm_eval") is None:
    pytest.skip("lm_eval is not installed", allow_module_level=True)

pytestmark = [pytest.mark.ecosystem, pytest.mark.process, pytest.mark.slow]

TASKS = Path(__file__).parent / "tasks"
PATIENCE_S = 240.0


def evaluate(
    service: Service, tmp_path: Path, model: str, tasks: str, *flags: str, **arguments: object
) -> Any:
    """Return the harness's own results, by task."""
    told = {"model": service.model, "max_retries": 1, "num_concurrent": 4, **arguments}
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", model,
        "--model_args", ",".join(f"{name}={value}" for name, value in told.items()),
        "--tasks", tasks, "--include_path", str(TASKS),
        "--output_path", str(tmp_path / "results"), *flags,
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        command, cwd=TASKS, env={**os.environ, **offline, "OPENAI_API_KEY": service.key},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    (written,) = (tmp_path / "results").rglob("results_*.json")
    return json.loads(written.read_text())["results"]


@pytest.fixture(scope="session")
def checkpoint(service: Service) -> str:
    """Where the model's tokenizer is, which the harness wants for itself."""
    command = [SERVER_PYTHON, "-m", "trioengine", "models", "path"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("tokenized", [True, False])
def test_local_completions(
    service: Service, checkpoint: str, tmp_path: Path, tokenized: bool
) -> None:
    results = evaluate(
        service, tmp_path, "local-completions", "capitals_choice,capitals_words,capitals_text",
        "--batch_size", "2", base_url=f"{service.url}/completions", tokenizer=checkpoint,
        tokenized_requests=tokenized,
    )  # fmt: skip
    assert results["capitals_choice"]["acc,none"] >= 5 / 6
    assert results["capitals_words"]["exact_match,bare"] >= 5 / 6
    assert 1 < results["capitals_text"]["byte_perplexity,none"] < 4


def test_local_chat_completions(service: Service, tmp_path: Path) -> None:
    results = evaluate(
        service, tmp_path, "local-chat-completions", "capitals_words", "--apply_chat_template",
        base_url=f"{service.url}/chat/completions",
    )  # fmt: skip
    assert results["capitals_words"]["exact_match,bare"] > 0  # it seldom just goes on in a chat
