"""The workloads that decide speed: how many clients, how many requests, of what size."""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["WARM_UP_REP", "WORKLOADS", "Workload"]

WARM_UP_REP: Final = 0  # measured repeats count from 1
"""Its prompts are never measured, so that a prefix cache carries nothing into a measured repeat."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A closed loop: each client sends its next request when its last one has ended.

    Attributes:
        name: As on the command line.
        concurrency: Clients.
        num_requests: Requests of all clients together.
        shared_tokens: Prompt tokens that all prompts of a repeat begin with.
        prompt_tokens: Prompt tokens after those, another text for each request.
        output_tokens: Tokens asked for; the end of a sequence is ignored.
    """

    name: str
    concurrency: int
    num_requests: int
    shared_tokens: int = 0
    prompt_tokens: int
    output_tokens: int

    @property
    def total_prompt_tokens(self) -> int:
        """Tokens of each prompt."""
        return self.shared_tokens + self.prompt_tokens


WORKLOADS: Final = {
    workload.name: workload
    for workload in (
        Workload(name="W1", concurrency=1, num_requests=5, prompt_tokens=64, output_tokens=128),
        Workload(name="W2", concurrency=16, num_requests=64, prompt_tokens=128, output_tokens=128),
        Workload(name="W3", concurrency=64, num_requests=128, prompt_tokens=64, output_tokens=64),
        Workload(
            name="W4",
            concurrency=16,
            num_requests=32,
            shared_tokens=1024,
            prompt_tokens=32,
            output_tokens=32,
        ),
        Workload(name="FE", concurrency=64, num_requests=512, prompt_tokens=16, output_tokens=64),
    )
}
"""W1 one stream, W2 and W3 many, W4 many behind one long prefix. FE is for a model so small that
only the front end is left to be measured."""
