"""A Llama of next to no size with a real vocabulary: whatever is left to measure is not arithmetic.

    python benchmarks/tiny_model.py DIRECTORY     # then: trioengine bench serve --workloads FE

Its weights are random, its tokenizer is the default model's. 2 layers of 64, vocabulary 49,152.
"""

from __future__ import annotations

import argparse
import shutil
import struct
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

LAYERS: Final = 2
HIDDEN: Final = 64
INTERMEDIATE: Final = 192
HEADS: Final = 2
HEAD_DIM: Final = 32
VOCAB: Final = 49_152
COPIED: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def write_tiny_model(directory: Path, tokenizer_dir: Path) -> None:
    """Write the checkpoint into ``directory``, with the tokenizer that is in ``tokenizer_dir``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_bytes(msgspec.json.encode(CONFIG))
    (directory / "generation_config.json").write_bytes(msgspec.json.encode({"eos_token_id": 2}))
    for name in COPIED:
        if (tokenizer_dir / name).exists():
            shutil.copyfile(tokenizer_dir / name, directory / name)
    _write_safetensors(directory / "model.safetensors", _weights())


def _weights() -> dict[str, npt.NDArray[np.float32]]:
    generator = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return 0.02 * generator.standard_normal((rows, columns), np.float32)

    ones = np.ones(HIDDEN, np.float32)
    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": ones}
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = ones
    return weights


def _write_safetensors(path: Path, weights: dict[str, npt.NDArray[np.float32]]) -> None:
    """Write bfloat16: the upper halves of float32, cut off."""
    header, data, offset = {}, [], 0
    for name, values in weights.items():
        upper = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
        end = offset + len(upper)
        header[name] = {"dtype": "BF16", "shape": values.shape, "data_offsets": [offset, end]}
        data.append(upper)
        offset = end
    encoded = msgspec.json.encode(header)
    path.write_bytes(b"".join([struct.pack("<Q", len(encoded)), encoded, *data]))


def main() -> None:
    """See the module."""
    from trioengine.models.command import model_path

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    write_tiny_model(directory, model_path())


if __name__ == "__main__":
    main()
