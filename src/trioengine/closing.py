"""A thing that is to be closed, as a context manager."""

from __future__ import annotations

import abc
from typing import Self

__all__ = ["ClosedOnExit"]


class ClosedOnExit(abc.ABC):
    """Its ``with`` block ends in ``close``, whatever else it ends with."""

    __slots__ = ()

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
