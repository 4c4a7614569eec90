"""What the routes share: the engine's client, the configuration, the tokenizer.

Also the two questions that every route of a model asks first: can the server take this, and what
does it serve?
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import TYPE_CHECKING, TypeVar

import msgspec

from trioengine.errors import InvalidRequestError, UnavailableError
from trioengine.http.large_bodies import LARGE_BYTES
from trioengine.http.open_requests import OpenRequests
from trioengine.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.client.engine_client import EngineClient
    from trioengine.config import ServerConfig
    from trioengine.http.bodies import BodyDecoder
    from trioengine.http.offload import Offload
    from trioengine.protocol import ModelInfo
    from trioengine.text.tokenizer import Tokenizer
    from trioengine.text.vocabulary import Vocabulary

__all__ = ["Front", "fingerprint"]

Body = TypeVar("Body", bound=msgspec.Struct)


@dataclasses.dataclass(frozen=True, slots=True)
class Front:
    """One server's front end.

    Attributes:
        client: The engine, whichever incarnation.
        config: As the server was started.
        tokenizer: Returns the model's tokenizer; asked only once a model is known.
        offload: Where long text is worked on.
        open_requests: What can be cancelled.
    """

    client: EngineClient
    config: ServerConfig
    tokenizer: Callable[[], Tokenizer]
    offload: Offload
    open_requests: OpenRequests = dataclasses.field(default_factory=OpenRequests)

    async def decode(self, decoder: BodyDecoder[Body], data: bytes) -> Body:
        """Return a body, a large one decoded beside the loop. Raises ``InvalidRequestError``."""
        size = len(data) if len(data) > LARGE_BYTES else 0
        return await self.offload(lambda: decoder.decode(data), num_chars=size)

    def refuse_unless_ready(self) -> None:
        """Raise what a new request gets in the engine's present state, if that is an error.

        Raises:
            UnavailableError: Starting, draining, stalled, dead, …
        """
        if (refusal := self.client.status.refusal()) is not None:
            raise refusal

    def refuse_unless_generating(self) -> None:
        """Raise for a request that wants text of a model that makes none.

        Raises:
            InvalidRequestError: It makes embeddings.
        """
        if self.model.embedding is not None:
            raise InvalidRequestError(
                f"The model '{self.model.name}' makes embeddings and generates no text; ask "
                "/v1/embeddings.",
                param="model",
            )

    @property
    def model(self) -> ModelInfo:
        """The model that is served.

        Raises:
            UnavailableError: None is loaded yet.
        """
        if self.client.model is None:
            raise self.client.status.refusal() or UnavailableError(
                "no model is loaded yet", code="starting", retry_after_s=1.0
            )
        return self.client.model

    async def vocabulary(self) -> Vocabulary:
        """Return the bytes and text of each token, read in a thread when they are first needed."""
        tokenizer = self.tokenizer()
        if tokenizer.has_read_vocabulary:
            return tokenizer.vocabulary
        return await self.offload(lambda: tokenizer.vocabulary, num_chars=tokenizer.vocab_size)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that a request may use, the first by default."""
        return self.config.served_model_names or (self.model.name,)


@functools.lru_cache(maxsize=8)
def fingerprint(model: ModelInfo) -> str:
    """Return ``system_fingerprint``: the same for the same software, model and arithmetic."""
    source = f"{__version__} {model.name} {model.runner}".encode()
    return f"fp_{hashlib.blake2b(source, digest_size=5).hexdigest()}"
