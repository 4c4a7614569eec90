"""Puts the faults of a plan around the engine's parts, where and only where the plan names them."""

from __future__ import annotations

import os
import resource
import signal
import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from trioengine.engine_proc.channel import EngineChannel
from trioengine.engine_proc.profiling import StepTimeline
from trioengine.fault_plan import FrameSpoiler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trioengine.engine_proc.backend import EngineBackend
    from trioengine.engine_proc.request import TextBuilder
    from trioengine.engine_proc.runner import ModelRunner, StepBatch, StepResult
    from trioengine.engine_proc.structured_output.grammar import Compile, Grammar
    from trioengine.fault_plan import FaultPlan, Trigger
    from trioengine.outputs import RequestOutput
    from trioengine.sampling_params import SamplingParams
    from trioengine.structured import StructuredOutput

__all__ = ["EngineFaults", "FaultyChannel"]

PHASES: Final = ("commands", "schedule", "build", "execute", "poll aborts", "apply", "send")
ROOM_BYTES: Final = 2**30  # what "allocate until refused" is allowed before it is refused
_GRAIN_BYTES: Final = 2**26


def commit(trigger: Trigger) -> None:
    """Do to this process what the fault says."""
    fault = trigger.fault
    if fault.do == "hang":
        threading.Event().wait()  # for ever, with the GIL released
    elif fault.do == "exit":
        os._exit(fault.code)
    elif fault.do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.do == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.do == "allocate":
        _allocate_until_refused()
    else:
        raise trigger.error()


def _allocate_until_refused() -> None:
    """Raise ``MemoryError`` as the system does; a limit sees to it that nobody else goes short."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + ROOM_BYTES, limits[1]))
    hoard: list[bytearray] = []
    try:
        while True:
            hoard.append(bytearray(_GRAIN_BYTES))
    finally:
        hoard.clear()
        resource.setrlimit(resource.RLIMIT_AS, limits)


class EngineFaults:
    """What a plan does to one incarnation. Each method returns its argument where it does nothing.

    Attributes:
        step: Number of the step that runs.
        request: The sequence that is being added.
    """

    def __init__(self, plan: FaultPlan) -> None:
        self.step = 0
        self.request = 0
        self._plan = plan

    def on_load(self) -> None:
        """Commit what is to happen while loading."""
        for trigger in self._plan.triggers("load"):
            if trigger.is_due():
                commit(trigger)

    def timeline(self) -> StepTimeline:
        """Return a timeline that commits the phases' faults."""
        return _FaultyTimeline(self, self._plan.triggers(*PHASES))

    def runner(self, runner: ModelRunner) -> ModelRunner:
        """Return a runner that fails before it computes, or when it has sampled."""
        before, after = self._plan.triggers("forward"), self._plan.triggers("sampler")
        return _FaultyRunner(runner, self, before, after) if before or after else runner

    def backend(self, backend: EngineBackend) -> EngineBackend:
        """Return a backend that notes who is being added, and fails at an abort."""
        wrapped: Any = _FaultyBackend(backend, self, self._plan.triggers("abort"))
        return wrapped  # type: ignore[no-any-return]

    def make_text(
        self, make_text: Callable[[SamplingParams], TextBuilder]
    ) -> Callable[[SamplingParams], TextBuilder]:
        """Return a maker of detokenizers that fail."""
        triggers = self._plan.triggers("detokenizer")
        if not triggers:
            return make_text
        return lambda params: _FaultyText(make_text(params), self.request, triggers, self)

    def compile(self, compile_: Compile) -> Compile:
        """Return a compiler whose grammars fail at their first token."""
        triggers = self._plan.triggers("grammar")
        if not triggers:
            return compile_
        wrapped: Any = _FaultyCompile(compile_, self, triggers)
        return wrapped  # type: ignore[no-any-return]


class _FaultyTimeline(StepTimeline):
    def __init__(self, faults: EngineFaults, triggers: Sequence[Trigger]) -> None:
        super().__init__()
        self._faults, self._triggers = faults, triggers

    def begin_step(self, number: int) -> None:
        super().begin_step(number)
        self._faults.step = number

    def lap(self, phase: str) -> None:
        super().lap(phase)
        for trigger in self._triggers:
            if trigger.fault.at == phase and trigger.is_due(step=self._faults.step):
                commit(trigger)


