"""Small tokenizers of the kinds that real checkpoints have, made in milliseconds."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordLevel
from tokenizers.trainers import BpeTrainer

if TYPE_CHECKING:
    from pathlib import Path

TEXT = (
    "The quick brown fox, 1999 times. naïve café — “quotes” … ďábel\n\n"
    "日本語のテキスト、中文字符。한국어 텍스트。 мир и дружба 😀🎉👩‍👩‍👧 नमस्ते שלום\n"
    "def main():\n    return {'a': 1}\n"
)


def byte_level() -> Tokenizer:
    """GPT-2's kind: tokens end inside characters; specials, and an added token with a space."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("é two words")])
    return tokenizer


def byte_fallback(*, strip: bool = True) -> Tokenizer:
    """Llama 2's kind (``strip=False``: Gemma's)."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in (
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *("▁", "▁▁", "▁The", "▁fox", "x", "é", "日", "▁日本", "stop", "st", "op", "\n", "▁<s>"),
        *"Thequickbrown",
    ):
        vocab.setdefault(token, len(vocab))
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps: list[Any] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    """The kind of sentencepiece unigram models: the first token loses its marks."""
    pieces = ["<unk>", "</s>", "▁", "▁▁", "▁The", "▁f▁x", "x", "é", "日", "stop"]
    tokenizer = Tokenizer(Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def word_level() -> Tokenizer:
    """No decoder at all: words joined with spaces."""
    words = ["<unk>", "a", "bc", "stop", "日"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


@functools.cache
def of_every_kind() -> dict[str, Tokenizer]:
    return {
        "byte_level": byte_level(),
        "byte_fallback": byte_fallback(),
        "byte_fallback_without_strip": byte_fallback(strip=False),
        "metaspace": metaspace(),
        "word_level": word_level(),
    }


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    """The ids of tokens that the vocabulary has."""
    found = [tokenizer.token_to_id(token) for token in tokens]
    assert None not in found, tokens
    return [token_id for token_id in found if token_id is not None]


def save(tokenizer: Tokenizer, model_dir: Path, **tokenizer_config: object) -> Path:
    """Write what ``Tokenizer.from_dir`` reads; return the directory."""
    model_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(model_dir / "tokenizer.json"))
    (model_dir / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return model_dir
