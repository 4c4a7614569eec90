"""The requests of a workload as bytes, and what has to be known of a server before."""

from __future__ import annotations

import http.client
import urllib.parse
from typing import TYPE_CHECKING, Final

import msgspec

from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Target", "build_requests", "find_target"]

ASK_S: Final = 30.0  # for the list of models
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server to be driven.

    Attributes:
        host: Name or address.
        port: TCP port.
        path: What comes before ``/v1``, without a slash at its end.
        model: Name of the model, as requests must give it.
        api_key: Sent as bearer token, if there is one.
    """

    host: str
    port: int
    path: str = ""
    model: str = ""
    api_key: str | None = None

    @property
    def is_local(self) -> bool:
        """It runs on this machine, as far as its address tells."""
        return self.host in LOOPBACK

    @property
    def headers(self) -> dict[str, str]:
        """Header fields of every request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        fields = {"Host": f"{host}:{self.port}", "Connection": "close"}
        if self.api_key is not None:
            fields["Authorization"] = f"Bearer {self.api_key}"
        return fields


class _Entry(msgspec.Struct):
    id: str


class _Entries(msgspec.Struct):
    data: list[_Entry]


def find_target(url: str, api_key: str | None = None) -> Target:
    """Ask the server at ``url`` what its model is called: the first one it lists.

    Args:
        url: Such as ``http://127.0.0.1:8000``; with or without ``/v1``.
        api_key: Key, if the server wants one.

    Raises:
        ConfigError: It is no such URL, or nobody answers there as an OpenAI server does.
    """
    parts = urllib.parse.urlsplit(url)
    try:
        port = parts.port or 80
    except ValueError as error:
        raise ConfigError(f"--url {url}: {error}") from error
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(f"--url {url}: must begin with http://, and TLS is not measured")
    path = parts.path.rstrip("/").removesuffix("/v1")
    target = Target(host=parts.hostname, port=port, path=path, api_key=api_key)
    try:
        status, body = _get(target, f"{path}/v1/models")
        models = msgspec.json.decode(body, type=_Entries).data if status == 200 else []
    except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
        raise ConfigError(f"--url {url}: {error}") from error
    if not models:
        raise ConfigError(f"--url {url}: GET {path}/v1/models names no model (status {status})")
    return msgspec.structs.replace(target, model=models[0].id)


def _get(target: Target, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(target.host, target.port, timeout=ASK_S)
    try:
        connection.request("GET", path, headers=target.headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def build_requests(target: Target, prompts: Sequence[str], output_tokens: int) -> list[bytes]:
    """Return a whole HTTP request for each prompt: greedy, streaming, of a fixed length."""
    return [_build(target, prompt, output_tokens) for prompt in prompts]


def _build(target: Target, prompt: str, output_tokens: int) -> bytes:
    body = msgspec.json.encode(
        {
            "model": target.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    )
    fields = {
        **target.headers,
        "Accept": "text/event-stream",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
    }
    head = [f"POST {target.path}/v1/completions HTTP/1.1"]
    head += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join([*head, "", ""]).encode() + body
