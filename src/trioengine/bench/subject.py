"""The model that is measured: its tokenizer, which sizes the prompts, and what it costs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from trioengine.bench.model_cost import ModelCost, read_model_cost
from trioengine.errors import ConfigError
from trioengine.models.resolve import ModelKind, resolve_model
from trioengine.models.source import find_model
from trioengine.models.table import GGUF_NAME
from trioengine.settings import load_config
from trioengine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trioengine.config import EngineOptions

__all__ = ["Subject", "find_subject"]

FETCH_PATIENCE_S: Final = 600.0  # without any progress
_QUANTISED_BYTES: Final = {"int8": (1 + 2 / 32, 1 + 2 / 32), "q4": (0.5 + 4 / 32, 1 + 2 / 32)}
"""Of a weight of body and head: its bits, and the halves that 32 share (scale, minimum)."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A model under test.

    Attributes:
        model: As the user named it, or the default one.
        tokenizer: The model's.
        cost: ``None`` where it cannot be told, or nothing is computed.
        cost_unknown: Why.
        is_float32: Weights and cache are to be kept in float32.
    """

    model: str
    tokenizer: Tokenizer
    cost: ModelCost | None
    cost_unknown: str
    is_float32: bool


def find_subject(model: str | None, engine: Mapping[str, object]) -> Subject:
    """Return the model that these options mean; fetch and convert it if need be.

    Args:
        model: As on the command line.
        engine: Raw values of the engine's options, by name with underscores.

    Raises:
        ConfigError: There is no such model, or an option is unusable.
        EngineStartError: The model cannot be converted.
    """
    config = load_config({"model": model, **engine}, environ={})
    source = find_model(config)
    is_float32 = config.engine.dtype == "float32"
    subject = partial(Subject, model=source.name, is_float32=is_float32)
    if source.simulated:
        unknown = "the simulated engine computes nothing"
        tokenizer = _simulated_tokenizer(source.model_dir, config.engine)
        return subject(tokenizer=tokenizer, cost=None, cost_unknown=unknown)
    model_dir = source.model_dir or _prepare(config.model)
    tokenizer = Tokenizer.from_dir(model_dir)
    try:
        cost = _cost(config.model, model_dir, config.engine)
    except ConfigError as error:
        return subject(tokenizer=tokenizer, cost=None, cost_unknown=error.message)
    return subject(tokenizer=tokenizer, cost=cost, cost_unknown="")


def _simulated_tokenizer(model_dir: Path | None, engine: EngineOptions) -> Tokenizer:
    if model_dir is not None:
        return Tokenizer.from_dir(model_dir)
    from trioengine.engine_proc.sim_runner import SimScript

    return Tokenizer.simulated(SimScript.from_args(engine.engine_args).vocab_size)


def _cost(model: str, model_dir: Path, engine: EngineOptions) -> ModelCost:
    """Return the cost of the weights as the user's file has them, or as the options want them."""
    cost = read_model_cost(model_dir)
    if engine.dtype == "float32":
        num_bytes = 4 * (cost.body_params + cost.head_params)
        return cost.stored_as(weight_bytes=num_bytes, kv_element_bytes=4)
    if engine.quantization in _QUANTISED_BYTES:
        body, head = _QUANTISED_BYTES[engine.quantization]
        num_bytes = round(body * cost.body_params + head * cost.head_params)
        return cost.stored_as(weight_bytes=num_bytes, kv_element_bytes=2)
    if engine.quantization == "gguf":
        return cost.stored_as(weight_bytes=_size(model_dir / GGUF_NAME), kv_element_bytes=2)
    resolved = resolve_model(model)
    if engine.quantization == "auto" and resolved.kind is ModelKind.GGUF:
        return cost.stored_as(weight_bytes=_size(resolved.path), kv_element_bytes=2)
    return cost


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error


def _prepare(model: str) -> Path:
    import trio

    from trioengine import log
    from trioengine.process.model_preparation import prepare_in_child
    from trioengine.progress_display import Narrator, terminal_drawer

    sink = log.sink()
    narrator = Narrator(terminal_drawer(sink.show_status))
    try:
        prepare = partial(prepare_in_child, patience_s=FETCH_PATIENCE_S)
        return trio.run(prepare, model, narrator.tell, sink.write)
    finally:
        narrator.end()
