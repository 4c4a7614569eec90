"""Let our own errors leave a nursery as themselves, where the nursery is a detail."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trioengine.errors import TrioEngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["bare_errors"]


@contextmanager
def bare_errors() -> Iterator[None]:
    """Raise the first of our errors in a group alone; the group stays its cause.

    Foreign exceptions of the same group stay in a group, beside ours.
    """
    try:
        yield
    except* TrioEngineError as group:
        # A fresh copy: a leaf whose cause is its own group would lose its traceback.
        raise copy.copy(_first_leaf(group)) from group


def _first_leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
