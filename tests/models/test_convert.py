from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from helpers import tiny_gguf, tiny_tokenizers
from helpers.chat_templates import CHATML
from trioengine.errors import ConfigError, EngineStartError
from trioengine.models import checkpoint_files
from trioengine.models.convert import add_fast_tokenizer, convert_gguf

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.model, pytest.mark.slow]


def no_progress(phase: str, fraction: float) -> None:
    pass


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def converted(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_dir = tmp_path_factory.mktemp("converted") / "model"
    seen: list[tuple[str, float]] = []
    convert_gguf(gguf, model_dir, lambda *step: seen.append(step))
    assert seen == [("converting", f) for f in (0.0, 0.25, 0.9, 1.0)]
    return model_dir


def test_it_is_an_ordinary_checkpoint(converted: Path) -> None:
    names = {path.name for path in converted.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    config = json.loads((converted / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["dtype"], config["num_hidden_layers"]) == ("bfloat16", tiny_gguf.LAYERS)


def test_weights_are_those_of_the_file(converted: Path) -> None:
    from safetensors import safe_open

    file: Any
    with safe_open(converted / "model.safetensors", "pt") as file:
        down = file.get_tensor("model.layers.1.mlp.down_proj.weight")
        embedding = file.get_tensor("model.embed_tokens.weight")
    tensors = tiny_gguf._llama_tensors(embedding.shape[0])
    assert down.float().flatten().tolist() == tensors["blk.1.ffn_down.weight"][0]
    assert embedding.float().flatten().tolist() == tensors["token_embd.weight"][0]


def test_the_end_of_a_turn_ends_a_sequence(converted: Path) -> None:
    """The file names the base model's end of text only; the template ends turns with another."""
    assert checkpoint_files.eos_token_ids(converted) == (0, 2)
    assert checkpoint_files.read_chat_templates(converted) == {"default": CHATML}


def test_digits_stand_alone_where_the_vocabulary_was_trained_so(converted: Path) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(converted / "tokenizer.json"))
    splits = tokenizer.pre_tokenizer.pre_tokenize_str("a\n\n12")
    assert [piece for piece, _ in splits] == ["a", "ĊĊ", "1", "2"]


def test_the_gguf_file_stays_beside(gguf: Path, converted: Path) -> None:
    assert (converted / "model.gguf").samefile(gguf)


def test_what_is_no_model_is_one_sentence(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "x.gguf", {"general.architecture": "perceptron"})
    with pytest.raises(EngineStartError, match=r"x\.gguf cannot be loaded: ") as caught:
        convert_gguf(path, tmp_path / "x", no_progress)
    assert "\n" not in caught.value.message
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        convert_gguf(tmp_path / "missing.gguf", tmp_path / "y", no_progress)


def older_checkpoint(path: Path) -> Path:
    """A checkpoint with the two files that GPT-2's tokenizer had before ``tokenizer.json``."""
    model = json.loads(tiny_tokenizers.byte_level().to_str())["model"]
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "".join(" ".join(pair) + "\n" for pair in model["merges"])
    (path / "merges.txt").write_text("#version: 0.2\n" + merges)
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def test_an_older_tokenizer_gets_its_json(tmp_path: Path) -> None:
    source = older_checkpoint(tmp_path / "older")
    model_dir = tmp_path / "newer"
    add_fast_tokenizer(source, model_dir, no_progress)
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    text = "The quick brown fox 😀"
    assert tokenizer.encode(text).ids == tiny_tokenizers.byte_level().encode(text).ids
    assert (model_dir / "model.safetensors").read_bytes() == b"weights"
    assert (model_dir / "config.json").samefile(source / "config.json")
    assert not (source / "tokenizer.json").exists()


def test_an_older_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    source = older_checkpoint(tmp_path / "older")
    (source / "vocab.json").write_text("{")
    with pytest.raises(EngineStartError, match=r"cannot be read .*tokenizer\.json beside it"):
        add_fast_tokenizer(source, tmp_path / "newer", no_progress)
