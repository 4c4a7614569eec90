"""Slips that show when an engine dies, stalls, sleeps or is asked to stop."""

from __future__ import annotations

from mutants.mutant import DEATHS, HISTORIES, KEEPER, NAP, STATUS, Mutant

__all__ = ["CRASH_SLIPS", "DRAIN_SLIPS", "OUTLIVES_SLIPS", "RESTART_SLIPS", "SLEEP_SLIPS"]

# Engine death is an event ------------------------------------------------------------------------

CRASH_SLIPS = (
    Mutant(
        "death-leaves-streams-waiting",
        "every request that stayed has exactly one end",
        "client/engine_client.py",
        "            self.fail_all(loss)\n            return",
        "            return",
    ),
    Mutant(
        "death-is-served-on",
        "whoever comes after the death is told of it",
        "client/engine_status.py",
        "        if state in (EngineState.READY, EngineState.RESTARTING):\n            return None",
        "        if state in (EngineState.READY, EngineState.DEAD):\n            return None",
        STATUS,
    ),
    Mutant(
        "exit-is-not-reported",
        "the cause of a death is the best that is known",
        "client/engine_status.py",
        "        self._report(Sensor.EXIT, reason)\n",
        "        pass\n",
        DEATHS,
    ),
    Mutant(
        "quickest-sensor-wins",
        "the cause of a death is the best that is known",
        "client/engine_death.py",
        "self.cause = self._reports[min(self._reports)]",
        "self.cause = self._reports[max(self._reports)]",
        DEATHS,
    ),
    Mutant(
        "death-during-a-drain-is-peace",
        "a death is never passed off as a peaceful end",
        "supervisor.py",
        "    if (death := server.death()) is not None:\n        raise death\n",
        "",
    ),
    Mutant(
        "stop-cuts-off-the-news-of-a-death",
        "every request that stayed has exactly one end, and it is the true one",
        "supervisor.py",
        "            await self._tell_of_death()\n",
        "            pass\n",
    ),
    Mutant(
        "gap-goes-unnoticed",
        "nothing is lost, doubled or reordered: a gap is fatal",
        "protocol.py",
        "        if envelope.number != self._expected:",
        "        if envelope.number == -1:",
    ),
)

# An engine that is started again -----------------------------------------------------------------

RESTART_SLIPS = (
    Mutant(
        "lost-request-is-not-told",
        "every request that stayed has exactly one end",
        "client/stream_table.py",
        "            if stream not in returned:\n                self._fail(stream, error)",
        "            if stream not in returned:\n                pass",
    ),
    Mutant(
        "dead-engine-takes-the-next-ones-room",
        "nobody waits while the engine has room",
        "client/stream_table.py",
        "        self.num_sent = 0\n        held: dict",
        "        held: dict",
    ),
    Mutant(
        "lost-request-stays-queued",
        "what leaves the queue costs the engine nothing",
        "client/stream_table.py",
        "                self._queue.remove(sequence)\n            sequence.request = None",
        "                pass\n            sequence.request = None",
    ),
    Mutant(
        "dead-engine-is-left-behind",
        "nothing of a dead engine is left",
        "process/engine_keeper.py",
        "            self._start.discard()\n",
        "            pass\n",
        KEEPER,
    ),
)

# A stop is bounded, and polite -------------------------------------------------------------------

DRAIN_SLIPS = (
    Mutant(
        "drain-cuts-instead-of-telling",
        "who is still unfinished when the drain's time is up is told so",
        "supervisor.py",
        '        self.client.abort_all("shutdown")\n',
        "",
        (*HISTORIES, "tests/test_supervisor.py"),
    ),
    Mutant(
        "asked-for-exit-is-a-death",
        "an end that was asked for is no death",
        "supervisor.py",
        "        self.status.mark_stopped()  # before it is asked",
        "        # before it is asked",
    ),
    Mutant(
        "drain-admits",
        "new requests are refused while draining",
        "client/engine_status.py",
        "        if state in (EngineState.READY, EngineState.RESTARTING):\n            return None",
        "        if state in (EngineState.READY, EngineState.DRAINING):\n            return None",
        STATUS,
    ),
    Mutant(
        "goodbye-is-an-internal-error",
        "an error fits what happened to its request",
        "http/asgi_stream.py",
        "error = _goodbye() if leaving else _failure()",
        "error = _failure()",
    ),
    Mutant(
        "pipelining-into-a-drain-cuts-the-answer",
        "every request that stayed has exactly one end",
        "http/h1.py",
        "                self._talked_on = True\n                return\n",
        "                self._talked_on = True\n",
    ),
)

# The server outlives its engine -------------------------------------------------------------------


