"""What one client may take of the server's time and memory. Sizes in bytes, times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trioengine.config import ServerConfig

__all__ = ["Limits"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bounds of one connection.

    Attributes:
        keep_alive_s: How long a connection may be idle between two requests, or before the first.
            Longer than a proxy's (nginx: 60 s), so that the proxy closes first and never sends a
            request into a connection that we are closing.
        head_s: From the first byte of a request's head to its last.
        max_head_bytes: Request line and header fields together.
        max_head_fields: Number of header fields.
        body_grace_s: What a body may take however slowly it arrives, and
        body_min_rate: the bytes per second it must average beyond that.
        max_body_bytes: Size of a request's body.
        slow_client_timeout_s: How long one slice of an answer (16 KiB) may wait for the client.
        linger_s: After an answer to a request that was not read to its end: how long what still
            arrives is read and thrown away, so that the client gets to read the answer.
        handshake_s: TLS handshake.
    """

    keep_alive_s: float = 75.0
    head_s: float = 30.0
    max_head_bytes: int = 32 * 2**10
    max_head_fields: int = 128
    body_grace_s: float = 30.0
    body_min_rate: float = 16 * 2**10
    max_body_bytes: int = 16 * 2**20
    slow_client_timeout_s: float = 30.0
    linger_s: float = 5.0
    handshake_s: float = 10.0

    @classmethod
    def from_config(cls, config: ServerConfig) -> Limits:
        """Return the limits that the user chose; the rest are the defaults above."""
        return cls(
            max_body_bytes=config.max_body_bytes,
            slow_client_timeout_s=config.slow_client_timeout_s,
        )
