"""``POST /v1/embeddings``: text or token ids → one vector each, as numbers or as base64.

The fields are OpenAI's, and vLLM's where it has more. Which pooling makes a vector of a text is the
checkpoint's own business.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import trio
from msgspec import Raw
from quart import Blueprint, Response

from trioengine.client.engine_client import SequenceRequest
from trioengine.errors import InternalError, InvalidRequestError
from trioengine.http.bodies import BodyDecoder
from trioengine.http.checks import check_model, check_scheduling
from trioengine.http.connection import current_request
from trioengine.http.exchange import Exchange
from trioengine.http.generate import close_stream
from trioengine.http.prompts import MAX_IDS, read_prompts
from trioengine.http.schemas import NOT_SAID
from trioengine.outputs import Usage
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trioengine.client.request_stream import RequestStream
    from trioengine.http.front import Front
    from trioengine.http.prompts import Prompt
    from trioengine.protocol import EmbeddingInfo, ModelInfo

__all__ = ["REFUSED", "Embedding", "EmbeddingList", "EmbeddingRequest", "embedding_routes"]

# vLLM's fields that would give another vector than the one here -> values that change nothing.
REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "truncation_side": ("right",),
    "normalize": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "messages": (),
}

_PER_CHECKPOINT: Final = 64  # vectors that are written at a time: 2 ms

_PARAMS: Final = SamplingParams(max_tokens=1)
_encode: Final = msgspec.json.Encoder().encode


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/embeddings``. ``input`` is as the ``prompt`` of a completion."""

    model: str | None = None
    input: Raw = NOT_SAID
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    timeout: float | None = None

    truncation_side: Raw = NOT_SAID
    normalize: Raw = NOT_SAID
    embed_dtype: Raw = NOT_SAID
    endianness: Raw = NOT_SAID
    messages: Raw = NOT_SAID


class Embedding(msgspec.Struct, kw_only=True):
    """One vector: numbers, or their little-endian float32 in base64."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    """Answer of ``POST /v1/embeddings``, in the order of the inputs."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class _Tally:
    """What the log counts."""

    def __init__(self, prompt_tokens: int) -> None:
        self._usage = Usage(prompt_tokens, 0)

    @property
    def usage(self) -> Usage:
        return self._usage


def embedding_routes(front: Front) -> Blueprint:
    """Return the route."""
    routes = Blueprint("embeddings", __name__)
    bodies = BodyDecoder(EmbeddingRequest, REFUSED)

    @routes.post("/v1/embeddings")
    async def embeddings() -> Response:
        front.refuse_unless_ready()
        request, exchange = current_request(), Exchange.of(current_request())
        slot = request.owned.enter_context(front.client.admission.reserve())
        body = await front.decode(bodies, await request.read_body())
        model = check_model(body.model, front.model_names)
        _check(body, front.model)
        inputs = await _tokens(front, body)
        deadline_s = exchange.deadline_s(body.timeout, front.config.request_timeout_s)
        await trio.lowlevel.checkpoint_if_cancelled()  # the client may have left in the meantime
        # From here to the callback nothing may wait: a request that is with the engine is owned.
        stream = front.client.open_stream(
            [SequenceRequest(ids, _PARAMS) for ids in inputs],
            slot=slot,
            key=exchange.key,
            priority=body.priority or 0,
            deadline_s=deadline_s,
        )
        request.owned.callback(close_stream, stream, request)
        exchange.record.tally = _Tally(sum(map(len, inputs)))
        vectors = await _vectors(stream)
        answer = await _answer(body, vectors, model, sum(map(len, inputs)))
        return Response(answer, content_type="application/json")

    return routes


def _check(body: EmbeddingRequest, info: ModelInfo) -> None:
    """Check what needs no tokens.

    Raises:
        InvalidRequestError: The model makes no embeddings, or a value is out of range.
    """
    if info.embedding is None:
        raise InvalidRequestError(
            f"The model '{info.name}' generates text and makes no embeddings.", param="model"
        )
    check_scheduling(body.priority, body.timeout)
    _check_dimensions(body.dimensions, info.embedding)
    cut = body.truncate_prompt_tokens
    if cut is not None and cut != -1 and not 1 <= cut <= info.max_model_len:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be -1 or in [1, {info.max_model_len}], got {cut}",
            param="truncate_prompt_tokens",
        )


