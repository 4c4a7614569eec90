"""The route of ``/v1/responses``: a chat in other words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quart import Blueprint, Response

from trioengine.errors import InvalidRequestError
from trioengine.http.bodies import BodyDecoder
from trioengine.http.chat import chat_job
from trioengine.http.checks import TokenLimit
from trioengine.http.generate import generate
from trioengine.http.replies import new_head
from trioengine.http.responses.replies import ResponseReplies
from trioengine.http.responses.request import REFUSED, ResponseRequest, as_chat, text_shape

if TYPE_CHECKING:
    from trioengine.http.convert import Job
    from trioengine.http.front import Front
    from trioengine.http.replies import Replies

__all__ = ["response_routes"]


class _ResponseEndpoint:
    """Reads one request and writes its answer, which repeats what was asked."""

    def __init__(self, decoder: BodyDecoder[ResponseRequest]) -> None:
        self._decoder = decoder
        self._body = ResponseRequest(input="")

    async def read(self, front: Front, data: bytes) -> Job:
        """Return the job that this body asks for. Raises ``InvalidRequestError``."""
        self._body = await front.decode(self._decoder, data)
        limit = TokenLimit(
            requested=self._body.max_output_tokens,
            default=None,
            param="max_output_tokens",
            prompt_param="input",
        )
        chat = as_chat(self._body)
        try:
            return await chat_job(front, chat, limit, text_shape(self._body))
        except InvalidRequestError as error:
            error.param = _own_name(error.param)
            raise

    def replies(self, job: Job, system_fingerprint: str) -> Replies:
        """Return the way to write the answer to ``job``."""
        return ResponseReplies(new_head("resp_", job.model, system_fingerprint), self._body)


def _own_name(param: str | None) -> str | None:
    """Return what this endpoint calls a parameter of a chat."""
    if param is None:
        return None
    if param.startswith("messages"):
        return "input"
    return {"reasoning_effort": "reasoning.effort"}.get(param, param.replace("].function.", "]."))


def response_routes(front: Front) -> Blueprint:
    """Return the route."""
    routes = Blueprint("responses", __name__)
    decoder = BodyDecoder(ResponseRequest, REFUSED)

    @routes.post("/v1/responses")
    async def responses() -> Response:
        return await generate(front, _ResponseEndpoint(decoder))

    return routes
