"""What tests of grammars share: a compiler, and whether a text is a word of a grammar."""

from __future__ import annotations

import pytest

from helpers.grammars import Judge


@pytest.fixture(scope="session")
def judge() -> Judge:
    return Judge()
