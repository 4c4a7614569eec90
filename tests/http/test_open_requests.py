"""What can be cancelled: found while the engine owes something, forgotten when the request is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trioengine.errors import InvalidRequestError
from trioengine.http.open_requests import OpenRequests


def stream(num_live: int) -> Any:
    return SimpleNamespace(num_live=num_live)


def test_what_is_forgotten_leaves_nothing_behind() -> None:
    requests, one = OpenRequests(), stream(1)
    forget = requests.add("key", "a", one)
    assert requests.find("key", "a") is one
    forget()
    with pytest.raises(InvalidRequestError):
        requests.find("key", "a")
    assert not requests._streams


def test_what_the_engine_has_ended_is_not_there_though_its_client_still_reads() -> None:
    requests = OpenRequests()
    requests.add("key", "a", stream(0))
    with pytest.raises(InvalidRequestError) as caught:
        requests.find("key", "a")
    assert caught.value.http_status == 404
