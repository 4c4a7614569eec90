"""trioengine: an OpenAI-compatible server for language models whose failure behaviour is exact.

What is here is the offline library. It is imported on first use, so that ``import trioengine``
alone costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from trioengine.version import __version__

if TYPE_CHECKING:
    from trioengine.llm import LLM, Completion, Generation
    from trioengine.sampling_params import SamplingParams

__all__ = ["LLM", "Completion", "Generation", "SamplingParams", "__version__"]

_HOMES: Final = {
    "LLM": "trioengine.llm",
    "Completion": "trioengine.llm",
    "Generation": "trioengine.llm",
    "SamplingParams": "trioengine.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
