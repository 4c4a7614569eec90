"""Cross-origin requests from browsers: only from origins that the operator named. Pure.

Source: WHATWG Fetch, section 3.3 (CORS protocol).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Cors"]

_METHODS: Final = "GET, POST, OPTIONS"
_EXPOSED: Final = "X-Request-Id, Retry-After"
_PREFLIGHT_AGE_S: Final = 600


class Cors:
    """Header fields for requests that carry an ``Origin``."""

    def __init__(self, allowed_origins: Sequence[str]) -> None:
        """Remember the origins; ``*`` allows any."""
        self._origins = frozenset(allowed_origins)

    def headers(self, origin: str | None) -> dict[str, str]:
        """Return what an answer to this origin carries; nothing where it is not allowed."""
        if origin is None or not self._allows(origin):
            return {}
        return {
            "Access-Control-Allow-Origin": "*" if "*" in self._origins else origin,
            "Access-Control-Expose-Headers": _EXPOSED,
            "Vary": "Origin",
        }

    def preflight(self, origin: str | None, asked_headers: str | None) -> dict[str, str] | None:
        """Return the header fields of a preflight's answer, ``None`` where it is not allowed."""
        headers = self.headers(origin)
        if not headers:
            return None
        return headers | {
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Allow-Headers": asked_headers or "Authorization, Content-Type",
            "Access-Control-Max-Age": str(_PREFLIGHT_AGE_S),
        }

    def _allows(self, origin: str) -> bool:
        return "*" in self._origins or origin in self._origins
