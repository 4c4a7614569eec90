"""Every route of the API with what it takes and gives: what the description is made from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from trioengine.http.answers import ChatCompletion, Completion, ModelCard, ModelList
from trioengine.http.cancel import Cancellation
from trioengine.http.embeddings import EmbeddingList, EmbeddingRequest
from trioengine.http.responses.request import ResponseRequest
from trioengine.http.schemas import ChatCompletionRequest, CompletionRequest
from trioengine.http.tokenize import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest

if TYPE_CHECKING:
    import msgspec

__all__ = ["OPERATIONS", "Operation"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One route and method.

    Attributes:
        method: Lower case.
        path: With its ``{variables}``.
        summary: One clause.
        answer: Type of the JSON, or the media type of what is none.
        body: Type of the request's body.
        streams: Server-sent events if the body says so.
        open: Needs no key.
        admin: Only with ``--enable-admin``.
    """

    method: str
    path: str
    summary: str
    answer: Any
    body: type[msgspec.Struct] | None = None
    streams: bool = False
    open: bool = False
    admin: bool = False


OPERATIONS: Final = (
    Operation(
        method="post",
        path="/v1/chat/completions",
        summary="Go on with a conversation",
        body=ChatCompletionRequest,
        answer=ChatCompletion,
        streams=True,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        summary="Go on with a text",
        body=CompletionRequest,
        answer=Completion,
        streams=True,
    ),
    Operation(
        method="post",
        path="/v1/responses",
        summary="Go on with a conversation, in items",
        body=ResponseRequest,
        answer=dict[str, Any],
        streams=True,
    ),
    Operation(
        method="post",
        path="/v1/embeddings",
        summary="Make a vector of each text",
        body=EmbeddingRequest,
        answer=EmbeddingList,
    ),
    Operation(
        method="post",
        path="/v1/requests/{response_id}/cancel",
        summary="End a request by the id of its answer; confirmed by the engine",
        answer=Cancellation,
    ),
    Operation(
        method="post",
        path="/tokenize",
        summary="Text or messages to token ids",
        body=TokenizeRequest,
        answer=Tokenized,
    ),
    Operation(
        method="post",
        path="/detokenize",
        summary="Token ids to text",
        body=DetokenizeRequest,
        answer=Detokenized,
    ),
    Operation(method="get", path="/v1/models", summary="What is served", answer=ModelList),
    Operation(
        method="get",
        path="/v1/models/{model_id}",
        summary="One of the models that are served",
        answer=ModelCard,
    ),
    Operation(
        method="get", path="/health", summary="Can it work?", answer=dict[str, Any], open=True
    ),
    Operation(
        method="get",
        path="/health/live",
        summary="False where only a restart helps",
        answer=dict[str, Any],
        open=True,
    ),
    Operation(
        method="get",
        path="/health/ready",
        summary="Are requests welcome?",
        answer=dict[str, Any],
        open=True,
    ),
    Operation(method="get", path="/metrics", summary="Prometheus metrics", answer="text/plain"),
    Operation(method="get", path="/version", summary="The version", answer=dict[str, str]),
    Operation(method="get", path="/openapi.json", summary="This", answer=dict[str, Any]),
    Operation(method="get", path="/docs", summary="This, for people", answer="text/html"),
    Operation(
        method="get",
        path="/is_sleeping",
        summary="Was the engine put to sleep?",
        answer=dict[str, bool],
        admin=True,
    ),
    *(
        Operation(
            method="post", path=f"/{name}", summary=summary, answer=dict[str, Any], admin=True
        )
        for name, summary in (
            ("start_profile", "Begin a profile of the engine"),
            ("stop_profile", "End it and write it"),
            ("reset_prefix_cache", "Forget cached prefixes"),
            ("sleep", "Give the engine's memory back once nothing runs"),
            ("wake_up", "Take it again"),
        )
    ),
)
