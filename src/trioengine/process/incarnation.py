"""One incarnation of the engine as the supervisor holds it: process, wire and heartbeat page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trioengine.heartbeat import HeartbeatPage
from trioengine.process.engine_process import EngineProcess
from trioengine.zmq_channel import ZmqTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.client.engine_client import Transport
    from trioengine.config import EngineConfig
    from trioengine.heartbeat import Heartbeat
    from trioengine.process.spawn import SpawnedEngine

__all__ = ["Engine", "ProcessEngine"]


class Engine(Protocol):
    """A started engine. Tests have one in memory."""

    transport: Transport

    @property
    def name(self) -> str:
        """What it is, for the log."""

    async def watch(self) -> str:
        """Wait for its end; return how it ended, as one clause."""

    def heartbeat(self) -> Heartbeat:
        """Look at its page."""

    async def stop(self, grace_s: float) -> None:
        """See it out after ``Shutdown``, by force where it takes longer than ``grace_s``.

        Needs ``watch`` to be running.
        """

    def kill(self) -> None:
        """End it now, whatever it does."""

    def close(self) -> None:
        """Leave nothing of it behind, at once. Idempotent."""


def _bind_wire(config: EngineConfig) -> ZmqTransport:
    addresses = {
        "commands_address": config.commands_address,
        "outputs_address": config.outputs_address,
        "token": config.token,
    }
    if config.options.fault_plan is None:
        return ZmqTransport(**addresses)
    from trioengine.process.faults import FaultyTransport

    return FaultyTransport(config.options.fault_plan, **addresses)


class ProcessEngine:
    """The engine in a process of its own. Fulfils ``Engine``."""

    def __init__(self, spawned: SpawnedEngine, pass_through: Callable[[bytes], None]) -> None:
        """Bind the wire of a process that has just been started, and look at its page.

        Args:
            spawned: Ours from now on.
            pass_through: Takes what it writes; never waits.

        Raises:
            ConfigError: The sockets cannot be bound.
            OSError: Its page has gone.
        """
        config = spawned.config
        self._process = EngineProcess(spawned, pass_through)
        try:
            self._page = HeartbeatPage(Path(config.heartbeat_path), writable=False)
            self._wire = _bind_wire(config)
        except BaseException:
            self._process.close()
            raise
        self.transport: Transport = self._wire

    @property
    def name(self) -> str:
        return f"engine process {self._process.pid}"

    async def watch(self) -> str:
        await self._process.watch()
        return self._process.cause()

    def heartbeat(self) -> Heartbeat:
        return self._page.read()

    async def stop(self, grace_s: float) -> None:
        await self._process.stop(grace_s)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._wire.close()
        self._process.close()
        self._page.close()
