"""Make a checkpoint directory out of what is none: a GGUF file, or an older tokenizer's files.

The one place outside the engine's runners that imports torch and transformers, which it does when
called: it runs in a child process of its own, once per model.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from trioengine.errors import EngineStartError
from trioengine.models.checkpoint_files import read_chat_templates
from trioengine.models.gguf_header import read_gguf_scalars
from trioengine.models.table import GGUF_NAME

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tokenizers.pre_tokenizers import PreTokenizer

    Progress = Callable[[str, float], None]

__all__ = ["add_fast_tokenizer", "convert_gguf"]

# Whatever ends a turn ends a sequence. GGUF files name one such token; these are known by name.
_END_OF_TURN: Final = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|endofturn|>")

# Vocabularies that were trained on single digits. transformers reads them like GPT-2's, which cuts
# "\n\n1" differently; llama.cpp has them in one group (llama-vocab.cpp, `LLAMA_VOCAB_PRE_TYPE_…`).
_SINGLE_DIGITS: Final = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})


def convert_gguf(gguf: Path, model_dir: Path, progress: Progress) -> None:
    """Write ``gguf`` as a bfloat16 checkpoint, and keep it beside as ``model.gguf``.

    Args:
        gguf: The file; linked, not copied, where the file system can.
        model_dir: Does not exist yet.
        progress: Told of the phase ``converting``.

    Raises:
        ConfigError: It is no GGUF file.
        EngineStartError: transformers cannot load it.
    """
    scalars = read_gguf_scalars(gguf)
    progress("converting", 0.0)
    try:
        _save_tokenizer(gguf, model_dir, scalars)
        progress("converting", 0.25)
        _save_weights(gguf, model_dir, scalars, progress)
    except Exception as error:  # transformers raises anything over a file that it cannot read
        _pass_on_disk_errors(error)
        raise EngineStartError(f"{gguf} cannot be loaded: {_first_line(error)}") from error
    _keep(gguf, model_dir / GGUF_NAME)
    progress("converting", 1.0)


def _save_tokenizer(gguf: Path, model_dir: Path, scalars: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if scalars.get("tokenizer.ggml.pre") in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = _single_digits()
    tokenizer.save_pretrained(model_dir)


def _single_digits() -> PreTokenizer:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def _save_weights(gguf: Path, model_dir: Path, scalars: dict[str, Any], progress: Progress) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **_dequantized(gguf)
    )
    progress("converting", 0.9)
    # It is an ordinary model now, and transformers would refuse to save any other.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config = GenerationConfig(
        bos_token_id=scalars.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=_end_ids(model_dir, scalars),
        pad_token_id=scalars.get("tokenizer.ggml.padding_token_id"),
    )
    model.save_pretrained(model_dir)


def _dequantized(gguf: Path) -> dict[str, Any]:
    """Ask for ordinary weights; transformers that cannot keep packed ones has nothing to ask."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(gguf_file=gguf.name, dequantize=True)}


def _end_ids(model_dir: Path, scalars: dict[str, Any]) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    templates = "".join(read_chat_templates(model_dir).values())
    ids = [scalars.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    ids += [tokenizer.token_to_id(token) for token in _END_OF_TURN if token in templates]
    return list(dict.fromkeys(int(token_id) for token_id in ids if token_id is not None))


def _keep(gguf: Path, link: Path) -> None:
    try:
        os.link(gguf, link)
    except OSError:  # another file system
        link.symlink_to(gguf.absolute())


def add_fast_tokenizer(source: Path, model_dir: Path, progress: Progress) -> None:
    """Make ``model_dir`` the checkpoint ``source`` with a ``tokenizer.json``.

    Everything else in it is a link to ``source``.

    Raises:
        EngineStartError: transformers cannot read the tokenizer that is there.
    """
    progress("converting", 0.0)
    model_dir.mkdir()
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        tokenizer.save_pretrained(model_dir)
    except Exception as error:
        _pass_on_disk_errors(error)
        raise EngineStartError(
            f"the tokenizer in {source} cannot be read ({_first_line(error)}); a tokenizer.json "
            "beside it would be used as it is"
        ) from error
    if not (model_dir / "tokenizer.json").is_file():
        raise EngineStartError(
            f"the tokenizer in {source} has no form that tokenizer.json can hold"
        )
    for path in source.iterdir():
        if not (model_dir / path.name).exists():
            (model_dir / path.name).symlink_to(path.absolute())
    progress("converting", 1.0)


def _pass_on_disk_errors(error: Exception) -> None:
    """Raise an error of the system's again (transformers raises ``OSError`` without a number)."""
    if isinstance(error, OSError) and error.errno is not None:
        raise error


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
