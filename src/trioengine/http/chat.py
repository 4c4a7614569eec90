"""``POST /v1/chat/completions``: a conversation through the model's template."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from quart import Blueprint, Response

from trioengine.errors import InvalidRequestError
from trioengine.http.bodies import BodyDecoder
from trioengine.http.chat_prompt import read_chat
from trioengine.http.checks import TokenLimit, check_chat, check_model, checked_params
from trioengine.http.chunks import ChatReplies
from trioengine.http.convert import make_job, truncator
from trioengine.http.details import Details, Prompt
from trioengine.http.generate import generate
from trioengine.http.replies import new_head
from trioengine.http.schemas import ChatCompletionRequest
from trioengine.http.tools.formats import NEEDS_SPECIAL_TOKENS
from trioengine.structured import StructuredOutput

if TYPE_CHECKING:
    from trioengine.http.chat_prompt import ChatPrompt
    from trioengine.http.convert import Job
    from trioengine.http.front import Front
    from trioengine.http.replies import Replies
    from trioengine.sampling_params import SamplingParams

__all__ = ["ChatEndpoint", "chat_job", "chat_routes"]


class ChatEndpoint:
    """Reads chat requests and writes their answers."""

    def __init__(self) -> None:
        self._decoder = BodyDecoder(ChatCompletionRequest)

    async def read(self, front: Front, data: bytes) -> Job:
        """Return the job that this body asks for. Raises ``InvalidRequestError``."""
        body = await front.decode(self._decoder, data)
        return await chat_job(front, body, _token_limit(body))

    def replies(self, job: Job, system_fingerprint: str) -> Replies:
        """Return the way to write the answer to ``job``."""
        head = new_head("chatcmpl-", job.model, system_fingerprint)
        return ChatReplies(head, include_usage=job.include_usage)


async def chat_job(
    front: Front,
    body: ChatCompletionRequest,
    limit: TokenLimit,
    shape: StructuredOutput | None = None,
) -> Job:
    """Return the job that a chat asks for.

    Args:
        front: What the routes share.
        body: The chat.
        limit: Of output tokens.
        shape: What the answer is to be, where ``body`` does not say it itself.

    Raises:
        InvalidRequestError: It asks for nothing that can be done.
    """
    model, info = check_model(body.model, front.model_names), front.model
    check_chat(body)
    max_sequences = front.client.admission.capacity
    params = checked_params(body, limit, info, max_sequences=max_sequences, num_prompts=1)
    if shape is not None:
        if params.structured is not None:
            raise InvalidRequestError(
                f"'{shape.param}' and '{params.structured.param}' cannot both be given.",
                param=params.structured.param,
            )
        params = msgspec.structs.replace(params, structured=shape)
    prompt = await read_chat(front, body, truncator(body, limit, info))
    if prompt.bad_words:
        params = msgspec.structs.replace(params, bad_words_token_ids=prompt.bad_words)
    if prompt.tools is not None and prompt.tools.format in NEEDS_SPECIAL_TOKENS:
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    if prompt.tools is not None and prompt.tools.schema is not None:
        strict = any(tool.function.strict for tool in body.tools or ())
        params = _forced(params, prompt.tools.schema, lenient=not strict)
    if prompt.thinking is not None and params.structured is not None:
        shape = prompt.thinking.before(params.structured)
        params = msgspec.structs.replace(params, structured=shape)
    details = await _details(front, body, prompt)
    return make_job(body, params, [prompt.token_ids], limit, info, model, details)


def chat_routes(front: Front) -> Blueprint:
    """Return the route."""
    routes = Blueprint("chat", __name__)
    endpoint = ChatEndpoint()

    @routes.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        return await generate(front, endpoint)

    return routes


async def _details(front: Front, body: ChatCompletionRequest, prompt: ChatPrompt) -> Details | None:
    """Return what the answer carries beside text; ``None`` for nothing."""
    scored = bool(body.logprobs) or body.prompt_logprobs is not None
    counted = body.return_token_ids or body.wants_usage_so_far
    if not (scored or counted or prompt.echo or prompt.thinking or prompt.tools):
        return None
    return Details(
        vocabulary=await front.vocabulary(),
        prompts=[Prompt(prompt.token_ids, prompt.echo)],
        chat=True,
        num_logprobs=body.num_logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        skip_special_tokens=body.skip_special_tokens is not False,
        thinking=prompt.thinking,
        tools=prompt.tools,
        usage_so_far=body.wants_usage_so_far,
    )


def _forced(params: SamplingParams, schema: str, *, lenient: bool) -> SamplingParams:
    """Let the answer be calls of that schema."""
    if params.structured is not None:
        raise InvalidRequestError(
            "'tool_choice' cannot force a call where another shape is asked of the answer.",
            param="tool_choice",
        )
    structured = StructuredOutput("json", schema, lenient=lenient, param="tools")
    return msgspec.structs.replace(params, structured=structured)


def _token_limit(body: ChatCompletionRequest) -> TokenLimit:
    """``max_completion_tokens`` is the newer name and wins; without either, fill up."""
    newer = body.max_completion_tokens
    return TokenLimit(
        requested=body.max_tokens if newer is None else newer,
        default=None,
        param="max_tokens" if newer is None else "max_completion_tokens",
        prompt_param="messages",
    )
