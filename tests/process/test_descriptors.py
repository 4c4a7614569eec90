"""The limit of open files is raised as far as it goes, and where that is too little it is said."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import pytest

from trioengine.process.descriptors import OWN_DESCRIPTORS, allow_descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator


class Limits:
    """Stands for the kernel's."""

    def __init__(self, soft: int, hard: int, *, fixed: bool = False) -> None:
        self.now = (soft, hard)
        self._fixed = fixed

    def get(self, _: int) -> tuple[int, int]:
        return self.now

    def set(self, _: int, limits: tuple[int, int]) -> None:
        if self._fixed:
            raise ValueError("not allowed to raise maximum limit")
        self.now = limits


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with monkeypatch.context() as patch:
        yield patch


def pretend(patch: pytest.MonkeyPatch, limits: Limits) -> None:
    patch.setattr(resource, "getrlimit", limits.get)
    patch.setattr(resource, "setrlimit", limits.set)


def test_it_is_raised(patched: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(1024, 20_000)
    pretend(patched, limits)
    assert allow_descriptors(1024) == 20_000
    assert limits.now == (20_000, 20_000)
    assert not caplog.records


def test_too_few_for_the_queue_is_said(
    patched: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(patched, Limits(256, 1000))
    allow_descriptors(1000 - OWN_DESCRIPTORS)
    assert not caplog.records
    allow_descriptors(1000 - OWN_DESCRIPTORS + 1)
    assert "only 1000 files may be open" in caplog.text
    assert "--max-queue" in caplog.text


def test_a_limit_that_stays_is_said(
    patched: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(patched, Limits(4096, 20_000, fixed=True))
    assert allow_descriptors(1024) == 4096
    assert "could not be raised" in caplog.text


def test_no_limit_is_enough(patched: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pretend(patched, Limits(1024, resource.RLIM_INFINITY))
    allow_descriptors(10**6)
    assert not caplog.records
