"""Many streams at once, in a process of its own: descriptors are counted per process.

``python load_client.py PORT STREAMS TOKENS`` opens all streams, reads each to its end, and prints
one JSON object: how many ended how, and how many different texts there were.
"""

from __future__ import annotations

import collections
import json
import resource
import sys

import trio

from helpers.sse_client import open_stream

MAX_CONNECTING = 256  # at a time: a backlog has an end


async def run(port: int, num_streams: int, num_tokens: int) -> dict[str, object]:
    """Return the tally."""
    outcomes: collections.Counter[str] = collections.Counter()
    texts: collections.Counter[str] = collections.Counter()
    connecting = trio.CapacityLimiter(MAX_CONNECTING)
    body = {
        "prompt": "x",
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }

    async def one() -> None:
        async with connecting:
            opening = open_stream(port, body, read_head=False)
            stream = await opening.__aenter__()
        try:
            if await stream.read_head() != 200:
                outcomes[f"status {stream.status}"] += 1
                return
            events = [event.data for event in await stream.read_events()]
            text = "".join(
                choice["text"] for event in events[:-1] for choice in event.get("choices", ())
            )
            texts[text] += 1
            exact = events[-1] is None and events[-2]["usage"]["completion_tokens"] == num_tokens
            outcomes["exact" if exact else f"odd end {events[-2:]}"] += 1
        except (ConnectionError, trio.BrokenResourceError) as error:
            outcomes[repr(error)] += 1
        finally:
            await opening.__aexit__(None, None, None)

    async with trio.open_nursery() as nursery:
        for _ in range(num_streams):
            nursery.start_soon(one)
    return {"outcomes": dict(outcomes), "num_texts": len(texts)}


def main() -> None:
    """See the module."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    port, num_streams, num_tokens = map(int, sys.argv[1:])
    print(json.dumps(trio.run(run, port, num_streams, num_tokens)))  # noqa: T201


if __name__ == "__main__":
    main()