def _check_dimensions(asked: int | None, info: EmbeddingInfo) -> None:
    if asked is None or asked == info.size or asked in info.dimensions:
        return
    if info.any_dimensions and 1 <= asked < info.size:
        return
    if info.any_dimensions:
        allowed = f"in [1, {info.size}]"
    else:
        allowed = "one of " + ", ".join(map(str, sorted({*info.dimensions, info.size})))
    raise InvalidRequestError(
        f"dimensions must be {allowed} with this model, got {asked}", param="dimensions"
    )


async def _tokens(front: Front, body: EmbeddingRequest) -> list[list[int]]:
    """Return the token ids of each input.

    Raises:
        InvalidRequestError: An input is empty or too long, or there are too many.
    """
    info, tokenizer = front.model, front.tokenizer()
    special = body.add_special_tokens is not False
    given = list(
        read_prompts(body.input, max_model_len=MAX_IDS, vocab_size=info.vocab_size, param="input")
    )
    if len(given) > front.client.admission.capacity:
        raise InvalidRequestError(
            f"This request has {len(given)} inputs; this server holds at most "
            f"{front.client.admission.capacity}.",
            param="input",
        )
    cut = body.truncate_prompt_tokens
    limit = info.max_model_len if cut == -1 else cut

    def encode(prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return prompt[:limit]
        ids = tokenizer.encode(prompt, add_special_tokens=special)
        # What a tokenizer puts at the end, it puts at the end of a shorter text, too.
        return _cut(ids, limit, keep_last=special and tokenizer.ends_texts)

    inputs = await front.offload(
        lambda: [encode(prompt) for prompt in given], num_chars=sum(map(len, given))
    )
    for number, ids in enumerate(inputs):
        _check_length(len(ids), number, info.max_model_len)
    return inputs


def _cut(ids: list[int], limit: int | None, *, keep_last: bool) -> list[int]:
    if limit is None or len(ids) <= limit:
        return ids
    return [*ids[: limit - 1], ids[-1]] if keep_last else ids[:limit]


def _check_length(length: int, number: int, most: int) -> None:
    if length == 0:
        raise InvalidRequestError(f"Input {number} has no tokens.", param="input")
    if length > most:
        raise InvalidRequestError(
            f"This model reads at most {most} tokens, but input {number} has {length}. Shorten it, "
            "or let it be cut with 'truncate_prompt_tokens': -1.",
            param="input",
            code="context_length_exceeded",
        )


async def _vectors(stream: RequestStream) -> list[bytes]:
    """Return the vectors in the order of the inputs, little-endian float32."""
    vectors: dict[int, bytes] = {}
    while not stream.finished:
        for index, delta in await stream.receive():
            if delta.embedding is None:
                raise InternalError("the engine ended an input without an embedding")
            vectors[index] = delta.embedding
    return [vectors[index] for index in range(len(vectors))]


async def _answer(
    body: EmbeddingRequest, vectors: list[bytes], model: str, num_tokens: int
) -> bytes:
    """Write the answer, letting others run while it is long."""
    entries = []
    for index, vector in enumerate(vectors):
        if index % _PER_CHECKPOINT == _PER_CHECKPOINT - 1:
            await trio.lowlevel.checkpoint()
        shorter = _shorten(vector, body.dimensions)
        spelled: list[float] | str
        if body.encoding_format == "base64":
            spelled = base64.b64encode(shorter).decode("ascii")
        else:
            spelled = _numbers(shorter).tolist()
        entries.append(_encode(Embedding(index=index, embedding=spelled)))
    rest = EmbeddingList(data=[], model=model, usage=EmbeddingUsage(num_tokens, num_tokens))
    return _encode(rest).replace(b'"data":[]', b'"data":[' + b",".join(entries) + b"]", 1)


def _shorten(vector: bytes, dimensions: int | None) -> bytes:
    """Return the first ``dimensions`` numbers, scaled to length 1 again."""
    if dimensions is None or len(vector) == 4 * dimensions:
        return vector
    numbers = _numbers(vector[: 4 * dimensions])
    length = math.sqrt(math.fsum(number * number for number in numbers)) or 1.0
    return _bytes(array("f", [number / length for number in numbers]))


def _numbers(data: bytes) -> array[float]:
    numbers = array("f", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _bytes(numbers: array[float]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
