"""Deltas add up to the same whole, however they are cut and merged."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from trioengine.outputs import FinishReason, RequestOutput, TokenLogprob


def told(token: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5 * token, 1 + token, [(token, -0.5 * token)])


def deltas(tokens: list[int], *, prompt: int) -> list[RequestOutput]:
    outputs = [RequestOutput(1, str(t), [t], logprobs=[told(t)]) for t in tokens]
    outputs[0].prompt_logprobs = [None, *map(told, range(1, prompt))]
    outputs[-1].finish_reason = FinishReason.LENGTH
    return outputs


@given(st.lists(st.integers(0, 9), min_size=1), st.data())
def test_merged_deltas_are_the_whole(tokens: list[int], data: st.DataObject) -> None:
    first, *rest = deltas(tokens, prompt=3)
    pending = [first]
    for later in rest:
        if data.draw(st.booleans()):
            pending[-1].merge(later)
        else:
            pending.append(later)
    whole = pending[0]
    for later in pending[1:]:
        whole.merge(later)
    assert whole.token_ids == tokens
    assert whole.logprobs == [told(t) for t in tokens]
    assert whole.prompt_logprobs == [None, told(1), told(2)]
    assert whole.finish_reason is FinishReason.LENGTH


def test_merging_leaves_the_later_delta_as_it_was() -> None:
    first, second = RequestOutput(1), RequestOutput(1, "a", [1], logprobs=[told(1)])
    third = RequestOutput(1, "b", [2], logprobs=[told(2)])
    first.merge(second)
    first.merge(third)
    assert second.logprobs == [told(1)]
    assert first.logprobs == [told(1), told(2)]


def test_nobody_who_asks_for_nothing_is_told_anything() -> None:
    output = RequestOutput(1, "a", [1])
    output.merge(RequestOutput(1, "b", [2]))
    assert output.logprobs is None
    assert output.prompt_logprobs is None


def test_logprobs_survive_the_wire() -> None:
    output = deltas([4, 5], prompt=3)[0]
    frame = msgspec.msgpack.encode(output)
    assert msgspec.msgpack.decode(frame, type=RequestOutput) == output
