"""The sockets that the server listens on, bound by us so that their options are ours.

Accepted TCP sockets inherit what is set on a listener: ``TCP_USER_TIMEOUT`` ends a connection whose
data nobody acknowledges (also after we have closed it, when only the kernel still holds data for
it), keep-alive probes find a client whose machine has gone without a word, and a bounded send
buffer keeps a thousand clients that do not read from filling the memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from trioengine.config import ServerConfig

__all__ = ["Listener", "open_listeners"]

BACKLOG: Final = 2048
SEND_BUFFER_BYTES: Final = 256 * 2**10  # the kernel doubles it for its own bookkeeping
_UNSENT_BYTES: Final = 2**14  # beyond what is on its way, the kernel takes so much more
_PROBE_AFTER_S: Final = 60
_PROBE_EVERY_S: Final = 10
_MAX_UDS_PATH_BYTES: Final = 107  # struct sockaddr_un


@dataclass(frozen=True, eq=False)
class Listener:
    """A bound, listening, non-blocking socket.

    Attributes:
        sock: Ours to close, through ``close``.
        url: For people: ``http://127.0.0.1:8000`` with the port that was bound, or ``unix:/path``.
        tls: Set where its clients speak TLS.
        path: The file of a Unix socket.
    """

    sock: socket.socket
    url: str
    tls: ssl.SSLContext | None = None
    path: Path | None = None

    def close(self) -> None:
        """Stop listening and remove the Unix socket's file. Idempotent."""
        if self.sock.fileno() == -1:
            return
        self.sock.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


async def open_listeners(config: ServerConfig) -> list[Listener]:
    """Bind and listen where ``config`` says: ``uds`` if given, else every address of ``host``.

    Raises:
        ConfigError: The address is taken, unknown or forbidden; certificate or key do not load.
    """
    tls = _tls_context(config)
    if config.uds is not None:
        return [_listen_unix(Path(config.uds), tls)]
    opened: list[Listener] = []
    try:
        port = config.port
        for family, address in await _addresses(config.host, port):
            listener = _listen_tcp(family, (address[0], port, *address[2:]), config, tls)
            opened.append(listener)
            port = listener.sock.getsockname()[1]  # port 0: the same one for all addresses
    except BaseException:
        for listener in opened:
            listener.close()
        raise
    return opened


async def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    try:
        infos = await trio.socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"cannot listen on host {host!r}: {error.strerror or error}") from error
    return list(dict.fromkeys((info[0], info[4]) for info in infos))  # type: ignore[misc]


def _listen_tcp(
    family: socket.AddressFamily,
    address: tuple[str, int],
    config: ServerConfig,
    tls: ssl.SSLContext | None,
) -> Listener:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        _set_client_bounds(sock, config.slow_client_timeout_s)
        sock.bind(address)
        _listen(sock)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {address[0]} port {address[1]}: {error.strerror or error}"
        ) from error
    host, port = sock.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    return Listener(sock, f"{scheme}://{shown}:{port}", tls)


def _set_client_bounds(sock: socket.socket, slow_client_timeout_s: float) -> None:
    # Accepted sockets inherit all of these: set once here, they cost a connection nothing.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    # The server's own deadline comes first and knows why; this one is for what it cannot see.
    timeout_ms = max(1, round(2 * slow_client_timeout_s * 1000))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


def _listen_unix(path: Path, tls: ssl.SSLContext | None) -> Listener:
    if len(os.fsencode(path)) > _MAX_UDS_PATH_BYTES:
        raise ConfigError(f"the path of a Unix socket must be under 108 bytes: {path}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        sock.bind(str(path))
        _listen(sock)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from error
    return Listener(sock, f"unix:{path}", tls, path)


def _remove_stale(path: Path) -> None:
    """Remove the socket file of a server that is no more; leave a live server's alone."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.stat().st_mode):
            return  # bind will say that it is in use
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()


def _listen(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.listen(BACKLOG)


def _tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    if config.ssl_certfile is None and config.ssl_keyfile is None:
        return None
    if config.ssl_certfile is None:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot load the TLS certificate or key: {error}") from error
    return context
