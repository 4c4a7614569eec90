"""``GET /v1/models`` and ``/v1/models/{id}``: what is served, and honestly what computes it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
from quart import Blueprint, Response

from trioengine.client.engine_status import EngineState
from trioengine.http.answers import ModelCard, ModelList
from trioengine.http.checks import check_model

if TYPE_CHECKING:
    from trioengine.http.front import Front

__all__ = ["model_routes"]


def model_routes(front: Front) -> Blueprint:
    """Return the routes. A dead engine is a 503 also here: some proxies probe this path."""
    routes = Blueprint("models", __name__)
    created = int(time.time())

    @routes.get("/v1/models")
    async def list_models() -> Response:
        return _json(ModelList(data=_cards(front, created)))

    @routes.get("/v1/models/<path:model_id>")
    async def get_model(model_id: str) -> Response:
        cards = {card.id: card for card in _cards(front, created)}
        return _json(cards[check_model(model_id, tuple(cards))])

    return routes


def _cards(front: Front, created: int) -> list[ModelCard]:
    if front.client.status.state is EngineState.DEAD:
        front.refuse_unless_ready()
    model = front.model
    return [
        ModelCard(
            id=name,
            created=created,
            root=model.name,
            max_model_len=model.max_model_len,
            runner=model.runner,
            simulated=model.simulated,
        )
        for name in front.model_names
    ]


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), content_type="application/json")
