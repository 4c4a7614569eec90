"""The application: routes, and what holds for all of them.

Every request passes, in this order: an id and a record for the log; the answer to a browser's
preflight; its API key; then its route. Keys are asked for before anything tells which paths exist.
Every failure, wherever it comes from, leaves through one door (``_on_error``) in one shape. Before
all that stands the ``turnstile``, for whoever serves the app to ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from quart import Response
from quart.sessions import NullSession, SessionInterface
from quart_trio import QuartTrio

from trioengine.api_keys import all_keys
from trioengine.http.admin import admin_routes
from trioengine.http.auth import OPEN_RULES, KeyCheck
from trioengine.http.cancel import cancel_routes
from trioengine.http.chat import chat_routes
from trioengine.http.completions import completion_routes
from trioengine.http.connection import current_request, own_connections
from trioengine.http.cors import Cors
from trioengine.http.embeddings import embedding_routes
from trioengine.http.errors import error_response
from trioengine.http.exchange import Exchange
from trioengine.http.front import Front
from trioengine.http.health import health_routes
from trioengine.http.models import model_routes
from trioengine.http.offload import ThreadOffload
from trioengine.http.openapi import openapi_routes
from trioengine.http.responses.endpoint import response_routes
from trioengine.http.sleep import sleep_routes
from trioengine.http.tokenize import tokenize_routes
from trioengine.http.turnstile import Turnstile

if TYPE_CHECKING:
    from collections.abc import Callable

    from quart import Quart
    from quart.wrappers import BaseRequestWebsocket

    from trioengine.client.engine_client import EngineClient
    from trioengine.config import ServerConfig
    from trioengine.http.access_log import AccessRecord
    from trioengine.http.offload import Offload
    from trioengine.text.tokenizer import Tokenizer

__all__ = ["App", "create_app"]


class _NoSessions(SessionInterface):
    """No cookies are read or written; Quart would look for a session's key on every request."""

    _none: Final = NullSession()

    async def open_session(self, app: Quart, request: BaseRequestWebsocket) -> NullSession:
        return self._none

    def is_null_session(self, instance: object) -> bool:
        return True


_ROUTES: Final = (
    model_routes,
    completion_routes,
    chat_routes,
    response_routes,
    embedding_routes,
    tokenize_routes,
    cancel_routes,
)


class App(QuartTrio):
    """A Quart app that answers with and without its ``root_path`` in front.

    Some proxies strip it from the path, some do not; Quart knows only the latter.

    Attributes:
        turnstile: Refuses without the app what a full server has no place for.
    """

    turnstile: Turnstile

    def __init__(self, root_path: str) -> None:
        super().__init__("trioengine", static_folder=None)
        self._prefix = "/" + root_path.strip("/")
        self.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
        self.url_map.strict_slashes = False
        self.url_map.merge_slashes = False  # would redirect; API clients don't follow a POST
        self.session_interface = _NoSessions()  # type: ignore[assignment] # it has no key
        own_connections(self)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope = scope | {"root_path": "", "path": self._without_prefix(scope["path"])}
        await super().__call__(scope, receive, send)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What may stand before a route's path."""
        return ("", self._prefix) if self._prefix != "/" else ("",)

    def _without_prefix(self, path: str) -> str:
        stripped = path.removeprefix(self._prefix)
        inside = stripped != path and stripped[:1] in ("", "/") and self._prefix != "/"
        return (stripped or "/") if inside else path


def create_app(
    client: EngineClient,
    tokenizer_source: Callable[[], Tokenizer],
    config: ServerConfig,
    *,
    offload: Offload | None = None,
) -> App:
    """Return the application.

    Args:
        client: The engine.
        tokenizer_source: Returns the tokenizer of the model being served; called once the engine
            has been ready, for each request, so it must be quick.
        config: As the server was started.
        offload: Where long text is worked on; a few threads by default.

    Raises:
        ConfigError: An API key is empty.
    """
    app = App(config.root_path)
    front = Front(client, config, tokenizer_source, offload or ThreadOffload())
    app.register_blueprint(health_routes(client))
    app.register_blueprint(openapi_routes(admin=config.enable_admin, keys=bool(all_keys(config))))
    for make_routes in _ROUTES:
        app.register_blueprint(make_routes(front))
    if config.enable_admin:
        app.register_blueprint(admin_routes(front))
        app.register_blueprint(sleep_routes(front))
    gate = _Gate(client, KeyCheck(all_keys(config)), Cors(config.allowed_origins))
    gate.guard(app)
    return app


class _Gate:
    """What every request passes on its way in and out."""

    def __init__(self, client: EngineClient, keys: KeyCheck, cors: Cors) -> None:
        self._client = client
        self._keys = keys
        self._cors = cors

    def guard(self, app: App) -> None:
        """Stand before every route of ``app``, those that do not exist included."""
        app.turnstile = Turnstile(
            self._client, self._keys, self._cors, self._finished, prefixes=app.prefixes
        )
        app.before_request(self._on_request)
        app.after_request(self._on_response)
        app.register_error_handler(Exception, self._on_error)

    async def _on_request(self) -> Response | None:
        request = current_request()
        exchange = Exchange.begin(request, self._finished)
        origin = request.field(b"origin")
        exchange.headers |= self._cors.headers(origin)
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            asked = request.headers.get("Access-Control-Request-Headers")
            if (allowed := self._cors.preflight(origin, asked)) is not None:
                return Response(b"", 204, headers=allowed)
        if exchange.record.rule not in OPEN_RULES:
            exchange.key = self._keys.check(request.headers.getlist("Authorization"))
        return None

    async def _on_response(self, response: Response) -> Response:
        exchange = Exchange.of(current_request())
        exchange.record.status = response.status_code
        if current_request().writer is None:  # else it has answered
            for name, value in exchange.headers.items():
                response.headers[name] = value
        return response

    async def _on_error(self, error: Exception) -> Response:
        answer = error_response(error)
        Exchange.of(current_request()).record.outcome = answer.code
        return Response(
            answer.body, answer.status, headers=answer.headers, content_type="application/json"
        )

    def _finished(self, record: AccessRecord) -> None:
        metrics = self._client.metrics
        metrics.requests.inc(record.rule or "other", record.outcome)
        if record.tally is None and record.status >= 400 and record.outcome != "ok":
            metrics.requests_rejected.inc(record.outcome)
