"""What must never happen, and for each a way to make it happen that some test must notice.

``nox -s mutants`` applies each to a copy of the sources and must see its tests go red. A mutant is
a slip that could happen: a line that is not there, a comparison that is off by one, a guard that
lets everything pass. ``HISTORIES`` are the random histories of a whole server; where a mutant names
other tests, those are the ones whose business it is.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["MUTANTS", "Mutant"]

HISTORIES: Final = ("tests/property/test_server_histories.py",)
BLOCKS: Final = ("tests/property/test_block_pool.py",)
SCHEDULER: Final = ("tests/property/test_scheduler.py",)
DEATHS: Final = ("tests/property/test_crash_paths.py",)
QUEUE: Final = ("tests/client/test_request_queue.py",)
STATUS: Final = ("tests/client/test_engine_status.py",)
CORE: Final = ("tests/engine_proc/test_core.py",)
TEXT: Final = ("tests/property/test_detokenizer.py",)
KEEPER: Final = ("tests/process/test_engine_keeper.py",)
NAP: Final = ("tests/process/test_engine_sleep.py",)


class Mutant(NamedTuple):
    """One slip.

    Attributes:
        name: Unique.
        invariant: What it breaks.
        file: Below ``src/trioengine``.
        old: Text that is there exactly once.
        new: What takes its place.
        tests: Arguments of pytest that must fail.
    """

    name: str
    invariant: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = HISTORIES


# A client that leaves becomes an abort, at once ---------------------------------------------------

_ABORT = (
    Mutant(
        "abort-is-not-sent",
        "what nobody wants any more is aborted at once",
        "client/outlet.py",
        "        if request_ids:\n            self.send(Abort(request_ids))",
        "        if not request_ids:\n            self.send(Abort(request_ids))",
    ),
    Mutant(
        "abort-within-a-step-is-lost",
        "every abort is confirmed by exactly one terminal, or counted as ignored",
        "engine_proc/core.py",
        "outputs = self.abort(poll_aborts())",
        "outputs = self.abort(list(poll_aborts())[:0])",
    ),
    Mutant(
        "abort-behind-its-own-add-is-lost",
        "every abort is confirmed by exactly one terminal, or counted as ignored",
        "engine_proc/loop.py",
        "            if late:\n",
        "            if not late:\n",
    ),
    Mutant(
        "aborted-request-goes-on-speaking",
        "nothing follows a terminal",
        "engine_proc/core.py",
        "            if request.status is not RequestStatus.RUNNING:\n                continue",
        "            if request.status is None:\n                continue",
    ),
    Mutant(
        "owner-is-not-told-of-a-disconnect",
        "what nobody wants any more is aborted at once",
        "http/client_connection.py",
        "            tell_owner(self.loss)\n",
        "            pass\n",
    ),
    Mutant(
        "disconnect-behind-unread-bytes-is-unseen",
        "what nobody wants any more is aborted at once",
        "http/client_connection.py",
        '    def _on_peer_gone(self) -> None:\n        self.lost("client_disconnect")',
        "    def _on_peer_gone(self) -> None:\n        pass",
    ),
    Mutant(
        "abort-is-not-counted",
        "aborted requests = confirmations + those whose engine ended first",
        "client/stream_table.py",
        "            self._metrics.requests_aborted.inc(reason)\n",
        "",
    ),
    Mutant(
        "lost-abort-is-not-counted",
        "aborted requests = confirmations + those whose engine ended first",
        "client/stream_table.py",
        "            self._metrics.aborts_unconfirmed.inc()\n",
        "            pass\n",
    ),
    Mutant(
        "cancelled-by-id-stays-findable",
        "no table keeps an entry",
        "http/open_requests.py",
        "        del self._streams[place]\n",
        "        pass\n",
    ),
)

# Engine death is an event ------------------------------------------------------------------------

_CRASH = (
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

_RESTART = (
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
        ("tests/process/test_engine_keeper.py",),
    ),
)

# The queue and its bounds ------------------------------------------------------------------------

_QUEUE = (
    Mutant(
        "engine-is-left-to-starve",
        "nobody waits while the engine has room",
        "client/engine_client.py",
        "                self._outlet.fill()\n                self._note_idle()",
        "                self._note_idle()",
    ),
    Mutant(
        "queue-time-has-no-end",
        "nobody waits in the queue for longer than was promised",
        "client/engine_client.py",
        "        if stream.num_queued:\n            opened_s",
        "        if not stream.num_queued:\n            opened_s",
    ),
    Mutant(
        "deadline-is-not-armed",
        "a deadline is kept in whatever phase",
        "client/engine_client.py",
        "        if deadline_s is not None:\n            stream.timers",
        "        if deadline_s is None:\n            stream.timers",
        (*HISTORIES, "tests/client/test_engine_client.py"),
    ),
    Mutant(
        "timers-outlive-their-request",
        "no timer is left",
        "client/request_stream.py",
        "            timer.cancel()\n",
        "            pass\n",
    ),
    Mutant(
        "aborted-request-stays-queued",
        "what leaves the queue costs the engine nothing",
        "client/stream_table.py",
        "                self._queue.remove(sequence)\n                stream.num_queued -= 1",
        "                stream.num_queued -= 1",
    ),
    Mutant(
        "places-are-not-given-back",
        "no place in the queue is left taken",
        "client/admission.py",
        "        self.in_use -= places\n",
        "",
    ),
    Mutant(
        "only-the-first-sequence-is-charged",
        "a request is charged for all its sequences",
        "client/admission.py",
        "        self._admission._take(num_sequences - self._places)\n",
        "",
    ),
    Mutant(
        "one-key-starves-the-others",
        "each key gets its share of the queue",
        "client/request_queue.py",
        "        lane.position += lane.stride\n",
        "",
        QUEUE,
    ),
    Mutant(
        "absence-is-credit",
        "a key that comes back begins where the queue stands",
        "client/request_queue.py",
        "            lane.position = max(lane.position, self._position)\n",
        "            pass\n",
        QUEUE,
    ),
)

# A stop is bounded, and polite -------------------------------------------------------------------

_DRAIN = (
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
        "http/h1.py",
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

# Blocks are conserved ----------------------------------------------------------------------------

_BLOCKS = (
    Mutant(
        "finished-request-keeps-its-blocks",
        "every block is free when nobody is left",
        "engine_proc/scheduler.py",
        "            self.running.remove(request)\n            self.kv_cache.free(request)",
        "            self.running.remove(request)",
    ),
    Mutant(
        "preempted-request-keeps-its-blocks",
        "a request that does not run holds no block",
        "engine_proc/scheduler.py",
        "        self.running.remove(victim)\n        self.kv_cache.free(victim)",
        "        self.running.remove(victim)",
        SCHEDULER,
    ),
    Mutant(
        "shared-block-is-held-once",
        "a block is free when nobody holds it, and not before",
        "engine_proc/kv_cache/block_pool.py",
        "                del self._evictable[block]\n            self._references[block] += 1",
        "                del self._evictable[block]\n            self._references[block] = 1",
        BLOCKS,
    ),
    Mutant(
        "evicted-block-keeps-its-prefix",
        "a prefix hit never sees another sequence's keys and values",
        "engine_proc/kv_cache/block_pool.py",
        "            self._forget(block)\n",
        "            pass\n",
        BLOCKS,
    ),
    Mutant(
        "coming-prefix-never-comes",
        "nobody waits for a prefix that nobody computes",
        "engine_proc/kv_cache/manager.py",
        "        self._coming.difference_update(request.block_hashes[request.num_sealed :])\n",
        "",
        ("tests/engine_proc/kv_cache/test_manager.py", *SCHEDULER),
    ),
    Mutant(
        "row-outlives-its-request",
        "the rows of the batch are the running requests",
        "engine_proc/core.py",
        "            self._batch.remove(request)\n        request.finish",
        "            pass\n        request.finish",
    ),
)

# One terminal, and the true text -----------------------------------------------------------------

_TERMINAL = (
    Mutant(
        "one-token-too-many",
        "every text is what was foretold, alone or in company",
        "engine_proc/intake.py",
        "len(add.prompt_token_ids) + add.params.max_tokens)",
        "len(add.prompt_token_ids) + add.params.max_tokens + 1)",
    ),
    Mutant(
        "end-swallows-what-was-held-back",
        "joined deltas are the decoded tokens",
        "engine_proc/detokenizer.py",
        "        return held + tail\n",
        "        return tail\n",
        TEXT,
    ),
    Mutant(
        "merged-delta-loses-the-older-text",
        "joined deltas are the decoded tokens, however late they are read",
        "outputs.py",
        "self.text += ",
        "self.text = ",
    ),
    Mutant(
        "stream-ends-without-done",
        "a stream that went well ends with [DONE], once",
        "http/narrate.py",
        "        ) + self._replies.done\n",
        "        )\n",
    ),
    Mutant(
        "failed-stream-ends-in-silence",
        "a stream that failed ends with one error event",
        "http/generate.py",
        "await writer.end(narration.failure(failure), close=True)",
        'await writer.end(b"", close=True)',
    ),
    Mutant(
        "failed-stream-is-kept-alive",
        "the connection of a stream that failed closes",
        "http/generate.py",
        "await writer.end(narration.failure(failure), close=True)",
        "await writer.end(narration.failure(failure))",
    ),
    Mutant(
        "siblings-of-a-failed-sequence-go-on",
        "a request that failed holds nothing in the engine",
        "client/stream_table.py",
        "                to_abort = self._abort(stream, now_s)\n",
        "                pass\n",
        ("tests/client/test_engine_client.py", "tests/client/test_stream_table.py"),
    ),
    Mutant(
        "one-bad-row-is-everybodys-death",
        "what one request contains hurts that request alone",
        "engine_proc/core.py",
        "                output = error_output(request.request_id, error)\n            if output",
        "                raise\n            if output",
        CORE,
    ),
)

# The server outlives its engine -------------------------------------------------------------------


_OUTLIVES = (
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

_SLEEP = (
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

MUTANTS: Final = (
    *_ABORT,
    *_CRASH,
    *_QUEUE,
    *_DRAIN,
    *_BLOCKS,
    *_TERMINAL,
    *_RESTART,
    *_OUTLIVES,
    *_SLEEP,
)
