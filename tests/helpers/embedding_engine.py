"""An embedding engine in memory: the real loop and core, vectors that a test can foretell."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from helpers.api_world import World, open_world
from helpers.sim_core import VOCAB_SIZE
from helpers.stepped_engine import SteppedEngine, _Wire
from trioengine.engine_proc.embedding_core import EmbeddingCore
from trioengine.engine_proc.loop import EngineLoop
from trioengine.errors import PeerGoneError
from trioengine.protocol import EmbeddingInfo, ModelInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import numpy.typing as npt

__all__ = ["MAX_LEN", "SIZE", "LengthEmbedder", "open_embedding_world", "vector_of"]

SIZE, MAX_LEN = 4, 32


def vector_of(ids: Sequence[int]) -> list[float]:
    """Return what ``LengthEmbedder`` makes of a sequence: exact in float32."""
    return [float(len(ids)), float(sum(ids)), float(ids[0]), 0.5]


class LengthEmbedder:
    """Fulfils ``EmbeddingRunner``.

    Attributes:
        batches: Number of sequences of each call.
    """

    def __init__(self, *, any_dimensions: bool = False, dimensions: tuple[int, ...] = ()) -> None:
        info = EmbeddingInfo(SIZE, any_dimensions, dimensions)
        self.model = ModelInfo("m", "sim", True, MAX_LEN, VOCAB_SIZE, (), info)
        self.batches: list[int] = []
        self.closed = False

    def embed(self, sequences: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        self.batches.append(len(sequences))
        return np.array([vector_of(ids) for ids in sequences], np.float32)

    def call(self, method: str, args: dict[str, object]) -> object:
        raise KeyError(method)

    def close(self) -> None:
        self.closed = True


class _EmbeddingEngine(SteppedEngine):
    """A ``SteppedEngine`` over an ``EmbeddingCore``."""

    def __init__(self, runner: LengthEmbedder) -> None:
        super().__init__(starting=True, send_error=lambda: PeerGoneError("the engine is gone"))
        core: Any = EmbeddingCore(runner, max_num_seqs=8, max_num_batched_tokens=64)
        self.core = core
        self.loop = EngineLoop(core, _Wire(self), self.page)
        self.become_ready()


@contextlib.asynccontextmanager
async def open_embedding_world(
    runner: LengthEmbedder | None = None, **options: Any
) -> AsyncIterator[World]:
    """Open a world whose model makes embeddings."""
    engine = _EmbeddingEngine(runner or LengthEmbedder())
    async with open_world(engine=engine, **options) as world:
        yield world
