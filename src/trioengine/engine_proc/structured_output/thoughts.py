"""A grammar for the answer of a model that thinks aloud first.

The thought is any text up to its end, then comes the answer. It is part of the grammar, so whatever
tokens the end is spelled in, no token holds the end and what cannot follow; the sequence does not
end within its thought either.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from trioengine.structured import THOUGHT_BEGIN, THOUGHT_END

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from trioengine.structured import Thought

__all__ = ["after_thought"]

# White space between the two belongs to neither. Many models put it there.
_RULES: Final = rf"""
start: {{start}}
thought: {{thought}}
spelled[suffix="{THOUGHT_END}"]: /(?s:.*)/
TEXT: /(?s:.*)/
SPACE: /[ \n\r\t]*/
"""


def after_thought(answer: str, thought: Thought, tokenizer: LLTokenizer) -> str:
    """Return the grammar of a thought and then ``answer``, as ``LLMatcher`` reads it.

    Args:
        answer: A grammar as ``LLMatcher`` reads it.
        thought: Whether the answer follows one.
        tokenizer: The model's.
    """
    begin, end = (_single_token(tokenizer, word) for word in (THOUGHT_BEGIN, THOUGHT_END))
    if thought == "none" or (thought == "optional" and begin is None):
        return answer  # who has no token for it has not been taught to think
    start = "thought SPACE @answer"
    if thought == "optional":
        start = f"(<[{begin}]> thought SPACE)? @answer"
    rules = _RULES.format(
        start=start,
        # Spelled in other tokens it ends the thought, too, and first: that is how it will be read.
        thought="spelled" if end is None else f"spelled | TEXT <[{end}]>",
    )
    outer = {"name": "thinking", "lark_grammar": rules}
    return json.dumps({"grammars": [outer, _named(answer, "answer")]})


def _single_token(tokenizer: LLTokenizer, word: str) -> int | None:
    tokens = tokenizer.tokenize_bytes(word.encode(), parse_special=True)
    return tokens[0] if len(tokens) == 1 and tokenizer.is_special_token(tokens[0]) else None


def _named(grammar: str, name: str) -> dict[str, object]:
    """Return the one part of a grammar, which the library writes as JSON or as Lark, by a name."""
    if not grammar.startswith('{"grammars"'):
        return {"name": name, "lark_grammar": grammar}
    [part] = json.loads(grammar)["grammars"]
    return {**part, "name": name}
