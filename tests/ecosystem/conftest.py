"""The servers that every foreign client talks to, started once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers.foreign_service import MAX_QUEUE, Service, open_service

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """The default model, as `trioengine serve` has it without a word."""
    with open_service("--max-queue", str(MAX_QUEUE)) as service:
        yield service


@pytest.fixture(scope="session")
def embedder() -> Iterator[Service]:
    """The packaged embedding model."""
    with open_service("all-minilm-l6-v2") as service:
        yield service
