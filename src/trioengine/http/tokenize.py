"""``POST /tokenize`` and ``/detokenize``: what the model would read, and what its tokens spell.

Shapes as in vLLM. Neither needs the engine, only the tokenizer, which comes with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw
from quart import Blueprint, Response

from trioengine.errors import InvalidRequestError
from trioengine.http.bodies import BodyDecoder
from trioengine.http.chat_prompt import read_chat
from trioengine.http.checks import check_chat, check_model
from trioengine.http.connection import current_request
from trioengine.http.prompts import MAX_IDS, check_token_range
from trioengine.http.schemas import NOT_SAID, ChatCompletionRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.http.front import Front

__all__ = ["DetokenizeRequest", "Detokenized", "TokenizeRequest", "Tokenized", "tokenize_routes"]

_PER_PIECE: Final = 65_536  # of a list that is written: 2 ms

_NO_MESSAGES: Final = (NOT_SAID, Raw(b"null"))
_ids: Final = msgspec.json.Decoder(list[int])


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /tokenize``: a ``prompt``, or ``messages`` with the fields of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Raw = NOT_SAID
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Tokenized(msgspec.Struct, kw_only=True):
    """Answer of ``/tokenize``. ``token_strs``: the vocabulary's own spelling of each token."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: Raw = NOT_SAID


class Detokenized(msgspec.Struct):
    """Answer of ``/detokenize``; special tokens are spelled, too."""

    prompt: str


def tokenize_routes(front: Front) -> Blueprint:
    """Return both routes."""
    routes = Blueprint("tokenize", __name__)
    bodies = BodyDecoder(TokenizeRequest)
    chats = BodyDecoder(ChatCompletionRequest)
    lists = BodyDecoder(DetokenizeRequest)

    @routes.post("/tokenize")
    async def tokenize() -> Response:
        data = await _body(front)
        body = await front.decode(bodies, data)
        check_model(body.model, front.model_names)
        if (body.prompt is None) is (body.messages in _NO_MESSAGES):
            raise InvalidRequestError(
                "Exactly one of 'prompt' and 'messages' is required.", param="prompt"
            )
        if body.prompt is None:
            ids = await _chat_ids(front, await front.decode(chats, data))
        else:
            ids = await _text_ids(front, body.prompt, body.add_special_tokens is not False)
        strings = await _strings(front, ids) if body.return_token_strs else None
        answer = Tokenized(
            count=len(ids),
            max_model_len=front.model.max_model_len,
            tokens=ids,
            token_strs=strings,
        )
        return await _json(front, lambda: _encoded(answer), len(ids))

    @routes.post("/detokenize")
    async def detokenize() -> Response:
        body = await front.decode(lists, await _body(front))
        check_model(body.model, front.model_names)
        vocab_size, tokenizer = front.model.vocab_size, front.tokenizer()

        def work() -> Detokenized:
            ids = _read_tokens(body.tokens, vocab_size)
            return Detokenized(tokenizer.decode(ids, skip_special_tokens=False))

        size = len(bytes(body.tokens))
        return await _json(front, lambda: msgspec.json.encode(work()), size)

    return routes


async def _body(front: Front) -> bytes:
    """Return the body of a request that has a place while it is worked on."""
    front.refuse_unless_ready()
    request = current_request()
    request.owned.enter_context(front.client.admission.reserve())
    return await request.read_body()


def _read_tokens(raw: Raw, vocab_size: int) -> list[int]:
    data = bytes(raw)
    if (least := data.count(b",") + 1) > MAX_IDS:
        raise InvalidRequestError(
            f"'tokens' takes at most {MAX_IDS} ids, got {least}.", param="tokens"
        )
    try:
        ids = _ids.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        raise InvalidRequestError("'tokens' must be a list of token ids.", param="tokens") from None
    if ids:
        check_token_range(ids, vocab_size, param="tokens")
    return ids


async def _chat_ids(front: Front, body: ChatCompletionRequest) -> list[int]:
    check_chat(body)
    return (await read_chat(front, body, lambda ids: ids)).token_ids


async def _text_ids(front: Front, text: str, special: bool) -> list[int]:
    tokenizer = front.tokenizer()
    return await front.offload(
        lambda: tokenizer.encode(text, add_special_tokens=special), num_chars=len(text)
    )


async def _strings(front: Front, ids: list[int]) -> list[str]:
    tokenizer = front.tokenizer()
    return await front.offload(lambda: tokenizer.token_strings(ids), num_chars=4 * len(ids))


async def _json(front: Front, encoded: Callable[[], bytes], size: int) -> Response:
    return Response(await front.offload(encoded, num_chars=size), content_type="application/json")


def _encoded(answer: Tokenized) -> bytes:
    """Return the answer as JSON, written in pieces, between which other threads get a turn."""
    empty: list[str] | None = None if answer.token_strs is None else []
    whole = msgspec.json.encode(msgspec.structs.replace(answer, tokens=[], token_strs=empty))
    for name, values in ((b"tokens", answer.tokens), (b"token_strs", answer.token_strs or ())):
        pieces = (
            msgspec.json.encode(values[start : start + _PER_PIECE])[1:-1]
            for start in range(0, len(values), _PER_PIECE)
        )
        whole = whole.replace(b'"%s":[]' % name, b'"%s":[%s]' % (name, b",".join(pieces)), 1)
    return whole
