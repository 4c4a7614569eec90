"""The engine as a process of its own, and the test in the server's place."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import zmq

from trioengine.config import EngineConfig, EngineOptions
from trioengine.heartbeat import HeartbeatPage
from trioengine.outputs import RequestOutput
from trioengine.protocol import (
    PROTOCOL_VERSION,
    Add,
    ClientMessage,
    EngineMessage,
    FrameEncoder,
    Hello,
    Outputs,
    engine_frames,
)
from trioengine.sampling_params import SamplingParams

__all__ = ["PATIENCE_S", "TOKEN", "Engine", "Message", "add"]


PATIENCE_S = 20.0  # a bound for a loaded machine, not an expectation
TOKEN = "only this incarnation knows"
Message = TypeVar("Message")


class Engine:
    """One engine process and the server's end of its wires. A context manager."""

    def __init__(self, *, token: str = TOKEN, greet: bool = True, **options: Any) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="trioengine-test-"))
        self._context = zmq.Context()
        self._push, self._pull = (self._context.socket(kind) for kind in (zmq.PUSH, zmq.PULL))
        for socket, name in ((self._push, "c"), (self._pull, "o")):
            socket.set_hwm(0)
            socket.linger = 0
            socket.rcvtimeo = socket.sndtimeo = int(PATIENCE_S * 1000)
            socket.bind(f"ipc://{self.directory}/{name}")
        HeartbeatPage.create(self.directory / "page")
        self.page = HeartbeatPage(self.directory / "page", writable=False)
        self._encoder, self._decoder = FrameEncoder(), engine_frames()
        options.setdefault("backend", "sim")
        config = EngineConfig(
            options=EngineOptions(**options),
            model_dir=None,
            model_name="sim",
            commands_address=f"ipc://{self.directory}/c",
            outputs_address=f"ipc://{self.directory}/o",
            token=TOKEN,
            heartbeat_path=str(self.directory / "page"),
            runtime_dir=str(self.directory),
        )
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trioengine.engine_proc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(config) + b"\n")
        if greet:
            assert self.receive() == Hello(PROTOCOL_VERSION, TOKEN)
            self.send(Hello(PROTOCOL_VERSION, token))

    def send(self, *messages: ClientMessage) -> None:
        for message in messages:
            self._push.send(self._encoder.encode(message))

    def receive(self) -> EngineMessage:
        return self._decoder.decode(self._pull.recv())

    def until(self, kind: type[Message]) -> Message:
        """Return the next message of this kind, dropping others."""
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return message

    def terminal(self, request_id: int) -> RequestOutput:
        """Return the terminal of a request with all of its deltas before it merged in."""
        merged = RequestOutput(request_id)
        while merged.finish_reason is None:
            for delta in self.until(Outputs).deltas:
                if delta.request_id == request_id:
                    merged.merge(delta)
        return merged

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def orphan(self) -> float:
        """Close the lifeline; return how long the process took to end."""
        assert self.process.stdin is not None
        begin_s = time.monotonic()
        self.process.stdin.close()
        self.wait()
        return time.monotonic() - begin_s

    def words(self) -> str:
        """Return all that it wrote; to be asked after its end."""
        assert self.process.stdout is not None
        return self.process.stdout.read().decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.page.close()
        self._context.destroy(linger=0)
        subprocess.run(["rm", "-rf", self.directory], check=True)


def add(request_id: int, max_tokens: int = 3) -> Add:
    return Add(request_id, [300 + request_id] * 20, SamplingParams(max_tokens=max_tokens, seed=1))
