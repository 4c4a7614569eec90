"""Liveness, readiness, metrics, version: answered from what is known, never by asking the engine.

So they answer in any state, under any load, and without a place in the queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import trio
from quart import Blueprint, Response

from trioengine.client.engine_status import SETTLE_S, EngineState
from trioengine.version import __version__

if TYPE_CHECKING:
    from trioengine.client.engine_client import EngineClient
    from trioengine.client.engine_status import EngineStatus

__all__ = ["health_routes", "live", "ready"]

Verdict = tuple[int, dict[str, Any]]


def live(client: EngineClient) -> Verdict:
    """Return status and body for "should this process be restarted?"."""
    status = client.status
    # Waiting helps in every other state; in these only a restart does.
    beyond_waiting = status.state is EngineState.DEAD or status.stall
    return (503 if beyond_waiting else 200), _describe(client)


def ready(client: EngineClient, *, full_is_ready: bool) -> Verdict:
    """Return status and body for "should requests be sent here?"."""
    body = _describe(client)
    if client.status.state is not EngineState.READY:
        return 503, body
    if not full_is_ready and client.admission.full:
        return 503, body | {"status": "full", "reason": "the queue is full"}
    return 200, body


def health_routes(client: EngineClient) -> Blueprint:
    """Return ``/health``, ``/health/live``, ``/health/ready``, ``/metrics`` and ``/version``."""
    routes = Blueprint("health", __name__)

    @routes.get("/health")
    async def health() -> Response:
        await _settle(client)
        return _answer(ready(client, full_is_ready=True))

    @routes.get("/health/live")
    async def health_live() -> Response:
        await _settle(client)
        return _answer(live(client))

    @routes.get("/health/ready")
    async def health_ready() -> Response:
        await _settle(client)
        return _answer(ready(client, full_is_ready=False))

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(client.metrics.render(), content_type=client.metrics.content_type)

    @routes.get("/version")
    async def version() -> Response:
        return _answer((200, {"version": __version__}))

    return routes


async def _settle(client: EngineClient) -> None:
    """Let a death that has just been seen find its cause; say what is known after 50 ms."""
    if client.status.death.seen.is_set():
        with trio.move_on_after(SETTLE_S):
            await client.status.death.wait_settled()


def _reason(status: EngineStatus) -> str:
    """Return why; a stall is told beside what it delays: the end, or falling asleep."""
    if not status.stall or status.state is EngineState.STALLED:
        return status.reason
    return f"{status.reason}; the engine is stalled: {status.stall}"


def _describe(client: EngineClient) -> dict[str, Any]:
    status = client.status
    body: dict[str, Any] = {
        "status": str(status.state),
        "reason": _reason(status),
        "since_s": round(trio.current_time() - status.since_s, 3),
    }
    if status.progress is not None:
        phase, fraction = status.progress
        body |= {"phase": phase, "progress": round(fraction, 3)}
    return body


def _answer(verdict: Verdict) -> Response:
    status, body = verdict
    return Response(msgspec.json.encode(body), status, content_type="application/json")
