"""``/sleep``, ``/wake_up`` and ``/is_sleeping``: give the engine's memory back, and take it again.

Behind ``--enable-admin``, with vLLM's paths. Asleep, the engine's process is gone, at either level:
its weights, its cache and all that its libraries hold.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
from quart import Blueprint, Response, request

from trioengine.client.engine_status import EngineState
from trioengine.errors import InvalidRequestError

if TYPE_CHECKING:
    from trioengine.http.front import Front

__all__ = ["sleep_routes"]


def sleep_routes(front: Front) -> Blueprint:
    """Return ``POST /sleep`` and ``/wake_up`` and ``GET /is_sleeping``."""
    routes = Blueprint("sleep", __name__)
    client = front.client

    def answer() -> Response:
        asleep = client.status.state is EngineState.SLEEPING
        return Response(
            msgspec.json.encode({"is_sleeping": asleep}), content_type="application/json"
        )

    @routes.post("/sleep")
    async def sleep() -> Response:
        _check_arguments({"level", "timeout"})
        if (level := request.args.get("level", "1")) not in {"1", "2"}:
            raise InvalidRequestError(f"level must be 1 or 2, got {level!r}", param="level")
        await client.nap.sleep(_timeout_s(front.config.drain_timeout_s))
        return answer()

    @routes.post("/wake_up")
    async def wake_up() -> Response:
        _check_arguments(set())
        await client.nap.wake_up()
        return answer()

    @routes.get("/is_sleeping")
    async def is_sleeping() -> Response:
        return answer()

    return routes


def _check_arguments(known: set[str]) -> None:
    """Refuse what cannot be honoured. Raises ``InvalidRequestError``."""
    if unknown := sorted(set(request.args) - known):
        raise InvalidRequestError(f"there is no argument {unknown[0]!r}", param=unknown[0])


def _timeout_s(default_s: float) -> float:
    text = request.args.get("timeout")
    try:
        timeout_s = default_s if text is None else float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0.0 <= timeout_s < math.inf:
        raise InvalidRequestError(
            f"timeout must be a number of seconds, got {text!r}", param="timeout"
        )
    return timeout_s
