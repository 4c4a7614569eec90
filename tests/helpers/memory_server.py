"""The whole server without a network and without a process, for one history each.

Everything is the real thing: the supervisor, the HTTP server with its accept loop, the application,
``EngineClient``, and over a wire of frames the engine's loop, scheduler and cache. Only the model
computes nothing, the engine is stepped by hand, the clock is a ``MockClock``, and clients come over
a Unix socket: it is as quick as Trio's own memory streams, as deterministic, and has descriptors
that could leak, halves that could close and a buffer that could fill.

The application is made once (it takes 10 ms) and given the client of each server in turn.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import tempfile
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
import trio

from helpers.sim_core import VOCAB_SIZE
from helpers.wired_engine import MemoryEngine, WiredEngine
from trioengine.config import ServerConfig
from trioengine.engine_proc.sim_runner import SimScript
from trioengine.http import app as app_module
from trioengine.http.front import Front
from trioengine.http.offload import InlineOffload
from trioengine.http.transport import ClientStream
from trioengine.models.source import ModelSource
from trioengine.process.last_resort import LastResort
from trioengine.supervisor import Server, serve
from trioengine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from quart_trio import QuartTrio

    from trioengine.client.engine_client import EngineClient

__all__ = ["CONFIG", "NUM_BLOCKS", "TOKENIZER", "MemoryServer", "in_memory", "open_server"]

NUM_BLOCKS = 6
TOKENIZER = Tokenizer.simulated(VOCAB_SIZE)
CONFIG = ServerConfig(
    uds=str(Path(tempfile.mkdtemp(prefix="histories-of-trioengine-")) / "s"),
    max_queue_time_s=2.0,
    drain_timeout_s=3.0,
    death_grace_s=0.5,
    slow_client_timeout_s=1.5,
    start_timeout_s=5.0,
    enable_admin=True,
)
SCRIPT = SimScript(num_blocks=NUM_BLOCKS, max_model_len=NUM_BLOCKS * 16, tokens_from="seed")
UNSENT_BYTES = 2**12  # what the kernel takes for a client that does not read


class MemoryServer:
    """A server that runs, and how it ended.

    Attributes:
        config: As it was started.
        start_s: How long each engine but the first takes to be ready.
        leave_s: How long each takes to hear that it is to leave.
        engines: Every incarnation, in their order.
        server: The supervisor.
        error: What ``serve`` raised.
        ended: ``serve`` has returned.
        path: Where clients connect.
    """

    server: Server

    def __init__(
        self,
        *,
        restarts: int = 0,
        replay: bool = False,
        wakes: bool = False,
        start_s: float = 0.0,
        leave_s: float = 0.0,
        places: int = 12,
    ) -> None:
        self.start_s, self.leave_s = start_s, leave_s
        self.config = msgspec.structs.replace(
            CONFIG,
            max_queue_sequences=places,
            engine_restarts=restarts,
            replay=replay,
            wake_on_request=wakes,
        )
        self.engines: list[MemoryEngine] = []
        self.error: Exception | None = None
        self.ended = trio.Event()
        self.path = Path(cast("str", CONFIG.uds))
        self.scope = trio.CancelScope()

    @property
    def engine(self) -> MemoryEngine:
        """The latest incarnation."""
        return self.engines[-1]

    @property
    def client(self) -> EngineClient:
        return self.server.client

    def launch(self, *_: object) -> MemoryEngine:
        """Start an incarnation. The first is ready at once, for every history begins with it."""
        start_s = self.start_s if self.engines else 0.0
        limits = {"max_num_seqs": 2, "max_num_batched_tokens": 40}
        wired = WiredEngine(SCRIPT, starting=start_s > 0.0, **limits)
        self.engines.append(MemoryEngine(wired, start_s=start_s, leave_s=self.leave_s))
        return self.engine

    async def run(self, *, task_status: trio.TaskStatus[Server]) -> None:
        """Serve to the end; ``scope`` is what a second signal cancels."""
        try:
            with self.scope:
                await serve(
                    self.config,
                    ModelSource("sim", None, simulated=True),
                    launch=self.launch,
                    with_signals=False,
                    last_resort=LastResort(),
                    task_status=task_status,
                )
        except Exception as error:
            self.error = error
        self.ended.set()


@asynccontextmanager
async def open_server(**options: Any) -> AsyncIterator[MemoryServer]:
    """A server that is ready. Whoever opens it sees to its end within the block."""
    memory = MemoryServer(**options)
    async with trio.open_nursery() as nursery:
        memory.server = await nursery.start(memory.run)
        assert await memory.server.wait_ready()
        yield memory
        nursery.cancel_scope.cancel(reason="the history is over")


class _Failures(logging.Handler):
    """Keeps every record that carries an exception: nobody may have met one unforeseen."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.met: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.met.append(record)


@contextmanager
def in_memory() -> Iterator[None]:
    """Make what ``serve`` is made of fit for histories, and see that nothing is left after them.

    Raises:
        AssertionError: A descriptor is left open, or an exception was logged.
    """
    failures = _Failures()
    logger = logging.getLogger("trioengine")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trioengine.process.start._in_thread", _tokenizer_at_hand)
        patch.setattr("trioengine.http.server.ClientStream", _narrow_stream)
        patch.setattr(app_module, "create_app", _reuse_app)
        patch.setattr(logger, "propagate", False)
        logger.addHandler(failures)
        try:
            yield
        finally:
            logger.removeHandler(failures)
    for record in failures.met:
        raise AssertionError(record.getMessage()) from cast("Any", record.exc_info)[1]
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor is left open"


async def _tokenizer_at_hand(_: Callable[[], Tokenizer]) -> Tokenizer:
    await trio.lowlevel.checkpoint()
    return TOKENIZER


def _narrow_stream(sock: socket.socket, *args: Any, **options: Any) -> ClientStream:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT_BYTES)
    return ClientStream(sock, *args, **options)


class _Current:
    """Stands for the client of whichever server runs now."""

    client: EngineClient

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)


@functools.cache
def _app() -> tuple[QuartTrio, _Current, Front]:
    fronts: list[Front] = []

    def seen(*args: Any) -> Front:
        fronts.append(Front(*args))
        return fronts[0]

    current = _Current()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app_module, "Front", seen)
        app = _create_app(
            cast("EngineClient", current), lambda: TOKENIZER, CONFIG, offload=InlineOffload()
        )
    return app, current, fronts[0]


_create_app = app_module.create_app


def _reuse_app(client: EngineClient, *_: object) -> QuartTrio:
    app, current, front = _app()
    current.client = client
    assert not front.open_requests._streams
    return app


def front() -> Front:
    """What the routes of the one application share."""
    return _app()[2]
