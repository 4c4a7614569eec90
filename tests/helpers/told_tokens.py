"""What an answer says of its tokens, whole or joined from its chunks."""

from __future__ import annotations

import itertools
from typing import Any

from helpers.api_world import CHAT
from trioengine.engine_proc.sim_runner import SimScript

__all__ = ["SEEDED", "counts", "joined", "told"]


SEEDED = SimScript(num_blocks=256, max_model_len=1024, tokens_from="seed")


def joined(events: list[Any], path: str) -> dict[int, dict[str, Any]]:
    """What a client makes of a stream, by choice."""
    choices: dict[int, dict[str, Any]] = {}
    for choice in itertools.chain.from_iterable(event["choices"] for event in events):
        total = choices.setdefault(
            choice["index"], {"text": "", "logprobs": {}, "finish_reason": None}
        )
        assert total["finish_reason"] is None  # nothing follows the finish
        said = choice["delta"].get("content", "") if path == CHAT else choice["text"]
        total["text"] += said
        total["finish_reason"] = choice["finish_reason"]
        if choice["finish_reason"] is not None:
            total["stop_reason"] = choice["stop_reason"]
        for name, items in (choice["logprobs"] or {}).items():
            if name != "refusal":
                total["logprobs"].setdefault(name, []).extend(items)
    return choices


def told(answer: Any, path: str) -> dict[int, dict[str, Any]]:
    """The same of a whole answer."""
    return {
        choice["index"]: {
            "text": choice["message"]["content"] if path == CHAT else choice["text"],
            "logprobs": {k: v for k, v in (choice["logprobs"] or {}).items() if k != "refusal"},
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
        for choice in answer["choices"]
    }


def counts(usage: dict[str, Any]) -> list[int]:
    """Without what the prefix cache held, which is not the same twice."""
    return [usage[f"{name}_tokens"] for name in ("prompt", "completion", "total")]