class _Wrapper:
    """Everything else is the wrapped part's."""

    def __init__(self, wrapped: Any, faults: EngineFaults) -> None:
        object.__setattr__(self, "_wrapped", wrapped)
        object.__setattr__(self, "_faults", faults)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._wrapped, name, value)


class _FaultyRunner(_Wrapper):
    def __init__(
        self,
        runner: ModelRunner,
        faults: EngineFaults,
        before: Sequence[Trigger],
        after: Sequence[Trigger],
    ) -> None:
        super().__init__(runner, faults)
        object.__setattr__(self, "_before", before)
        object.__setattr__(self, "_after", after)

    def execute(self, batch: StepBatch) -> StepResult:
        step = self._faults.step
        for trigger in self._before:
            if trigger.is_due(step=step):
                commit(trigger)
        result: StepResult = self._wrapped.execute(batch)
        ids = batch.sampling.request_ids.tolist()
        for trigger in self._after:
            if trigger.fault.do == "spoil":
                self._spoil(trigger, ids, result)
            elif trigger.is_due(step=step):
                commit(trigger)
        return result

    def _spoil(self, trigger: Trigger, ids: list[int], result: StepResult) -> None:
        """Give one row a token that the vocabulary lacks."""
        for row, request_id in enumerate(ids):
            if trigger.is_due(step=self._faults.step, request=request_id):
                result.tokens = np.array(result.tokens, np.int32)
                result.tokens[row] = self._wrapped.model.vocab_size


class _FaultyBackend(_Wrapper):
    def __init__(
        self, backend: EngineBackend, faults: EngineFaults, triggers: Sequence[Trigger]
    ) -> None:
        super().__init__(backend, faults)
        object.__setattr__(self, "_triggers", triggers)

    def add_request(self, add: Any) -> Any:
        self._faults.request = add.request_id
        return self._wrapped.add_request(add)

    def abort(self, request_ids: Sequence[int]) -> list[RequestOutput]:
        for trigger in self._triggers:
            if any(trigger.is_due(step=self._faults.step, request=i) for i in request_ids):
                commit(trigger)
        aborted: list[RequestOutput] = self._wrapped.abort(request_ids)
        return aborted


class _FaultyText:
    """A detokenizer that raises."""

    def __init__(
        self, text: TextBuilder, request: int, triggers: Sequence[Trigger], faults: EngineFaults
    ) -> None:
        self._text, self._request = text, request
        self._triggers, self._faults = triggers, faults

    def append(self, token_ids: Sequence[int]) -> tuple[str, str | None, int]:
        for trigger in self._triggers:
            if trigger.is_due(step=self._faults.step, request=self._request):
                raise trigger.error()
        return self._text.append(token_ids)

    def flush(self) -> str:
        return self._text.flush()


class _FaultyCompile(_Wrapper):
    def __init__(
        self, compile_: Compile, faults: EngineFaults, triggers: Sequence[Trigger]
    ) -> None:
        super().__init__(compile_, faults)
        object.__setattr__(self, "_triggers", triggers)

    def __call__(self, structured: StructuredOutput) -> _FaultyGrammar:
        return _FaultyGrammar(self._wrapped(structured), self._faults, self._triggers)


class _FaultyGrammar(_Wrapper):
    def __init__(self, grammar: Grammar, faults: EngineFaults, triggers: Sequence[Trigger]) -> None:
        super().__init__(grammar, faults)
        object.__setattr__(self, "_triggers", triggers)

    def begin(self, *args: Any, **options: Any) -> Any:
        for trigger in self._triggers:
            if trigger.is_due(step=self._faults.step):
                raise trigger.error()
        return self._wrapped.begin(*args, **options)


class FaultyChannel(EngineChannel):
    """A channel whose frames to the server are spoilt on their way."""

    def __init__(self, plan: FaultPlan, **addresses: str) -> None:
        super().__init__(**addresses)
        self._spoiler = FrameSpoiler(plan.triggers("to_server"))

    def _send_frame(self, frame: bytes) -> None:
        for each in self._spoiler(frame):
            super()._send_frame(each)
