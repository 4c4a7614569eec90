"""``POST /v1/completions``: text, token ids, or a list of either, without a template."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import trio
from quart import Blueprint, Response

from trioengine.errors import InvalidRequestError
from trioengine.http.bodies import BodyDecoder
from trioengine.http.checks import TokenLimit, check_completion, check_model, checked_params
from trioengine.http.chunks import CompletionReplies
from trioengine.http.convert import DEFAULT_MAX_TOKENS, bad_word_ids, make_job, truncator
from trioengine.http.details import Details, Prompt
from trioengine.http.generate import generate
from trioengine.http.prompts import MAX_IDS, check_text_length, read_prompts
from trioengine.http.replies import new_head
from trioengine.http.schemas import CompletionRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioengine.http.convert import Job
    from trioengine.http.front import Front
    from trioengine.http.prompts import Prompt as Given
    from trioengine.http.replies import Replies
    from trioengine.text.tokenizer import Tokenizer

__all__ = ["CompletionsEndpoint", "completion_routes"]

_IDS_PER_CHECKPOINT: Final = 65_536  # under 2 ms of decoding


class CompletionsEndpoint:
    """Reads completion requests and writes their answers."""

    def __init__(self) -> None:
        self._decoder = BodyDecoder(CompletionRequest)

    async def read(self, front: Front, data: bytes) -> Job:
        """Return the job that this body asks for. Raises ``InvalidRequestError``."""
        body = await front.decode(self._decoder, data)
        model, info = check_model(body.model, front.model_names), front.model
        check_completion(body)
        given = await _read_prompts(front, body)
        limit = _token_limit(body)
        max_sequences = front.client.admission.capacity
        params = checked_params(
            body, limit, info, max_sequences=max_sequences, num_prompts=len(given)
        )
        tokenizer, cut = front.tokenizer(), truncator(body, limit, info)
        special = body.add_special_tokens is not False
        bad_words = body.bad_words or ()

        def work() -> tuple[list[list[int]], tuple[tuple[int, ...], ...]]:
            prompts = [
                cut(tokenizer.encode(prompt, add_special_tokens=special))
                if isinstance(prompt, str)
                else cut(prompt)
                for prompt in given
            ]
            encode = partial(tokenizer.encode, add_special_tokens=False)
            return prompts, bad_word_ids(bad_words, encode)

        num_chars = sum(len(text) for text in (*given, *bad_words) if isinstance(text, str))
        prompts, bad_words_ids = await front.offload(work, num_chars=num_chars)
        if not all(prompts):
            raise InvalidRequestError(
                "A prompt is empty, and this model has no token that begins a text.",
                param="prompt",
            )
        if bad_words_ids:
            params = msgspec.structs.replace(params, bad_words_token_ids=bad_words_ids)
        details = await _details(front, body, given, prompts)
        return make_job(body, params, prompts, limit, info, model, details)

    def replies(self, job: Job, system_fingerprint: str) -> Replies:
        """Return the way to write the answer to ``job``."""
        head = new_head("cmpl-", job.model, system_fingerprint)
        return CompletionReplies(head, include_usage=job.include_usage)


def completion_routes(front: Front) -> Blueprint:
    """Return the route."""
    routes = Blueprint("completions", __name__)
    endpoint = CompletionsEndpoint()

    @routes.post("/v1/completions")
    async def completions() -> Response:
        return await generate(front, endpoint)

    return routes


async def _read_prompts(front: Front, body: CompletionRequest) -> list[Given]:
    """Return the prompts, letting others run while a long list of ids is decoded."""
    info, prompts, since_checkpoint = front.model, [], 0
    cuts = body.truncate_prompt_tokens is not None
    for prompt in read_prompts(
        body.prompt,
        max_model_len=max(info.max_model_len, MAX_IDS) if cuts else info.max_model_len,
        vocab_size=info.vocab_size,
    ):
        if isinstance(prompt, str) and not cuts:
            check_text_length(len(prompt), info.max_model_len, param="prompt")
        prompts.append(prompt)
        since_checkpoint += len(prompt)
        if since_checkpoint > _IDS_PER_CHECKPOINT:
            since_checkpoint = 0
            await trio.lowlevel.checkpoint()
    return prompts


async def _details(
    front: Front, body: CompletionRequest, given: Sequence[Given], prompts: list[list[int]]
) -> Details | None:
    """Return what the answer carries beside text; ``None`` for nothing."""
    scored = (body.logprobs, body.prompt_logprobs) != (None, None)
    counted = body.return_token_ids or body.wants_usage_so_far
    if not (scored or counted or body.echo or body.picks_best):
        return None
    tokenizer = front.tokenizer()
    vocabulary = await front.vocabulary()

    def echoes() -> list[Prompt]:
        cuts = body.truncate_prompt_tokens is not None
        return [
            Prompt(ids, _echo(tokenizer, prompt, ids, cuts=cuts) if body.echo else None)
            for prompt, ids in zip(given, prompts, strict=True)
        ]

    return Details(
        vocabulary=vocabulary,
        prompts=await front.offload(echoes, num_chars=sum(map(len, prompts)) if body.echo else 0),
        chat=False,
        num_logprobs=body.logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        skip_special_tokens=body.skip_special_tokens is not False,
        usage_so_far=body.wants_usage_so_far,
    )


def _echo(tokenizer: Tokenizer, given: Given, ids: list[int], *, cuts: bool) -> str:
    """Return the prompt's text: the client's own, unless it came as ids or was cut."""
    if isinstance(given, str) and not cuts:
        return given
    return tokenizer.decode(ids, skip_special_tokens=False)


def _token_limit(body: CompletionRequest) -> TokenLimit:
    return TokenLimit(
        requested=body.max_tokens,
        default=DEFAULT_MAX_TOKENS,
        param="max_tokens",
        prompt_param="prompt",
    )
