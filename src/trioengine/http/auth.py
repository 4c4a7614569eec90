"""API keys: compared in constant time, on every route that is not a health check. Pure.

Denied by default: a route is open because it is named here, never because of how its path begins.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Final

from trioengine.api_keys import key_digest, key_name
from trioengine.errors import AuthenticationError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["OPEN_RULES", "KeyCheck"]

# URL rules, exactly as routed, that an orchestrator's probe reaches without a key.
OPEN_RULES: Final = frozenset({"/health", "/health/live", "/health/ready"})


class KeyCheck:
    """Decides whether a request may pass.

    Digests are compared, so that neither the length of a key nor how much of it was right shows in
    the time taken; and all of them are, so that neither does which key it was.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        """Remember the keys.

        Raises:
            ConfigError: A key is empty or blank, which an empty header would match.
        """
        accepted = tuple(keys)
        if any(not key.strip() for key in accepted):
            raise ConfigError("an API key must not be empty")
        self._digests = tuple(key_digest(key.encode()) for key in accepted)

    def check(self, authorization: Sequence[str]) -> str:
        """Let a request with these ``Authorization`` header values (latin-1) pass, or raise.

        Returns:
            The name of its key; empty where fewer than two keys open, as all are one then.

        Raises:
            AuthenticationError: Keys are required and this is not exactly one header with one.
        """
        if not self._digests:
            return ""
        if not authorization:
            raise AuthenticationError(
                "You didn't provide an API key. Send it as 'Authorization: Bearer KEY'."
            )
        digest = self._known(authorization[0]) if len(authorization) == 1 else None
        if digest is None:
            raise AuthenticationError("The API key is not valid.")
        return key_name(digest) if len(self._digests) > 1 else ""

    def _known(self, header: str) -> bytes | None:
        scheme, _, key = header.strip().partition(" ")
        offered = key_digest(key.strip().encode("latin-1", "replace"))
        matches = [hmac.compare_digest(offered, known) for known in self._digests]
        return offered if any(matches) and scheme.lower() == "bearer" else None
