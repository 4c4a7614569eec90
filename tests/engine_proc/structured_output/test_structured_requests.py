"""Grammars and everything else that can happen to a request: preemption, company, stops, aborts."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from helpers.sim_core import compilations_of, sim_core
from trioengine.engine_proc.backend import LATER
from trioengine.engine_proc.sim_runner import SimScript
from trioengine.errors import InternalError, InvalidRequestError
from trioengine.outputs import FinishReason
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams
from trioengine.structured import StructuredOutput

if TYPE_CHECKING:
    from trioengine.engine_proc.core import EngineCore
    from trioengine.outputs import RequestOutput

LETTERS = StructuredOutput("regex", "([ab]{3} ){20}c")


def run(core: EngineCore, adds: list[Add]) -> dict[int, RequestOutput]:
    """Return what came of each, its deltas merged."""
    outputs: dict[int, RequestOutput] = {}
    for add in adds:
        assert core.add_request(add) in (LATER, None)
    core.settle()
    while core.has_work():
        for delta in core.step(list):
            if (earlier := outputs.setdefault(delta.request_id, delta)) is not delta:
                earlier.merge(delta)
    core.check_integrity()
    return outputs


def shaped(request_id: int, shape: StructuredOutput = LETTERS, **fields: Any) -> Add:
    said: dict[str, Any] = {"max_tokens": 300, "structured": shape, "seed": request_id}
    params = SamplingParams(**said | fields)
    return Add(request_id, [300 + request_id, 301], params)


def test_an_answer_that_is_interrupted_goes_on_where_it_was() -> None:
    roomy, _ = sim_core()
    alone = {i: run(roomy, [shaped(i)])[i].text for i in range(6)}
    # 6 sequences of 4 blocks each do not fit: they take turns.
    tight, _ = sim_core(SimScript(num_blocks=12, max_model_len=180))
    together = run(tight, [shaped(i) for i in range(6)])
    assert tight.stats().preemptions > 0
    assert {i: output.text for i, output in together.items()} == alone
    for text in alone.values():
        assert re.fullmatch("([ab]{3} ){20}c", text), text


def test_what_the_cache_holds_makes_no_difference() -> None:
    prompt = list(range(300, 400))
    params = SamplingParams(max_tokens=300, structured=LETTERS, seed=5)
    core, _ = sim_core(SimScript(num_blocks=16, max_model_len=256))
    [first] = run(core, [Add(1, prompt, params)]).values()
    hits = core.stats().prefix_hit_tokens
    [again] = run(core, [Add(1, prompt, params)]).values()
    assert core.stats().prefix_hit_tokens > hits
    filler = SamplingParams(max_tokens=1)
    for i in range(2, 6):  # evict it
        run(core, [Add(i, list(range(400 + 100 * i, 600 + 100 * i)), filler)])
    [evicted] = run(core, [Add(1, prompt, params)]).values()
    assert first.text == again.text == evicted.text


@pytest.mark.parametrize("num_steps", [1, 4])
def test_company_makes_no_difference(num_steps: int) -> None:
    core, _ = sim_core(num_scheduler_steps=num_steps)
    alone = run(core, [shaped(3)])[3].text
    plain = Add(9, [300], SamplingParams(max_tokens=80, ignore_eos=True))
    other = shaped(4, StructuredOutput("choice", '["yes", "no"]'))
    together = run(core, [plain, shaped(3), other, shaped(5)])
    assert together[3].text == alone
    assert together[4].text in ("yes", "no")
    assert together[9].finish_reason is FinishReason.LENGTH


def test_a_stop_string_cuts_a_shape() -> None:
    core, _ = sim_core()
    shape = StructuredOutput("regex", "one two stop three")
    output = run(core, [shaped(1, shape, stop=("stop",))])[1]
    assert (output.text, output.finish_reason) == ("one two ", FinishReason.STOP)
    assert output.stop_reason == "stop"
    output = run(core, [shaped(2, shape, stop=("four",))])[2]
    assert (output.text, output.stop_reason) == ("one two stop three", None)


def test_forbidden_tokens_and_a_shape_hold_together() -> None:
    core, _ = sim_core()
    shape = StructuredOutput("regex", "[ab]{8}")
    free = run(core, [shaped(1, shape)])[1]
    bias = dict.fromkeys(free.token_ids, -100)
    biased = run(core, [shaped(2, shape, logit_bias=bias)])[2]
    assert re.fullmatch("[ab]{8}", biased.text)
    assert biased.token_ids != free.token_ids


def test_a_shape_and_a_list_of_tokens_that_exclude_each_other_end_in_an_error() -> None:
    core, _ = sim_core()
    ended = run(core, [shaped(1, allowed_token_ids=(1500,)), shaped(2)])
    assert ended[1].finish_reason is FinishReason.ERROR
    assert ended[2].finish_reason is FinishReason.STOP


class Broken:
    """A compiler that fails as it is told to."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self, structured: StructuredOutput, /) -> Any:
        raise self._error

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (RuntimeError("oops"), False),
        (InternalError("oops"), False),
        (InvalidRequestError("oops", param="p"), True),
    ],
)
def test_a_compiler_that_fails_fails_who_asked(error: Exception, refused: bool) -> None:
    core, _ = sim_core()
    compilations_of(core)._compile = Broken(error)
    assert core.add_request(shaped(1)) is LATER
    assert core.add_request(Add(2, [300], SamplingParams(max_tokens=2))) is None
    _, [told] = core.settle()
    assert (told.request_id, told.refused) == (1, refused)
    assert "oops" in (told.error or "")
    assert core.live_ids == {2}
    core.abort([2])
    core.check_integrity()


