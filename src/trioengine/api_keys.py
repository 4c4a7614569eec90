"""API keys: what the rest of the server calls them by, and what share of the queue each gets."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trioengine.config import ServerConfig

__all__ = ["all_keys", "key_digest", "key_name", "key_shares", "read_key_lines"]

MAX_WEIGHT: Final = 1000.0


def key_digest(key: bytes) -> bytes:
    """Return what is compared and remembered instead of a key."""
    return hashlib.sha256(key).digest()


def key_name(digest: bytes) -> str:
    """Return a name for a key that can be logged: nobody gets back from it to the key."""
    return digest[:8].hex()


def all_keys(config: ServerConfig) -> tuple[str, ...]:
    """Return every key that opens, in the order given, those of the file last."""
    return tuple(dict.fromkeys((*config.api_keys, *config.api_key_weights)))


def key_shares(config: ServerConfig) -> dict[str, float]:
    """Return the weight in the queue by key name; a key without one has weight 1."""
    return {key_name(key_digest(k.encode())): w for k, w in config.api_key_weights.items()}


def read_key_lines(text: str) -> Mapping[str, float]:
    """Return key → weight from lines of ``KEY [WEIGHT]``; blank lines and ``#`` lines are nothing.

    Raises:
        ValueError: A line has more than that, or its weight is no number in (0, 1000]. The message
            gives the line's number, never its text.
    """
    weights: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            weight = float(words[1]) if len(words) > 1 else 1.0
        except ValueError:
            weight = math.nan
        if len(words) > 2 or not 0.0 < weight <= MAX_WEIGHT:
            raise ValueError(
                f"line {number} must be a key and, if at all, a weight in (0, {MAX_WEIGHT:g}]"
            )
        weights[words[0]] = weight
    if not weights:
        raise ValueError("must hold at least one key")
    return weights
