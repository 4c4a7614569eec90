"""Speaks ASGI to an app in memory: no sockets, so it works, and stays exact, under a mock clock.

A ``Call`` is one request in flight. It can be looked at while it runs (``status``, ``events``),
hung up on at any moment (``disconnect``) or sent its body piece by piece.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self

import trio

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["AsgiClient", "Call"]


class Call:
    """One request and what has been answered so far.

    Attributes:
        status: HTTP status; 0 while no head has come.
        headers: Header fields of the answer, names in lower case.
        chunks: Body messages, in order, empty ones left out.
        complete: The body's end has come.
        finished: Set when the app has returned.
    """

    def __init__(self, app: Any, scope: dict[str, Any]) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []
        self.complete = False
        self.finished = trio.Event()
        self._app = app
        self._scope = scope
        self._to_app, self._from_client = trio.open_memory_channel[dict[str, Any]](1000)

    def send_body(self, data: bytes, *, more: bool = False) -> None:
        """Send a piece of the body."""
        message = {"type": "http.request", "body": data, "more_body": more}
        self._to_app.send_nowait(message)

    def disconnect(self) -> None:
        """Leave."""
        self._to_app.send_nowait({"type": "http.disconnect"})

    async def run(self) -> Self:
        """Be served, to the end."""
        try:
            await self._app(self._scope, self._from_client.receive, self._send)
        finally:
            self.finished.set()
            self._to_app.close()
            self._from_client.close()
        return self

    async def _send(self, message: Any) -> None:
        await trio.lowlevel.checkpoint()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            fields = message["headers"]
            self.headers = {k.decode().lower(): v.decode("latin-1") for k, v in fields}
        elif message["type"] == "http.response.body":
            if message["body"]:
                self.chunks.append(bytes(message["body"]))
            self.complete = not message["more_body"]

    @property
    def body(self) -> bytes:
        """All of the body so far."""
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object of a refused request, checked for its shape."""
        assert self.headers["content-type"] == "application/json"
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """The stream's data so far, decoded, ``"[DONE]"`` as it is; comments are left out."""
        blocks = self.body.decode().split("\n\n")
        assert not self.complete or blocks[-1] == ""
        texts = [block[6:] for block in blocks[:-1] if block.startswith("data: ")]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]

    @property
    def pings(self) -> int:
        """Comments so far."""
        return self.body.count(b": ping\n\n")


class AsgiClient:
    """Makes calls to one app."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | list[tuple[str, str]] | None = None,
    ) -> Call:
        """Return a call with its whole body sent: bytes as they are, anything else as JSON."""
        call = self.open_call(method, path, headers=headers)
        data = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        call.send_body(data)
        return call

    def open_call(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | list[tuple[str, str]] | None = None,
    ) -> Call:
        """Return a call whose body is still to be sent."""
        pairs = headers if isinstance(headers, list) else list((headers or {}).items())
        scope = {
            "type": "http",
            "http_version": "1.1",
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in pairs],
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 8000),
            "state": {},
            "extensions": {},
        }
        return Call(self._app, scope)

    async def get(self, path: str, **kwargs: Any) -> Call:
        """GET, to the end."""
        return await self.call("GET", path, **kwargs).run()

    async def post(self, path: str, body: object = None, **kwargs: Any) -> Call:
        """POST, to the end."""
        return await self.call("POST", path, body, **kwargs).run()
