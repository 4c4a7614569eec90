from __future__ import annotations

import pytest

from trioengine.closing import ClosedOnExit


class Door(ClosedOnExit):
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_it_is_closed_behind_the_block() -> None:
    with Door() as door:
        assert not door.closed
    assert door.closed


def test_it_is_closed_behind_a_block_that_fails_and_the_error_goes_on() -> None:
    door = Door()
    with pytest.raises(KeyError, match="gone"), door:
        raise KeyError("gone")
    assert door.closed
