"""``X-Request-Id``: the client's own where it is short and safe, else one of ours. Pure.

It is for logs and answers only; the engine never sees it, so two requests may share one.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

__all__ = ["HEADER", "request_id"]

HEADER: Final = "X-Request-Id"
# Nothing that could break a header or a log line, or that a terminal would act on.
_SAFE: Final = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")


def request_id(offered: str | None) -> str:
    """Return ``offered`` if it is fit to be echoed, else a fresh id of 32 hex digits."""
    if offered is not None and _SAFE.fullmatch(offered):
        return offered
    return secrets.token_hex(16)
