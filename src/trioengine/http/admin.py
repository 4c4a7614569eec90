"""Control calls to the engine, for operators: profile, reset the prefix cache.

Behind ``--enable-admin``; where that is off, there is nothing at these paths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from quart import Blueprint, Response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trioengine.http.front import Front

__all__ = ["METHODS", "admin_routes"]

METHODS: Final = ("start_profile", "stop_profile", "reset_prefix_cache")


def admin_routes(front: Front) -> Blueprint:
    """Return ``POST /start_profile``, ``/stop_profile`` and ``/reset_prefix_cache``."""
    routes = Blueprint("admin", __name__)
    for method in METHODS:
        routes.add_url_rule(f"/{method}", method, _calling(front, method), methods=["POST"])
    return routes


def _calling(front: Front, method: str) -> Callable[[], Awaitable[Response]]:
    async def call() -> Response:
        front.refuse_unless_ready()
        result = await front.client.call(method, {})
        body = msgspec.json.encode({"status": "ok", "result": result})
        return Response(body, content_type="application/json")

    return call
