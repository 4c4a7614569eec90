"""The official client's types as a strict reader of our answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["VLLM_FIELDS", "strictly"]

Model = TypeVar("Model", bound=BaseModel)

VLLM_FIELDS = frozenset(
    {"stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs", "reasoning_content"}
)


def strictly(kind: type[Model], answer: dict[str, Any]) -> Model:
    """Return ``answer`` as ``kind``: no value converted, no field that nobody knows.

    OpenAI itself departs from its schema of completions in two places, and so does everybody: a
    chunk that is not a choice's last has a null ``finish_reason``, and the first token of an echoed
    prompt has null logprobs.
    """
    if answer["object"] == "text_completion":
        answer = answer | {"choices": [_conforming(choice) for choice in answer["choices"]]}
    model = kind.model_validate(answer, strict=True)
    unknown = set(_extras(model)) - VLLM_FIELDS
    assert not unknown, unknown
    return model


def _conforming(choice: dict[str, Any]) -> dict[str, Any]:
    changed = {"finish_reason": choice["finish_reason"] or "stop"}
    if (logprobs := choice["logprobs"]) is not None:
        changed["logprobs"] = logprobs | {
            name: logprobs[name][1:] if logprobs[name][:1] == [None] else logprobs[name]
            for name in ("token_logprobs", "top_logprobs")
        }
    return choice | changed


def _extras(value: object) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from _extras(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from _extras(item)
