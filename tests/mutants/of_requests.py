"""Slips that a request feels: its place, its blocks, its words, its end."""

from __future__ import annotations

from mutants.mutant import BLOCKS, CORE, HISTORIES, QUEUE, SCHEDULER, TEXT, Mutant

__all__ = ["ABORT_SLIPS", "BLOCKS_SLIPS", "QUEUE_SLIPS", "TERMINAL_SLIPS"]

# A client that leaves becomes an abort, at once ---------------------------------------------------

ABORT_SLIPS = (
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

# The queue and its bounds ------------------------------------------------------------------------

QUEUE_SLIPS = (
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
        (*HISTORIES, "tests/client/test_engine_client_time.py"),
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
        "a-refusal-is-not-counted",
        "the metrics tell what the clients were told",
        "http/turnstile.py",
        "            self.finished(self.record)\n",
        "            pass\n",
    ),
    Mutant(
        "a-refused-body-is-waited-for",
        "who is refused is told so at once",
        "http/h1.py",
        "            elif self._refusal is not None:",
        "            elif self._refusal is not None and event is not h11.NEED_DATA:",
        ("tests/http/test_turnstile.py",),
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

# Blocks are conserved ----------------------------------------------------------------------------

BLOCKS_SLIPS = (
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

TERMINAL_SLIPS = (
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
