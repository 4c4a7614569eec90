"""The real engine loop and core over the simulated runner, in memory, under the test's hand.

``SteppedEngine`` is a ``Transport``: what a client sends is encoded, decoded and handled by the
real ``EngineLoop``; its answers come back through ``receive`` after a second round of the codec.
Nothing moves unless the test says so: ``turn`` runs one turn of the loop (drain, then one step if
there is work), ``run_until_idle`` as many as it takes, and ``run_freely`` is a task that turns
whenever there is something to do, one step per ``step_time_s`` of (mock) time.

At every boundary within a turn a hook may act: ``engine.at("execute", lambda:
engine.send(Abort([7])))`` puts an abort on the wire between sampling and the poll of aborts. The
boundaries, in order, each named after the phase that has just ended: ``commands``, ``schedule``,
``build``, ``execute``, ``poll aborts``, ``apply``, ``send``.

``crash`` is a SIGKILL: nothing is answered any more, sending finds nobody. A scripted fault of the
runner (``SimScript(fail_at_step=3)``) ends it with ``Fatal``, as the real process would.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import trio

from helpers.sim_core import sim_core
from trioengine.engine_proc.faults import EngineFaults
from trioengine.engine_proc.loop import EngineLoop, fatal_from
from trioengine.engine_proc.profiling import StepTimeline
from trioengine.protocol import (
    PROTOCOL_VERSION,
    FrameEncoder,
    Hello,
    Progress,
    Ready,
    Shutdown,
    client_frames,
    engine_frames,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trioengine.engine_proc.sim_runner import SimScript
    from trioengine.fault_plan import FaultPlan
    from trioengine.protocol import ClientMessage, EngineMessage

__all__ = ["PHASES", "SteppedEngine"]

PHASES = ("commands", "schedule", "build", "execute", "poll aborts", "apply", "send")
TOKEN = "stepped"


class _HookedTimeline(StepTimeline):
    """Tells the engine's owner of every phase boundary."""

    def __init__(self, on_lap: Callable[[str], None], faults: EngineFaults | None) -> None:
        super().__init__()
        self._on_lap = on_lap
        self._faulty = None if faults is None else faults.timeline()

    def begin_step(self, number: int) -> None:
        super().begin_step(number)
        if self._faulty is not None:
            self._faulty.begin_step(number)

    def lap(self, phase: str) -> None:
        super().lap(phase)
        self._on_lap(phase)
        if self._faulty is not None:
            self._faulty.lap(phase)


class _NoPage:
    """A heartbeat page that remembers only the last word."""

    def __init__(self) -> None:
        self.phase = "starting"

    def begin_step(self, number: int) -> None:
        self.phase = f"step {number}"

    def idle(self) -> None:
        self.phase = "idle"


