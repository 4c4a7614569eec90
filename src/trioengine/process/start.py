"""Bring an engine up: its model, its process and wire, and (once) the server's own tokenizer."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import trio

from trioengine import log
from trioengine.bare_errors import bare_errors
from trioengine.errors import EngineStartError
from trioengine.process.incarnation import ProcessEngine
from trioengine.process.model_preparation import prepare_in_child
from trioengine.process.spawn import spawn_engine
from trioengine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trioengine.client.engine_client import EngineClient
    from trioengine.config import ServerConfig
    from trioengine.models.source import ModelSource
    from trioengine.process.incarnation import Engine
    from trioengine.process.spawn import SpawnedEngine
    from trioengine.protocol import Ready

__all__ = ["EngineStart", "Launch", "adopt_process", "launch_process"]

Launch: TypeAlias = "Callable[[ServerConfig, ModelSource], Engine]"

logger = logging.getLogger(__name__)


def launch_process(config: ServerConfig, source: ModelSource) -> Engine:
    """Start the engine's process, with a wire to it."""
    return adopt_process(
        spawn_engine(source.fit(config.engine), model_dir=source.model_dir, model_name=source.name)
    )


def adopt_process(spawned: SpawnedEngine) -> Engine:
    """Bind the wire of a process that has been started; its output goes to our stderr."""
    return ProcessEngine(spawned, log.sink().write)


class EngineStart:
    """Starts one engine after the other.

    Attributes:
        engine: The present one, once it has been started; to be closed by whoever ends the server.
        tokenizer: Once it is loaded.
    """

    def __init__(
        self,
        config: ServerConfig,
        source: ModelSource,
        client: EngineClient,
        *,
        launch: Launch = launch_process,
        engine: Engine | None = None,
    ) -> None:
        """Begin with nothing, or with an ``engine`` that has been started already."""
        self.engine = engine
        self.tokenizer: Tokenizer | None = None
        self._config = config
        self._source = source
        self._client = client
        self._launch = launch

    async def bring_up(self, nursery: trio.Nursery) -> Engine:
        """Return an engine that is attached to the client and ready, the tokenizer loaded.

        Args:
            nursery: Gets the tasks that live as long as the engine does.

        Raises:
            ConfigError: The model cannot be had.
            EngineStartError: It does not load, or was not ready in time.
        """
        await self._prepare_model()
        if self.engine is None:
            self.engine = self._launch(self._config, self._source)
        logger.info("%s started", self.engine.name)
        timeout_s = self._config.start_timeout_s
        try:
            with bare_errors(), trio.fail_after(timeout_s):
                await self._attach(self.engine, nursery)
        except trio.TooSlowError:
            raise EngineStartError(f"the engine was not ready within {timeout_s:g} s") from None
        return self.engine

    def discard(self) -> None:
        """Leave nothing of the present engine behind; the next start gets another. Idempotent."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()

    async def _prepare_model(self) -> None:
        """Have the model fetched and converted where it is not yet."""
        if self._source.model_dir is None and not self._source.simulated:
            self._source.model_dir = await prepare_in_child(
                self._source.name,
                self._client.status.set_progress,
                log.sink().write,
                patience_s=self._config.start_timeout_s,
            )

    async def _attach(self, engine: Engine, nursery: trio.Nursery) -> None:
        self._client.status.set_progress("starting the engine", 0.0)
        nursery.start_soon(self._report_end, engine)
        async with trio.open_nursery() as loading:
            if self._source.model_dir is not None and self.tokenizer is None:
                loading.start_soon(self._load_tokenizer, self._source.model_dir)
            ready: Ready = await nursery.start(self._client.run_incarnation, engine.transport)
            if self.tokenizer is None and self._source.model_dir is None:
                loading.start_soon(self._simulate_tokenizer, ready.model.vocab_size)

    async def _report_end(self, engine: Engine) -> None:
        self._client.status.report_exit(await engine.watch())

    async def _load_tokenizer(self, model_dir: Path) -> None:
        load = partial(Tokenizer.from_dir, model_dir, chat_template=self._config.chat_template)
        self.tokenizer = self._as_planned(await _in_thread(load))

    async def _simulate_tokenizer(self, vocab_size: int) -> None:
        template = self._config.chat_template
        load = partial(Tokenizer.simulated, vocab_size, chat_template=template)
        self.tokenizer = self._as_planned(await _in_thread(load))

    def _as_planned(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return the tokenizer, or one that fails as a fault plan says."""
        plan = self._config.engine.fault_plan
        if plan is None:
            return tokenizer
        from trioengine.process.faults import faulty_tokenizer

        return faulty_tokenizer(tokenizer, plan)


async def _in_thread(load: Callable[[], Tokenizer]) -> Tokenizer:
    return await trio.to_thread.run_sync(load, abandon_on_cancel=True)
