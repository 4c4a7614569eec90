"""Embeddings on torch against a plain computation, one text at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from trioengine.config import EngineOptions
from trioengine.errors import ConfigError, EngineStartError
from trioengine.models.embedding_files import EmbeddingFiles, Pooling

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.model

SIZE, MAX_LEN, VOCAB = 32, 64, 120
TEXTS = [[5, 9, 7], [1], [8, 8, 3, 2, 4, 110, 6, 1, 9], [2, 4]]
POOLINGS: list[Pooling] = ["mean", "cls", "last", "max"]


def files(pooling: Pooling = "mean", **changes: Any) -> EmbeddingFiles:
    fields: dict[str, Any] = {
        "normalize": True,
        "max_seq_len": None,
        "any_dimensions": False,
        "dimensions": (),
    }
    return EmbeddingFiles(pooling=pooling, **(fields | changes))


@pytest.fixture(scope="module", params=["bert", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny random encoder and a tiny random decoder."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": SIZE,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_LEN,
        "pad_token_id": 0,
    }
    if request.param == "bert":
        config = transformers.BertConfig(**shape)
    else:
        config = transformers.Qwen3Config(**shape, num_key_value_heads=2, head_dim=8)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = transformers.AutoModel.from_config(config).eval()
    directory: Path = tmp_path_factory.mktemp(request.param)
    network.save_pretrained(directory)
    return directory


def load(checkpoint: Path, how: EmbeddingFiles, **options: Any) -> Any:
    from trioengine.engine_proc.torch_runner.embedder import load_embedder

    chosen = EngineOptions(**{"device": "cpu", "threads": 1, **options})
    return load_embedder(checkpoint, how, chosen, lambda phase, fraction: None)


def expected(checkpoint: Path, ids: list[int], pooling: Pooling) -> Any:
    """Compute one text by itself, without padding or mask."""
    import torch
    import transformers

    network = transformers.AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = network(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()
    vector = {
        "mean": states.mean(0),
        "cls": states[0],
        "last": states[-1],
        "max": states.max(0),
    }[pooling]
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_batch_gives_what_each_text_gives_alone(checkpoint: Path, pooling: Pooling) -> None:
    embedder = load(checkpoint, files(pooling))
    got = embedder.embed(TEXTS)
    assert got.dtype == np.float32
    assert got.shape == (len(TEXTS), SIZE)
    for ids, vector in zip(TEXTS, got, strict=True):
        np.testing.assert_allclose(vector, expected(checkpoint, ids, pooling), atol=1e-5)


def test_without_normalisation_lengths_are_kept(checkpoint: Path) -> None:
    plain = load(checkpoint, files(normalize=False)).embed(TEXTS)
    scaled = load(checkpoint, files()).embed(TEXTS)
    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    assert abs(lengths - 1.0).max() > 0.1
    np.testing.assert_allclose(plain / lengths, scaled, atol=1e-6)


def test_what_it_says_of_itself(checkpoint: Path) -> None:
    model = load(checkpoint, files(max_seq_len=20, dimensions=(8,))).model
    assert (model.vocab_size, model.max_model_len) == (VOCAB, 20)
    assert (model.embedding.size, model.embedding.dimensions) == (SIZE, (8,))
    assert model.runner == "torch cpu float32"
    assert load(checkpoint, files(), max_model_len_tokens=9).model.max_model_len == 9


def test_a_length_beyond_the_models_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="exceeds"):
        load(checkpoint, files(max_seq_len=20), max_model_len_tokens=21)


def test_a_directory_without_weights_does_not_load(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with pytest.raises(EngineStartError, match="does not load"):
        load(tmp_path, files())