class SteppedEngine:
    """One engine incarnation in memory. Fulfils ``Transport``.

    Attributes:
        core: The real core; look, don't touch.
        runner: The simulated runner: ``runner.speakable`` is what ``sim_tokens`` wants.
        loop: The real loop.
        page: What the heartbeat page would say.
        sent: Every message that the client sent and the engine has not been shown yet.
        history: Every message that the engine sent, in order, as the client decodes it.
        dead: ``crash`` was called, or the loop has ended (after ``Fatal`` or ``Shutdown``).
    """

    def __init__(
        self,
        script: SimScript | None = None,
        *,
        starting: bool = False,
        send_error: Callable[[], Exception] = lambda: BrokenPipeError("the engine is gone"),
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        profile_dir: Path | None = None,
        plan: FaultPlan | None = None,
    ) -> None:
        """Say Hello and, unless ``starting``, Ready.

        Args:
            script: What the runner does; by default a small, flawless, instant model.
            starting: Stay before Ready until ``become_ready``.
            send_error: Makes the exception that ``send`` raises when the engine is gone.
            max_num_seqs: As of ``EngineCore``.
            max_num_batched_tokens: As of ``EngineCore``.
            enable_prefix_caching: As of ``EngineCore``.
            profile_dir: As of ``EngineCore``.
            plan: What goes wrong in it.
        """
        self.dead = False
        self.sent: collections.deque[ClientMessage] = collections.deque()
        self.history: list[EngineMessage] = []
        self.page = _NoPage()
        self._send_error = send_error
        self._hooks: dict[str, list[Callable[[], None]]] = {}
        self._outbox: list[EngineMessage] = []
        self._to_engine = FrameEncoder(), client_frames()
        self._to_client = FrameEncoder(), engine_frames()
        self._changed = trio.Event()
        self._ready = False
        faults = None if plan is None else EngineFaults(plan)
        timeline = _HookedTimeline(self._run_hooks, faults)
        self.core, self.runner = sim_core(
            script,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            profile_dir=profile_dir,
            timeline=timeline,
            faults=faults,
        )
        backend = self.core if faults is None else faults.backend(self.core)
        self.loop = EngineLoop(backend, _Wire(self), self.page, timeline)
        self._say(Hello(PROTOCOL_VERSION, TOKEN))
        if not starting:
            self.become_ready()

    # The client's side (Transport) ----------------------------------------------------------

    def send(self, message: ClientMessage) -> None:
        """Put a message on the wire; the engine sees it when it next drains."""
        if self.dead:
            raise self._send_error()
        encoder, decoder = self._to_engine
        decoded = decoder.decode(encoder.encode(message))
        if not isinstance(decoded, Hello):  # the handshake is not the loop's business
            self.sent.append(decoded)
        self._wake()

    async def receive(self) -> list[EngineMessage]:
        """Return at least one message; from a dead engine, what it had sent, then nothing ever."""
        while not self._outbox:
            await self._changed.wait()
        await trio.lowlevel.checkpoint_if_cancelled()
        messages, self._outbox = self._outbox, []
        return messages

    # The engine's side ----------------------------------------------------------------------

    def take_sent(self) -> list[ClientMessage]:
        """Take what has arrived off the wire."""
        messages = list(self.sent)
        self.sent.clear()
        return messages

    @property
    def live(self) -> frozenset[int]:
        """Ids of the requests that the engine holds; those still on the wire are not among them."""
        return self.core.live_ids

    @property
    def free_blocks(self) -> int:
        """Blank and evictable blocks together."""
        stats = self.core.stats()
        return stats.free_blocks + stats.evictable_blocks

    def report_progress(self, phase: str, fraction: float) -> None:
        """Send ``Progress``, as a loading engine does."""
        self._say(Progress(phase, fraction))

    def become_ready(self) -> None:
        """Send ``Ready``."""
        self._ready = True
        self._say(Ready(self.core.model, self.core.limits))
        self._wake()

    def at(self, phase: str, action: Callable[[], None]) -> None:
        """Do ``action`` once, when ``phase`` next ends."""
        if phase not in PHASES:
            raise ValueError(f"no phase {phase!r}; there are {PHASES}")
        self._hooks.setdefault(phase, []).append(action)

    def turn(self) -> None:
        """Run one turn of the loop: drain the wire, then one step if there is work."""
        if self.dead or not self._ready:
            return
        try:
            self.loop.turn()
        except _CrashedError:
            return
        except AssertionError:
            raise  # of the test that watches, not of the engine
        except Exception as error:
            self._say(fatal_from(error))
            self._end()
        if self.loop.stopped:
            self._end()
        elif not self.has_something_to_do():
            self.page.idle()

    def has_something_to_do(self) -> bool:
        """True where a turn would do something."""
        return not self.dead and self._ready and bool(self.sent or self.loop.has_something_to_do())

    def run_until_idle(self, *, max_turns: int = 10_000) -> int:
        """Turn until there is nothing to do; return how many turns that took."""
        for turns in range(max_turns):
            if not self.has_something_to_do():
                self.core.check_integrity()
                return turns
            self.turn()
        raise AssertionError(f"not idle after {max_turns} turns: {self.core.stats()}")

    async def run_freely(
        self,
        step_time_s: float = 0.01,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Turn whenever there is something to do, until the engine ends. For ``nursery.start``."""
        task_status.started()
        while not self.dead:
            if self.has_something_to_do():
                self.turn()
                await trio.sleep(step_time_s)
            else:
                await self._changed.wait()

    def crash(self) -> None:
        """End as if killed; within a hook, the rest of the turn does not happen either."""
        within_turn = self._in_turn
        self._end()
        if within_turn:
            raise _CrashedError

    def shut_down(self) -> None:
        """Ask it to leave and let it."""
        self.send(Shutdown())
        while not self.dead:
            self.turn()

    # In between -----------------------------------------------------------------------------

    _in_turn = False

    def _run_hooks(self, phase: str) -> None:
        actions = self._hooks.pop(phase, [])
        self._in_turn = True
        try:
            for action in actions:
                action()
        finally:
            self._in_turn = False

    def _say(self, message: EngineMessage) -> None:
        encoder, decoder = self._to_client
        decoded = decoder.decode(encoder.encode(message))
        self.history.append(decoded)
        self._outbox.append(decoded)
        self._wake()

    def _end(self) -> None:
        self.dead = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class _CrashedError(BaseException):
    """Unwinds a turn in which the engine was killed."""


class _Wire:
    """The engine's end of the wire: a ``Channel``."""

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine

    def drain(self) -> list[ClientMessage]:
        return self._engine.take_sent()

    def wait(self) -> None:
        raise AssertionError("a stepped engine never waits")

    def wake(self) -> None:
        self._engine._wake()

    def send(self, message: EngineMessage) -> None:
        self._engine._say(message)
