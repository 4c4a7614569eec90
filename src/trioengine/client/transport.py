"""The wire to one engine incarnation, as the client sees it: in memory or zmq."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from trioengine.protocol import ClientMessage, EngineMessage

__all__ = ["Transport"]


class Transport(Protocol):
    """The wire to one engine incarnation, in memory or zmq. It has one owner at a time."""

    def send(self, message: ClientMessage) -> None:
        """Send without waiting.

        Raises:
            PeerGoneError: Nobody is there any more.
        """

    async def receive(self) -> list[EngineMessage]:
        """Return at least one message, waiting for it. Cancelling it loses none.

        Raises:
            PeerGoneError: The peer is gone, and everything it had sent has been received.
            ProtocolError: The peer does not keep to the protocol, or is a stranger.
        """
