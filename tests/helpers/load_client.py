"""Many streams at once, in a process of its own: descriptors are counted per process.

``python load_client.py PORT STREAMS TOKENS`` opens all streams, reads each to its end, and prints
one JSON object: how many ended how, and how many different texts there were. It spends as little
as it can on each: the server is what is to be loaded.
"""

from __future__ import annotations

import collections
import json
import re
import resource
import sys

import trio

__all__ = ["main"]

MAX_CONNECTING = 256  # at a time: a backlog has an end
READ_BYTES = 65536
TEXT = re.compile(rb'"text":"([^"]*)"')


def request(num_tokens: int) -> bytes:
    """Return the bytes of a request for exactly ``num_tokens``, the same text each time."""
    body = {
        "prompt": "x",
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    payload = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: test\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


class Tally:
    """How streams ended."""

    def __init__(self, num_tokens: int) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.texts: set[bytes] = set()
        self._usage = b'"completion_tokens":%d,' % num_tokens

    def note(self, answer: bytes) -> None:
        """Take in a whole response."""
        if not answer.startswith(b"HTTP/1.1 200 "):
            self.outcomes[answer[:40].decode(errors="replace")] += 1
            return
        exact = self._usage in answer and b"data: [DONE]\n\n" in answer[-64:]
        self.outcomes["exact" if exact else "odd"] += 1
        self.texts.add(b"".join(TEXT.findall(answer)))


async def run(port: int, num_streams: int, num_tokens: int) -> dict[str, object]:
    """Return the tally."""
    tally = Tally(num_tokens)
    question = request(num_tokens)
    connecting = trio.CapacityLimiter(MAX_CONNECTING)

    async def one() -> None:
        answer = bytearray()
        try:
            async with connecting:
                stream = await trio.open_tcp_stream("127.0.0.1", port)
            async with stream:
                await stream.send_all(question)
                while data := await stream.receive_some(READ_BYTES):
                    answer += data
            tally.note(bytes(answer))
        except (OSError, trio.BrokenResourceError) as error:
            tally.outcomes[repr(error)] += 1

    async with trio.open_nursery() as nursery:
        for _ in range(num_streams):
            nursery.start_soon(one)
    return {"outcomes": dict(tally.outcomes), "num_texts": len(tally.texts)}


def main() -> None:
    """See the module."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    port, num_streams, num_tokens = map(int, sys.argv[1:])
    print(json.dumps(trio.run(run, port, num_streams, num_tokens)))  # noqa: T201


if __name__ == "__main__":
    main()
