"""trioengine: an OpenAI-compatible server for language models whose failure behaviour is exact."""

from __future__ import annotations

__version__ = "0.1.0"
