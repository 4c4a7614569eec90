"""Where the server listens, and what accepted sockets inherit."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import pytest

from helpers.raw_http import TLS
from trioengine.config import ServerConfig
from trioengine.errors import ConfigError
from trioengine.http.listeners import SEND_BUFFER_BYTES, Listener, open_listeners

if TYPE_CHECKING:
    from pathlib import Path


async def listen(**config: Any) -> list[Listener]:
    return await open_listeners(ServerConfig(port=config.pop("port", 0), **config))


async def test_port_0_is_reported_as_what_was_bound() -> None:
    (listener,) = await listen()
    port = listener.sock.getsockname()[1]
    assert port != 0
    assert listener.url == f"http://127.0.0.1:{port}"
    listener.close()
    listener.close()  # idempotent


async def test_all_addresses_of_a_name_share_one_port() -> None:
    listeners = await listen(host="")
    assert len({listener.sock.getsockname()[1] for listener in listeners}) == 1
    for listener in listeners:
        listener.close()


async def test_ipv6_is_shown_in_brackets() -> None:
    if not _has_ipv6():
        pytest.skip("no IPv6 on this machine")
    (listener,) = await listen(host="::1")
    assert listener.url.startswith("http://[::1]:")
    listener.close()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


async def test_accepted_sockets_are_bounded() -> None:
    (listener,) = await listen(slow_client_timeout_s=1.5)
    with socket.create_connection(listener.sock.getsockname()):
        accepted, _ = listener.sock.accept()
        with accepted:
            tcp, sol = socket.IPPROTO_TCP, socket.SOL_SOCKET
            assert accepted.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 3000
            assert accepted.getsockopt(sol, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(sol, socket.SO_SNDBUF) <= 2 * SEND_BUFFER_BYTES
    listener.close()


async def test_a_port_that_is_taken_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: Address already in use"):
            await listen(port=port)


async def test_an_unknown_host_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on host 'nowhere\.invalid'"):
        await listen(host="nowhere.invalid")


async def test_a_unix_socket_comes_and_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    (listener,) = await listen(uds=str(path))
    assert listener.url == f"unix:{path}"
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    listener.close()
    assert not path.exists()


async def test_a_dead_servers_socket_is_replaced_and_a_live_ones_is_not(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    (listener,) = await listen(uds=str(path))
    with pytest.raises(ConfigError, match="Address already in use"):
        await listen(uds=str(path))
    listener.close()


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ConfigError, match="Address already in use"):
        await listen(uds=str(path))
    assert path.read_text() == "data"


async def test_an_over_long_unix_path_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="under 108 bytes"):
        await listen(uds=str(tmp_path / ("x" * 108)))


async def test_tls_needs_a_certificate_that_loads(tmp_path: Path) -> None:
    (listener,) = await listen(ssl_certfile=str(TLS / "cert.pem"), ssl_keyfile=str(TLS / "key.pem"))
    assert listener.url.startswith("https://")
    listener.close()
    with pytest.raises(ConfigError, match="needs --ssl-certfile"):
        await listen(ssl_keyfile=str(TLS / "key.pem"))
    with pytest.raises(ConfigError, match="cannot load the TLS certificate"):
        await listen(ssl_certfile=str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match="cannot load the TLS certificate"):
        await listen(ssl_certfile=str(TLS / "cert.pem"), ssl_keyfile=str(TLS / "cert.pem"))


async def test_what_was_opened_is_closed_when_the_next_address_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fds = set(os.listdir("/proc/self/fd"))

    async def addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
        return [(socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_INET, ("192.0.2.1", 0))]

    monkeypatch.setattr("trioengine.http.listeners._addresses", addresses)
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        await listen()
    assert set(os.listdir("/proc/self/fd")) == fds
