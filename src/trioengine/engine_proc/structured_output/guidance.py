"""Specifications to grammars, by llguidance, within bounds. The one place that compiles."""

from __future__ import annotations

import ctypes
import functools
import json
from typing import TYPE_CHECKING, Any, Final

import msgspec

from trioengine.engine_proc.structured_output.grammar import Grammar, grammar_error
from trioengine.engine_proc.structured_output.json_schema import WHITESPACE, prepared_schema
from trioengine.engine_proc.structured_output.regex_bounds import check_regex
from trioengine.engine_proc.structured_output.thoughts import after_thought
from trioengine.errors import InvalidRequestError
from trioengine.structured import MAX_CHOICES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llguidance import LLTokenizer

    from trioengine.structured import StructuredOutput

__all__ = ["GuidanceCompiler"]

# Per mask: 50,000 units of lexer fuel are 4 ms, 20,000 items 1 ms. A state takes up to 2 kB.
_BOUNDS: Final[dict[str, Any]] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}

# Tokens made of these are looked at all at once where a grammar lets them all come; otherwise one
# by one, 0.2 ms a mask. The library's own slices are for strings of JSON; these are for text that a
# regular expression counts ([a-z ]{2000}), where no state is like the one before. 16 characters
# are as long as nearly all such tokens. No mask depends on them.
_SLICES: Final = ("[a-z]{1,16}", "[a-z ]{1,16}", "[A-Za-z]{1,16}", "[A-Za-z ]{1,16}")


class _Description(msgspec.Struct, array_like=True):
    tokenizer_json: str
    vocab_size: int
    eos_token_ids: list[int]


class GuidanceCompiler:
    """Compiles for one vocabulary. Fulfils ``Compile``; safe in several threads at once."""

    def __init__(
        self, tokenizer_json: Callable[[], str], *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """Remember what to compile for; nothing is imported, read or built yet.

        Args:
            tokenizer_json: Returns the content of the model's ``tokenizer.json``.
            vocab_size: Rows of the model's logits.
            eos_token_ids: Ids that end a sequence.
        """
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)

    def description(self) -> bytes:
        """Return one line from which another process makes the same compiler."""
        return msgspec.json.encode(
            _Description(self._tokenizer_json(), self._vocab_size, self._eos_token_ids)
        )

    @classmethod
    def described(cls, line: bytes) -> GuidanceCompiler:
        """Return the compiler that ``description`` is of."""
        said = msgspec.json.decode(line, type=_Description)
        return cls(
            lambda: said.tokenizer_json,
            vocab_size=said.vocab_size,
            eos_token_ids=said.eos_token_ids,
        )

    def warm_up(self) -> None:
        """Read the vocabulary, which would otherwise be part of the first compilation: 0.2 s."""
        if "_tokenizer" not in self.__dict__:
            self._tokenizer  # noqa: B018 - cached
            _give_back_memory()

    def __call__(self, structured: StructuredOutput, /) -> Grammar:
        """Return the grammar. See ``Compile``."""
        from llguidance import LLMatcher, LLParserLimits

        param = structured.param
        try:
            text = after_thought(_grammar_text(structured), structured.thought, self._tokenizer)
        except (RecursionError, ValueError) as error:  # the library reads 128 levels of JSON
            raise grammar_error(f"it cannot be read: {error}", param) from error
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LLParserLimits(**_BOUNDS))
        if not matcher.is_error() and not matcher.is_stopped():
            matcher.compute_bitmask()  # the first is the dearest: here nobody waits for it
        if matcher.is_error():
            raise grammar_error(matcher.get_error(), param)
        if matcher.is_stopped():
            raise InvalidRequestError(
                f"{param} cannot be used: only the empty text satisfies it", param=param
            )
        return Grammar(matcher, param)

    def close(self) -> None:
        """There is nothing to let go of."""

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        return LLTokenizer(
            self._tokenizer_json(),
            n_vocab=self._vocab_size,
            eos_token=self._eos_token_ids,
            slices=[*_SLICES, *LLTokenizer.general_slices()],
        )


def _give_back_memory() -> None:
    """Return to the system what reading a vocabulary left: a third of 70 MiB. glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _grammar_text(structured: StructuredOutput) -> str:
    """Return what ``LLMatcher`` reads.

    Raises:
        InvalidRequestError: The specification is none of its kind.
    """
    from llguidance import LLMatcher

    spec, param = structured.spec, structured.param
    if structured.kind == "regex":
        check_regex(spec, param)
        return str(LLMatcher.grammar_from_regex(spec))
    if structured.kind == "choice":
        return str(LLMatcher.grammar_from_lark(_choices(spec, param)))
    if structured.kind == "grammar":
        return str(LLMatcher.grammar_from_lark(_lark(spec, param)))
    schema = '{"type":"object"}' if structured.kind == "json_object" else spec
    lenient = structured.lenient
    return str(
        LLMatcher.grammar_from_json_schema(
            prepared_schema(schema, param),
            overrides={
                "whitespace_flexible": True,
                "whitespace_pattern": WHITESPACE,
                "lenient": lenient,
                "coerce_one_of": lenient,
            },
        )
    )


def _choices(spec: str, param: str) -> str:
    try:
        choices = msgspec.json.decode(spec, type=list[str])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequestError(f"{param} must be a list of strings", param=param) from error
    if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
        raise InvalidRequestError(
            f"{param} takes 1 to {MAX_CHOICES} strings that are not empty", param=param
        )
    return "start: " + " | ".join(json.dumps(choice) for choice in dict.fromkeys(choices))


def _lark(spec: str, param: str) -> str:
    """Return a grammar as Lark has it, also from GBNF (the EBNF of vLLM and llama.cpp)."""
    if "::=" not in spec:
        return spec
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(spec)
    except Exception as error:  # the converter raises whatever comes to hand
        raise grammar_error(f"the grammar is no GBNF: {error}", param) from error
