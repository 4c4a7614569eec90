"""``POST /v1/completions``: text, token ids, or a list of either, without a template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio
from quart import Blueprint, Response

from trioengine.errors import InvalidRequestError
from trioengine.http.bodies import BodyDecoder
from trioengine.http.convert import (
    DEFAULT_MAX_TOKENS,
    TokenLimit,
    check_common,
    check_model,
    make_job,
)
from trioengine.http.generate import generate
from trioengine.http.prompts import check_text_length, read_prompts
from trioengine.http.replies import CompletionReplies, completion_head
from trioengine.http.schemas import CompletionRequest

if TYPE_CHECKING:
    from trioengine.http.convert import Job
    from trioengine.http.front import Front
    from trioengine.http.prompts import Prompt
    from trioengine.http.replies import Replies

__all__ = ["CompletionsEndpoint", "completion_routes"]

_IDS_PER_CHECKPOINT: Final = 65_536  # under 2 ms of decoding


class CompletionsEndpoint:
    """Reads completion requests and writes their answers."""

    def __init__(self) -> None:
        self._decoder = BodyDecoder(CompletionRequest)

    async def read(self, front: Front, data: bytes) -> Job:
        """Return the job that this body asks for. Raises ``InvalidRequestError``."""
        body = self._decoder.decode(data)
        model = check_model(body.model, front.model_names)
        if body.logprobs is not None:
            raise InvalidRequestError(
                "'logprobs' is not supported by this server.", param="logprobs"
            )
        prompts = await _read_prompts(front, body)
        max_sequences = front.client.admission.capacity
        check_common(body, max_sequences=max_sequences, num_prompts=len(prompts))
        encoded = await self._encode(front, body, prompts)
        return make_job(body, encoded, _token_limit(body), front.model, model)

    def replies(self, job: Job, system_fingerprint: str) -> Replies:
        """Return the way to write the answer to ``job``."""
        head = completion_head(job.model, system_fingerprint)
        return CompletionReplies(head, include_usage=job.include_usage)

    async def _encode(
        self, front: Front, body: CompletionRequest, prompts: list[Prompt]
    ) -> list[list[int]]:
        """Return the token ids of each prompt; those given as ids are taken as they are."""
        num_chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        special = body.add_special_tokens is not False
        tokenizer = front.tokenizer()

        def work() -> list[list[int]]:
            return [
                tokenizer.encode(prompt, add_special_tokens=special)
                if isinstance(prompt, str)
                else prompt
                for prompt in prompts
            ]

        encoded = await front.offload(work, num_chars=num_chars)
        if not all(encoded):
            raise InvalidRequestError(
                "A prompt is empty, and this model has no token that begins a text.",
                param="prompt",
            )
        return encoded


def completion_routes(front: Front) -> Blueprint:
    """Return the route."""
    routes = Blueprint("completions", __name__)
    endpoint = CompletionsEndpoint()

    @routes.post("/v1/completions")
    async def completions() -> Response:
        return await generate(front, endpoint)

    return routes


async def _read_prompts(front: Front, body: CompletionRequest) -> list[Prompt]:
    """Return the prompts, letting others run while a long list of ids is decoded."""
    info, prompts, since_checkpoint = front.model, [], 0
    for prompt in read_prompts(
        body.prompt, max_model_len=info.max_model_len, vocab_size=info.vocab_size
    ):
        if isinstance(prompt, str):
            check_text_length(len(prompt), info.max_model_len, param="prompt")
        prompts.append(prompt)
        since_checkpoint += len(prompt)
        if since_checkpoint > _IDS_PER_CHECKPOINT:
            since_checkpoint = 0
            await trio.lowlevel.checkpoint()
    return prompts


def _token_limit(body: CompletionRequest) -> TokenLimit:
    return TokenLimit(
        requested=body.max_tokens,
        default=DEFAULT_MAX_TOKENS,
        param="max_tokens",
        prompt_param="prompt",
    )
