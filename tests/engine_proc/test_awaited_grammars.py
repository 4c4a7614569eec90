"""Who waits for a grammar, and what becomes of them; a compiler that makes words out of nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from helpers.requests import make_request
from trioengine.engine_proc.awaited_grammars import AwaitedGrammars
from trioengine.engine_proc.structured_output.compilations import Compilations
from trioengine.errors import InternalError, InvalidRequestError
from trioengine.sampling_params import SamplingParams
from trioengine.structured import StructuredOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.engine_proc.request import Request


class Word:
    def __init__(self, spec: str) -> None:
        self.spec = spec

    def begin(self) -> str:
        if self.spec == "stuck":
            raise RuntimeError("no state to begin in")
        return self.spec


class Words:
    def __call__(self, structured: StructuredOutput) -> Any:
        if structured.spec == "bad":
            raise InternalError("no such word")
        return Word(structured.spec)

    def close(self) -> None:
        pass


def wants(request_id: int, spec: str) -> Request:
    params = SamplingParams(structured=StructuredOutput("regex", spec))
    return make_request([1], request_id=request_id, params=params)


def new_grammars() -> tuple[AwaitedGrammars, list[Callable[[], None]]]:
    """Return them with the compilations that are to be run."""
    held: list[Callable[[], None]] = []
    return AwaitedGrammars(Compilations(Words(), start=held.append)), held


def test_who_wants_none_does_not_wait() -> None:
    for grammars in (AwaitedGrammars(None), new_grammars()[0]):
        request = make_request([1])
        assert grammars.give(request)
        assert request.grammar is None
        assert not grammars.has_settled()
        assert grammars.settle() == []
        grammars.close()


def test_an_engine_without_grammars_refuses_who_wants_one() -> None:
    with pytest.raises(InvalidRequestError, match="no grammars"):
        AwaitedGrammars(None).give(wants(1, "a"))


def test_each_gets_its_own_when_it_is_there_and_the_next_at_once() -> None:
    grammars, held = new_grammars()
    woken: list[int] = []
    grammars.when_settled(lambda: woken.append(1))
    first, second = wants(1, "a"), wants(2, "b")
    assert not grammars.give(first)
    assert not grammars.give(second)
    assert grammars.settle() == []
    held[1]()
    assert woken
    assert grammars.has_settled()
    assert grammars.settle() == [(second, None)]
    held[0]()
    assert grammars.settle() == [(first, None)]
    assert [str(first.grammar), str(second.grammar)] == ["a", "b"]
    assert grammars.give(third := wants(3, "a"))
    assert str(third.grammar) == "a"


@pytest.mark.parametrize(("spec", "kind"), [("bad", InternalError), ("stuck", RuntimeError)])
def test_who_cannot_have_it_gets_the_error(spec: str, kind: type[Exception]) -> None:
    grammars, held = new_grammars()
    broken, sound = wants(1, spec), wants(2, "a")
    assert not grammars.give(broken)
    assert not grammars.give(sound)
    for work in held:
        work()
    (one, error), (other, none) = grammars.settle()
    assert (one, other, none) == (broken, sound, None)
    assert isinstance(error, kind)
    assert broken.grammar is None


def test_who_was_withdrawn_is_not_told_before_or_after_it_is_there() -> None:
    grammars, held = new_grammars()
    first, second, third = (wants(number, "a") for number in range(3))
    for request in (first, second, third):
        assert not grammars.give(request)
    grammars.withdraw(first)
    held[0]()
    grammars.withdraw(second)
    grammars.withdraw(second)
    assert grammars.settle() == [(third, None)]
