"""Server-sent events, as OpenAI streams use them: ``data:`` frames and comments. Pure.

Source: WHATWG HTML, section 9.2 (server-sent events).
"""

from __future__ import annotations

from typing import Final

__all__ = ["CONTENT_TYPE", "DATA", "DONE", "END", "HEADERS", "HEARTBEAT_S", "PING", "event"]

CONTENT_TYPE: Final = "text/event-stream; charset=utf-8"
# A cache or a buffering proxy between would undo streaming.
HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

DATA: Final = b"data: "
END: Final = b"\n\n"
DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"  # a comment: clients skip it, proxies see life
HEARTBEAT_S: Final = 15.0  # longest silence on a stream


def event(data: bytes) -> bytes:
    """Frame one line of JSON. It must hold no line break, which encoded JSON never does."""
    return DATA + data + END
