"""What an answer says, whether it was streamed or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from helpers.asgi_client import Call

__all__ = ["MODES", "texts"]


MODES = [True, False]


def texts(call: Call) -> dict[int, str]:
    """Each choice's text, whole or joined from its chunks."""
    assert call.status == 200, call.body
    if call.headers["content-type"] == "application/json":
        return {c["index"]: c["text"] if "text" in c else c["message"]["content"]
                for c in call.json["choices"]}  # fmt: skip
    joined: dict[int, str] = {}
    for event in call.events[:-1]:
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            joined[choice["index"]] = joined.get(choice["index"], "") + piece
    return joined
