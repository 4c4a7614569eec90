"""A lack of memory in torch's words, made the ``MemoryError`` that the engine can deal with."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["memory_errors"]

# On a CPU torch raises a bare RuntimeError; these are its words for it since 1.0.
_CPU_WORDS: Final = ("can't allocate memory", "not enough memory")


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Raise ``MemoryError`` where torch says that it found none.

    What CUDA's allocator has cached is given back first: another size may fit then.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise MemoryError(_first_line(error)) from error
    except RuntimeError as error:
        if not any(words in str(error) for words in _CPU_WORDS):
            raise
        raise MemoryError(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