def test_one_compilation_serves_all_who_wait_and_aborting_one_spares_the_others() -> None:
    core, _ = sim_core()
    held: list[Any] = []
    compilations_of(core)._start = held.append
    shape = StructuredOutput("json", json.dumps({"enum": [1, 2]}))
    for i in range(3):
        assert core.add_request(shaped(i, shape)) is LATER
    assert len(held) == 1
    assert not core.has_news()
    [gone] = core.abort([1])
    assert gone.finish_reason is FinishReason.ABORT
    held.pop()()
    assert core.has_news()
    assert core.settle() == ([0, 2], [])
    while core.has_work():
        core.step(list)
    assert core.add_request(shaped(7, shape)) is None  # known by now
    core.abort([7])
    core.check_integrity()
    assert compilations_of(core).num_waiting == 0


def test_compilations_beyond_the_threads_wait_their_turn() -> None:
    core, _ = sim_core()
    held: list[Any] = []
    compilations_of(core)._start = held.append
    for i in range(4):
        core.add_request(shaped(i, StructuredOutput("regex", f"a{i}")))
    assert len(held) == 2
    core.abort([3])  # its compilation has not begun: it never will
    for work in tuple(held):  # it grows
        work()
    assert len(held) == 3
    held[-1]()
    assert len(held) == 3
    accepted, refused = core.settle()
    assert (sorted(accepted), refused) == ([0, 1, 2], [])
    core.abort([0, 1, 2])
    core.check_integrity()


def test_an_abort_between_the_compilation_and_its_news_leaves_nothing() -> None:
    core, _ = sim_core()
    assert core.add_request(shaped(1)) is LATER
    assert core.has_news()
    [gone] = core.abort([1])
    assert gone.finish_reason is FinishReason.ABORT
    assert core.settle() == ([], [])
    assert not core.has_news()
    core.check_integrity()


class Unusable:
    """A grammar that compiles and cannot be begun."""

    def begin(self) -> None:
        raise RuntimeError("no state to begin in")


def test_a_grammar_that_cannot_be_begun_ends_its_own_request_only() -> None:
    core, _ = sim_core()
    compilations = compilations_of(core)
    compile_: Any = compilations._compile
    unusable: Any = lambda shape: Unusable() if shape == LETTERS else compile_(shape)  # noqa: E731
    compilations._compile = unusable
    for add in (shaped(1), shaped(2, StructuredOutput("regex", "ab"))):
        assert core.add_request(add) is LATER
    accepted, [told] = core.settle()
    assert (accepted, told.request_id) == ([2], 1)
    assert told.finish_reason is FinishReason.ERROR
    assert "no state to begin in" in str(told.error)
    core.check_integrity()
    assert core.live_ids == {2}
    core.abort([2])