OUTLIVES_SLIPS = (
    Mutant(
        "deaths-are-not-counted",
        "one death more than the limit is the end",
        "client/restart_budget.py",
        "        return len(self._deaths) <= self.limit",
        "        return self.limit > 0",
        KEEPER,
    ),
    Mutant(
        "starts-take-service-time",
        "starts that fail take no time of service",
        "client/restart_budget.py",
        "            self._ready_s = None\n        while",
        "        while",
        ("tests/client/test_restart_budget.py",),
    ),
    Mutant(
        "queue-dies-with-the-engine",
        "what the engine has not heard of waits for the next",
        "client/stream_table.py",
        "            if sequence.state is not SequenceState.QUEUED:\n                held",
        "            if sequence.state:\n                held",
        KEEPER,
    ),
    Mutant(
        "poison-is-replayed-for-ever",
        "a request is replayed once",
        "client/request_stream.py",
        "        self.num_replays -= 1\n",
        "",
        KEEPER,
    ),
    Mutant(
        "what-was-seen-is-replayed",
        "what a client has seen is not told twice",
        "client/request_stream.py",
        "self.num_replays > 0 and not self._handed_out and",
        "self.num_replays > 0 and",
        KEEPER,
    ),
    Mutant(
        "replayed-go-last",
        "what is sent again goes before all that wait",
        "client/request_queue.py",
        "move_to_end(sequence.request_id, last=False)",
        "move_to_end(sequence.request_id, last=True)",
        KEEPER,
    ),
    Mutant(
        "no-time-between-engines",
        "deadlines hold while there is no engine",
        "process/engine_keeper.py",
        "                nursery.start_soon(self._client.keep_time)\n",
        "",
        KEEPER,
    ),
    Mutant(
        "start-hangs-for-ever",
        "a start that fails is a death that counts",
        "process/engine_keeper.py",
        "        except (TrioEngineError, OSError) as error:\n            self._status.mark_dead(",
        "        except (TrioEngineError, OSError) as error:\n            str(",
        KEEPER,
    ),
    Mutant(
        "stop-waits-for-an-engine",
        "no engine is started only to be stopped",
        "supervisor.py",
        "        self._keeper.give_up_unless_serving()\n",
        "",
        KEEPER,
    ),
    Mutant(
        "stalled-engine-lives-on",
        "a stalled engine is killed where the user wants it",
        "process/engine_keeper.py",
        "            engine.kill()\n",
        "",
        KEEPER,
    ),
    Mutant(
        "last-stall-is-not-final",
        "--on-stall exit ends the server whatever the budget says",
        "process/engine_keeper.py",
        'final=wanted == "exit"',
        "final=False",
        KEEPER,
    ),
    Mutant(
        "no-stall-is-seen-in-a-drain",
        "an engine that finishes what runs is watched for stalls",
        "process/heartbeat_watch.py",
        ", EngineState.SLEEPING, EngineState.DRAINING}",
        "}",
        KEEPER,
    ),
    Mutant(
        "what-leaves-is-judged",
        "an engine that was asked to leave is not killed for a stall",
        "process/heartbeat_watch.py",
        " and not status.engine_is_gone",
        "",
        KEEPER,
    ),
)

SLEEP_SLIPS = (
    Mutant(
        "sleep-is-a-death",
        "an engine that was asked to leave has not died",
        "process/engine_keeper.py",
        "        self._status.dismiss()\n",
        "",
        NAP,
    ),
    Mutant(
        "sleep-cuts-what-runs",
        "what was admitted ends before the engine sleeps",
        "process/engine_keeper.py",
        "        idle = self._client.idle\n",
        "        return True\n",
        NAP,
    ),
    Mutant(
        "sleep-without-end",
        "falling asleep is bounded",
        "process/engine_keeper.py",
        "        with trio.move_on_after(nap.patience_s):",
        "        with trio.CancelScope():",
        NAP,
    ),
    Mutant(
        "requests-do-not-wake-it",
        "a request wakes the engine where the user wants it",
        "client/engine_client.py",
        "        self.nap.want_awake()\n",
        "",
        NAP,
    ),
    Mutant(
        "sleeping-is-welcome",
        "asleep, requests are refused unless they may wake it",
        "client/engine_status.py",
        "return None if self.wakes_on_request else error",
        "return None",
        (*HISTORIES, *NAP),
    ),
    Mutant(
        "who-orders-sleep-is-not-told",
        "whoever orders a sleep or an awakening is answered",
        "process/engine_keeper.py",
        "        self._client.nap.note_change()\n\n    async def _start_first",
        "\n    async def _start_first",
    ),
    Mutant(
        "awakening-waits-for-the-next",
        "whoever orders a sleep or an awakening is answered",
        "client/nap.py",
        "            if not self.wanted:  #",
        "            if self.wanted is None:  #",
        NAP,
    ),
    Mutant(
        "leaving-engine-is-given-more",
        "what comes while the engine leaves waits for the next",
        "client/engine_status.py",
        "        return self.dismissed or self.death.seen.is_set()",
        "        return self.death.seen.is_set()",
    ),
    Mutant(
        "sleep-outlasts-a-stop",
        "whoever orders a sleep or an awakening is answered",
        "process/engine_keeper.py",
        '        self._client.nap.fail(_cannot("the server is shutting down"))\n',
        "",
        NAP,
    ),
)
