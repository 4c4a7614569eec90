"""``POST /v1/chat/completions``: a conversation through the model's template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quart import Blueprint, Response

from trioengine.errors import InvalidRequestError
from trioengine.http.bodies import BodyDecoder
from trioengine.http.convert import TokenLimit, check_common, check_model, make_job
from trioengine.http.generate import generate
from trioengine.http.messages import normalise, template_arguments
from trioengine.http.prompts import check_text_length
from trioengine.http.replies import ChatReplies, chat_head
from trioengine.http.schemas import ChatCompletionRequest

if TYPE_CHECKING:
    from trioengine.http.convert import Job
    from trioengine.http.front import Front
    from trioengine.http.replies import Replies

__all__ = ["ChatEndpoint", "chat_routes"]

# A message costs the template some work beyond its content's length.
_CHARS_PER_MESSAGE = 64


class ChatEndpoint:
    """Reads chat requests and writes their answers."""

    def __init__(self) -> None:
        self._decoder = BodyDecoder(ChatCompletionRequest)

    async def read(self, front: Front, data: bytes) -> Job:
        """Return the job that this body asks for. Raises ``InvalidRequestError``."""
        body = self._decoder.decode(data)
        model = check_model(body.model, front.model_names)
        check_common(body, max_sequences=front.client.admission.capacity, num_prompts=1)
        _refuse_logprobs(body)
        prompt = await self._encode(front, body)
        return make_job(body, [prompt], _token_limit(body), front.model, model)

    def replies(self, job: Job, system_fingerprint: str) -> Replies:
        """Return the way to write the answer to ``job``."""
        head = chat_head(job.model, system_fingerprint)
        return ChatReplies(head, include_usage=job.include_usage)

    async def _encode(self, front: Front, body: ChatCompletionRequest) -> list[int]:
        messages = normalise(body.messages)
        arguments = template_arguments(body.chat_template_kwargs)
        num_chars = sum(len(turn["content"]) + _CHARS_PER_MESSAGE for turn in messages)
        tokenizer, max_model_len = front.tokenizer(), front.model.max_model_len

        def work() -> list[int]:
            text = tokenizer.render_chat(
                messages, add_generation_prompt=body.add_generation_prompt is not False, **arguments
            )
            check_text_length(len(text), max_model_len, param="messages")
            return tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))

        prompt = await front.offload(work, num_chars=num_chars)
        if not prompt:
            raise InvalidRequestError("These messages make an empty prompt.", param="messages")
        return prompt


def chat_routes(front: Front) -> Blueprint:
    """Return the route."""
    routes = Blueprint("chat", __name__)
    endpoint = ChatEndpoint()

    @routes.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        return await generate(front, endpoint)

    return routes


def _token_limit(body: ChatCompletionRequest) -> TokenLimit:
    """``max_completion_tokens`` is the newer name and wins; without either, fill up."""
    newer = body.max_completion_tokens
    return TokenLimit(
        requested=body.max_tokens if newer is None else newer,
        default=None,
        param="max_tokens" if newer is None else "max_completion_tokens",
        prompt_param="messages",
    )


def _refuse_logprobs(body: ChatCompletionRequest) -> None:
    refused: dict[str, Any] = {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    for name, value in refused.items():
        if value:
            raise InvalidRequestError(f"'{name}' is not supported by this server.", param=name)
