"""Fixtures of the torch runner's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers.torch_fixtures import checkpoints, open_runner

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["checkpoints", "open_runner"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of torch that wait for each other crawl where other tests run on the same cores."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
