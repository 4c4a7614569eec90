"""Which requests want a grammar, and those among them that have to wait until it is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioengine.errors import InvalidRequestError, TrioEngineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.engine_proc.request import Request
    from trioengine.engine_proc.structured_output.compilations import Compilations
    from trioengine.engine_proc.structured_output.grammar import Grammar

__all__ = ["AwaitedGrammars"]


class AwaitedGrammars:
    """The requests of one engine that wait for a grammar; none in an engine that takes none."""

    def __init__(self, compilations: Compilations | None) -> None:
        self._compilations = compilations
        self._waiting: dict[int, Request] = {}

    def give(self, request: Request) -> bool:
        """Give a request the grammar that it wants, if any, and return True; False: it has to wait.

        Raises:
            InvalidRequestError: This engine takes no grammars.
            Exception: Whatever a grammar that is known raises when it begins.
        """
        structured = request.params.structured
        if structured is None:
            return True
        if self._compilations is None:
            raise InvalidRequestError("this engine takes no grammars", param=structured.param)
        grammar = self._compilations.request(request.request_id, structured)
        if grammar is None:
            self._waiting[request.request_id] = request
            return False
        request.grammar = grammar.begin()
        return True

    def settle(self) -> list[tuple[Request, Exception | None]]:
        """Return those that wait no more: they have their grammar, or there is an error."""
        if self._compilations is None or not self._compilations.has_settled:
            return []
        settled = []
        for request_id, outcome in self._compilations.settled():
            request = self._waiting.pop(request_id)
            settled.append((request, _begin(request, outcome)))
        return settled

    def withdraw(self, request: Request) -> None:
        """Let a request wait no longer. No-op where it does not."""
        if self._waiting.pop(request.request_id, None) is not None and self._compilations:
            self._compilations.withdraw(request.request_id)

    def has_settled(self) -> bool:
        """True where ``settle`` has something to return."""
        return self._compilations is not None and self._compilations.has_settled

    def when_settled(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, from any thread, when there is something."""
        if self._compilations is not None:
            self._compilations.on_settled = wake

    def close(self) -> None:
        """Let compilers go."""
        if self._compilations is not None:
            self._compilations.close()


def _begin(request: Request, outcome: Grammar | TrioEngineError) -> Exception | None:
    if isinstance(outcome, TrioEngineError):
        return outcome
    try:
        request.grammar = outcome.begin()
    except Exception as error:  # contained: nothing but this request's own was touched
        return error
    return None
