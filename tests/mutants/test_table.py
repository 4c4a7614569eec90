"""The table is in step with the sources, and the page about it with the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutants.run import PAGE, ROOT, page
from mutants.table import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_what_a_mutant_replaces_is_there_once(mutant: Mutant) -> None:
    source = (ROOT / "src" / "trioengine" / mutant.file).read_text()
    assert source.count(mutant.old) == 1
    assert mutant.new != mutant.old
    assert all((ROOT / test).exists() for test in mutant.tests)


def test_no_name_is_given_twice() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 25


def test_the_page_is_as_written() -> None:
    assert Path(PAGE).read_text(encoding="utf-8") == page()
