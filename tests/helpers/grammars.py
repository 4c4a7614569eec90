"""Whether a text is a word of a grammar, asked of the grammar itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from trioengine.engine_proc.structured_output.guidance import GuidanceCompiler
from trioengine.structured import StructuredOutput
from trioengine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from trioengine.engine_proc.structured_output.grammar import Grammar

__all__ = ["Judge"]

VOCAB_SIZE = 2048


class Judge:
    """Compiles for the simulated vocabulary, and reads texts token by token.

    Attributes:
        compile: The real compiler.
    """

    def __init__(self) -> None:
        tokenizer = Tokenizer.simulated(VOCAB_SIZE)
        self.compile = GuidanceCompiler(
            tokenizer.to_json, vocab_size=VOCAB_SIZE, eos_token_ids=(0,)
        )

    def schema(self, schema: Any, *, lenient: bool = False) -> Grammar:
        """Compile a JSON schema. Raises ``InvalidRequestError``."""
        return self.compile(
            StructuredOutput("json", json.dumps(schema), lenient=lenient, param="response_format")
        )

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Say whether ``text`` could be a whole answer."""
        tokens = self.compile._tokenizer.tokenize_str(text)
        matcher = grammar.begin().matcher
        return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())

    def allows(self, grammar: Grammar, value: Any) -> bool:
        """Say whether an answer could be this value, spelled in the plainest way."""
        return self.accepts(grammar, json.dumps(value, ensure_ascii=False))
