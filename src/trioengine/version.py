"""The version, where every room may read it: the package itself reaches up to the library."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
