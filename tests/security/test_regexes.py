"""Expressions that ruin a backtracking matcher, or a compiler: over soon, refused or followed.

The matcher is built on derivatives and does not backtrack; what can grow is the automaton, which is
bounded by fuel. So each of these is over soon, and so is each mask after it.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from helpers.sim_core import VOCAB_SIZE, simulated_compiler
from trioengine.errors import InvalidRequestError
from trioengine.structured import StructuredOutput

MOST_S = 5.0  # on a machine that does something else besides; a few milliseconds each by itself

NASTY = (
    "(a+)+$",
    "(a|a)*b",
    "(a|aa)+$",
    "(.*a){30}",
    "([a-zA-Z]+)*!",
    "^(([a-z])+.)+[A-Z]([a-z])+$",
    "(x+x+)+y",
    "(a*)*(a*)*(a*)*b",
    "(a?){50}a{50}",
    "((a{1,100}){1,100}){1,100}",
    "a{1,1000000000}",
    "(.{0,1000}x){0,1000}",
    "[\\s\\S]{100000}",
    "(a|b)*a(a|b){60}",
    ".*(" + "|".join(f".{{{n}}}x" for n in range(40)) + ")",
    "(" * 5000 + "a" + ")" * 5000,
    "a" * 100_000,
    "(?:" + "|".join(f"w{n}" for n in range(20_000)) + ")*",
    "(a)\\1+",
    "(?=a*$)(a+)+",
    "(?R)",
    "\\p{L}{1000}",
    "[^\\x00-\\x7f]{2000}",
    "(?i)" + "abcdefghij" * 500,
)


@pytest.mark.parametrize("pattern", NASTY, ids=lambda pattern: repr(pattern)[:40])
def test_it_is_over_soon(pattern: str) -> None:
    compiler = simulated_compiler(VOCAB_SIZE)
    compiler(StructuredOutput("regex", "a", param="structured_outputs"))  # what the first one reads
    begin_s = time.perf_counter()
    try:
        grammar = compiler(StructuredOutput("regex", pattern, param="structured_outputs"))
    except InvalidRequestError:
        pass
    else:
        matcher = grammar.begin().matcher
        words = np.zeros((1, -(-VOCAB_SIZE // 32)), np.uint32)
        for _ in range(200):  # as far as it goes with the letter that hurts most
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if matcher.is_error() or not matcher.try_consume_tokens([ord("a")]):
                break
    assert time.perf_counter() - begin_s < MOST_S
