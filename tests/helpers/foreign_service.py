"""A server with a packaged model, as its users start it, for clients that know nothing of it.

The clients have an environment of their own; the server runs with the Python that
``TRIOENGINE_SERVER_PYTHON`` names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from typing import TYPE_CHECKING

import openai

from helpers.server_process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MAX_QUEUE", "SERVER_PYTHON", "Service", "open_service"]

KEY = "sk-of-the-tests"
START_S = 300.0  # a first start fetches and converts the model
MAX_QUEUE = 64
SERVER_PYTHON = os.environ.get("TRIOENGINE_SERVER_PYTHON", sys.executable)


@dataclasses.dataclass(frozen=True)
class Service:
    """What a client is told of a server."""

    url: str
    model: str
    key: str
    process: ServerProcess


@contextlib.contextmanager
def open_service(*arguments: str) -> Iterator[Service]:
    """Serve until the block ends."""
    command = (SERVER_PYTHON, "-m", "trioengine", "serve")
    environ = {"TRIOENGINE_API_KEY": KEY}
    with ServerProcess(*arguments, engine=None, env=environ, command=command) as process:
        process.wait_ready(timeout_s=START_S)
        url = f"http://127.0.0.1:{process.port}/v1"
        with openai.OpenAI(base_url=url, api_key=KEY) as client:
            (model,) = client.models.list()
        yield Service(url, model.id, KEY, process)
