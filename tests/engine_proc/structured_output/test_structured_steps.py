"""Requests with a grammar through the real core over the simulated runner, and their refusals."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from helpers.sim_core import compilations_of, sim_core
from trioengine.engine_proc.backend import LATER
from trioengine.outputs import FinishReason
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams
from trioengine.structured import StructuredOutput

if TYPE_CHECKING:
    from trioengine.engine_proc.core import EngineCore
    from trioengine.outputs import RequestOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"enum": ["x", "y"]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


def run(core: EngineCore, *shapes: StructuredOutput, **params: Any) -> list[RequestOutput]:
    """Return what came of one request for each shape, its deltas merged."""
    outputs: dict[int, RequestOutput] = {}
    for request_id, shape in enumerate(shapes):
        add = Add(request_id, [300], SamplingParams(max_tokens=300, structured=shape, **params))
        assert core.add_request(add) in (LATER, None)
    _, refused = core.settle()
    outputs |= {output.request_id: output for output in refused}
    while core.has_work():
        for delta in core.step(list):
            if delta.request_id in outputs:
                outputs[delta.request_id].merge(delta)
            else:
                outputs[delta.request_id] = delta
    core.check_integrity()
    return [outputs[request_id] for request_id in range(len(shapes))]


def test_each_answer_has_the_shape_that_was_asked_for() -> None:
    core, _ = sim_core()
    shapes = [
        StructuredOutput("json", json.dumps(SCHEMA)),
        StructuredOutput("regex", "[ab]{3}c"),
        StructuredOutput("choice", '["yes", "no"]'),
        StructuredOutput("grammar", 'root ::= "a" [0-9] "z"'),
        StructuredOutput("grammar", 'start: "q" /[0-9]/ "!"'),
    ]
    outputs = run(core, *shapes)
    assert all(output.finish_reason is FinishReason.STOP for output in outputs), outputs
    answer, *texts = (output.text for output in outputs)
    assert set(json.loads(answer)) == {"a", "b"}
    patterns = ["[ab]{3}c", "yes|no", "a[0-9]z", "q[0-9]!"]
    for text, pattern in zip(texts, patterns, strict=True):
        assert re.fullmatch(pattern, text), text


def test_a_complete_answer_ends_whatever_min_tokens_and_ignore_eos_say() -> None:
    core, _ = sim_core()
    [output] = run(core, StructuredOutput("choice", '["no"]'), min_tokens=50, ignore_eos=True)
    assert (output.text, output.finish_reason) == ("no", FinishReason.STOP)


@pytest.mark.parametrize(
    "shape",
    [
        StructuredOutput("regex", "foo**"),
        StructuredOutput("regex", "(foo"),
        StructuredOutput("regex", "a{1000000}"),
        StructuredOutput("regex", "(" * 300 + ")" * 300),
        StructuredOutput("json", '{"type": "foo"}'),
        StructuredOutput("json", "{"),
        StructuredOutput("json", "[1]"),
        StructuredOutput("json", "false"),
        StructuredOutput("json", '{"type": "string", "pattern": "a**"}'),
        StructuredOutput("json", '{"not": {"type": "string"}}'),
        StructuredOutput("json", '{"$ref": "#"}'),
        StructuredOutput("choice", '["a", 1]'),
        StructuredOutput("grammar", "start: ???"),
        StructuredOutput("grammar", "root ::= ("),
    ],
    ids=lambda shape: shape.spec[:20],
)
def test_what_is_no_specification_is_refused_alone(shape: StructuredOutput) -> None:
    core, _ = sim_core()
    good = StructuredOutput("choice", '["yes"]')
    refused, served = run(core, shape, good)
    assert refused.finish_reason is FinishReason.ERROR
    assert refused.refused
    assert refused.param == "structured_outputs"
    assert refused.error
    assert served.text == "yes"


def test_a_grammar_that_fails_costs_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    core, _ = sim_core()
    shape, other = StructuredOutput("regex", "[ab]{9}"), StructuredOutput("regex", "[cd]{9}")
    for request_id, structured in enumerate((shape, other)):
        core.add_request(Add(request_id, [300], SamplingParams(structured=structured)))
    core.settle()
    victim = core._live[0].grammar
    assert victim is not None

    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("broken")

    monkeypatch.setattr(victim, "matcher", Broken())
    ended: dict[int, str | None] = {}
    text = ""
    while core.has_work():
        for delta in core.step(list):
            text += delta.text if delta.request_id == 1 else ""
            if delta.finish_reason is not None:
                ended[delta.request_id] = delta.error
    assert ended[0]
    assert ended[1] is None
    assert re.fullmatch("[cd]{9}", text)


def test_an_abort_while_compiling_leaves_nothing() -> None:
    core, _ = sim_core()
    held: list[Any] = []
    compilations_of(core)._start = held.append
    add = Add(7, [300], SamplingParams(structured=StructuredOutput("regex", "[ef]+")))
    assert core.add_request(add) is LATER
    assert not core.has_work()
    assert core.stats().num_waiting == 1
    [terminal] = core.abort([7])
    assert terminal.finish_reason is FinishReason.ABORT
    assert not core.live_ids
    for work in held:
        work()
    assert core.settle() == ([], [])
    core.check_integrity()
