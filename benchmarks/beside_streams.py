"""How long one more request waits for its first token while many streams run, in steps of theirs.

    python benchmarks/beside_streams.py                # 64 streams, the engine's own threads
    python benchmarks/beside_streams.py --threads 1

Starts a server of its own with the default model. A step is the median gap between the tokens of
the running streams while no other request comes; each probe is a prompt of 16 tokens, sent at a
random moment of a step, so that on average half a step is over before the engine can see it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from functools import partial
from urllib.parse import urlsplit

import trio

from trioengine.bench.own_server import own_server

READ_BYTES = 65536
SETTLE_S = 2.0
POLL_S = 0.05
DATA = b"data: {"


def request(prompt: list[int], max_tokens: int) -> bytes:
    """Return the bytes of a streamed completion request."""
    body = json.dumps(
        {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        | {"temperature": 0}
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def stream(port: int, question: bytes, times: list[float]) -> None:
    """Send a request and note when each of its events came."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as connection:
        await connection.send_all(question)
        while data := await connection.receive_some(READ_BYTES):
            times += [trio.current_time()] * data.count(DATA)


async def measure(port: int, num_streams: int, num_probes: int) -> tuple[list[float], float]:
    """Return the probes' times to first token, and the step of the streams, in seconds."""
    streams: list[list[float]] = [[] for _ in range(num_streams)]
    waits: list[float] = []
    phases = random.Random(0)
    async with trio.open_nursery() as nursery:
        for index, times in enumerate(streams):
            question = request([300 + index] * 32, 4000)
            nursery.start_soon(stream, port, question, times)
        while not all(streams):  # noqa: ASYNC110  # plain lists are cheapest where it counts
            await trio.sleep(POLL_S)
        settled_s = trio.current_time()
        await trio.sleep(SETTLE_S)
        begin_s = trio.current_time()
        gaps = [
            later - earlier
            for times in streams
            for earlier, later in itertools.pairwise(times)
            if settled_s < earlier and later < begin_s
        ]
        for index in range(num_probes):
            await trio.sleep(phases.uniform(0, statistics.median(gaps)))
            sent_s, times = trio.current_time(), list[float]()
            await stream(port, request([600 + index] * 16, 2), times)
            waits.append(times[0] - sent_s)
        nursery.cancel_scope.cancel()
    return waits, statistics.median(gaps)


def main() -> None:
    """Measure and print one line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--probes", type=int, default=20)
    parser.add_argument("--threads")
    parser.add_argument("--num-scheduler-steps", default="1")
    arguments = parser.parse_args()
    flags = ["--max-num-seqs", str(arguments.streams + 1)]
    flags += ["--num-scheduler-steps", arguments.num_scheduler_steps]
    flags += [] if arguments.threads is None else ["--threads", arguments.threads]
    with own_server(arguments.model, flags) as server:
        port = urlsplit(server.url).port
        waits, step_s = trio.run(partial(measure, port, arguments.streams, arguments.probes))
    median_s, worst_s = statistics.median(waits), max(waits)
    print(
        f"{server.engine}\n{arguments.streams} streams, step {step_s * 1e3:.1f} ms; time to first "
        f"token p50 {median_s * 1e3:.1f} ms = {median_s / step_s:.2f} steps, "
        f"worst {worst_s * 1e3:.1f} ms = {worst_s / step_s:.2f} steps"
    )


if __name__ == "__main__":
    main()
