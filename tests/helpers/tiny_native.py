"""A checkpoint that `trioengine serve` computes natively: tiny, random, with a tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helpers import tiny_tokenizers
from helpers.chat_templates import CHATML
from helpers.numpy_llama import NumpyLlama, TinyShape

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["save_tiny_native"]

VOCAB_SIZE = 512


def save_tiny_native(directory: Path, max_positions: int = 512) -> Path:
    """Write it; return the directory."""
    NumpyLlama(TinyShape(vocab=VOCAB_SIZE, max_positions=max_positions)).write(directory)
    tokenizer = tiny_tokenizers.byte_level()
    return tiny_tokenizers.save(
        tokenizer, directory, chat_template=CHATML, eos_token="<|endoftext|>"
    )
