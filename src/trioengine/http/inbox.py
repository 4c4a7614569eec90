"""What an app is told of its request, queued without waiting; and the tasks that run apps.

Relies on internals of Hypercorn 0.18 as ``h1.py`` does.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import trio
from hypercorn.trio.task_group import TaskGroup, _handle

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hypercorn.config import Config
    from hypercorn.typing import AppWrapper, ASGIReceiveEvent

__all__ = ["AppTasks", "Inbox"]


class AppTasks(TaskGroup):
    """Runs the app of each request; what it is told is queued without waiting.

    Stock, the queue holds ten messages: when it is full and its app has ended, the connection
    waits for ever. And each message is a checkpoint, where a cancellation could strike between the
    last byte of an answer and the recycling of the connection. The queue needs no bound of its own:
    a body has one.
    """

    async def spawn_app(
        self, app: AppWrapper, config: Config, scope: Any, send: Any
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        inbox = Inbox()
        self.spawn(
            _handle, app, config, scope, inbox, send, trio.to_thread.run_sync, trio.from_thread.run
        )
        return inbox.put


class Inbox:
    """What one app is told, in order. Calling it is the app's ASGI ``receive``."""

    __slots__ = ("_messages", "_waiting")

    def __init__(self) -> None:
        self._messages: collections.deque[ASGIReceiveEvent] = collections.deque()
        self._waiting = trio.lowlevel.ParkingLot()

    async def put(self, message: ASGIReceiveEvent) -> None:
        """Tell the app. Never waits."""
        self._messages.append(message)
        self._waiting.unpark()

    async def __call__(self) -> ASGIReceiveEvent:
        """Return the next message, waiting for it."""
        if self._messages:
            await trio.lowlevel.checkpoint()
        while not self._messages:
            await self._waiting.park()
        return self._messages.popleft()

    def take_body(self) -> list[bytes] | None:
        """Take the whole body, in pieces, if all of it is here; else ``None``, and nothing."""
        pieces: list[bytes] = []
        for message in self._messages:
            if message["type"] != "http.request":
                return None
            pieces.append(message["body"])
            if not message["more_body"]:
                for _ in pieces:
                    self._messages.popleft()
                return pieces
        return None
