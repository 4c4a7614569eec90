"""How near a runner comes to transformers in float32 on the default model: words and figures.

Three figures, each over windows of one shipped text. *Prefix*: how many greedy tokens are
transformers' own until the first that is another, on average; after it the two answers are about
different things. *Agreement*: how often the likeliest next token is the same, given the tokens that
float32 chose. *Perplexity*, of the text itself.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pytest

from helpers.numpy_gguf import write_llama_gguf
from helpers.numpy_llama import NumpyLlama, TinyShape, make_batch, write_safetensors
from helpers.reference import MiniScheduler
from trioengine.models.checkpoint_files import read_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from trioengine.engine_proc.native_runner.model_runner import NativeModelRunner

    Float32Array = npt.NDArray[np.float32]
    Tokens = list[list[int]]

__all__ = [
    "TEXT",
    "Accuracy",
    "NativeSubject",
    "Subject",
    "TorchSubject",
    "Yardstick",
    "default_model_dir",
    "move_off_the_grid",
    "read_model",
    "shipped_tokens",
    "write_checkpoint",
    "write_with_blocks",
]

TEXT = Path(__file__).parents[1] / "data" / "harbour.txt"
PROMPT_TOKENS = 32
WINDOW = 256  # tokens of the text that are read together


class Subject(Protocol):
    """What is compared: something that generates and scores."""

    def greedy(self, prompts: Tokens, num_tokens: int) -> Tokens:
        """Return so many greedy tokens of each prompt; prompts are of one length."""

    def logits(self, tokens: Sequence[int]) -> Float32Array:
        """Return ``[len(tokens), vocab]``."""


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Figures of one subject; see above."""

    prefix: float
    agreement: float
    perplexity: float

    def row(self, name: str, exact: Accuracy) -> str:
        """Return a line of the table in ``docs/accuracy.md``."""
        loss = 100 * (self.perplexity / exact.perplexity - 1)
        return (
            f"| {name} | {self.prefix:.1f} | {100 * self.agreement:.2f} % "
            f"| {self.perplexity:.3f} ({loss:+.2f} %) |"
        )


class Yardstick:
    """What float32 says, and how far others are from it."""

    def __init__(self, text: list[int], num_prompts: int, num_tokens: int) -> None:
        step = (len(text) - PROMPT_TOKENS) // num_prompts
        self._text, self._num_tokens = text, num_tokens
        self._prompts = [text[i * step :][:PROMPT_TOKENS] for i in range(num_prompts)]
        self._answers: Tokens = []
        self.exact = Accuracy(num_tokens, 1.0, 0.0)

    def ask(self, exact: Subject) -> dict[str, Any]:
        """Let float32 answer; return what ``know`` takes instead another time."""
        answers = exact.greedy(self._prompts, self._num_tokens)
        return {"answers": answers, "perplexity": self._perplexity(exact)}

    def know(self, known: dict[str, Any]) -> None:
        """Take what float32 answered before."""
        self._answers = known["answers"]
        self.exact = dataclasses.replace(self.exact, perplexity=known["perplexity"])

    def measure(self, subject: Subject) -> Accuracy:
        """Let a subject answer all prompts and read the text."""
        answers = subject.greedy(self._prompts, self._num_tokens)
        prefixes = [_common_prefix(a, b) for a, b in zip(answers, self._answers, strict=True)]
        same = [
            np.mean(self._choices(subject, prompt, answer) == answer)
            for prompt, answer in zip(self._prompts, self._answers, strict=True)
        ]
        return Accuracy(float(np.mean(prefixes)), float(np.mean(same)), self._perplexity(subject))

    def _choices(self, subject: Subject, prompt: list[int], answer: list[int]) -> Any:
        logits = subject.logits([*prompt, *answer[:-1]])
        return logits[-len(answer) :].argmax(-1)

    def _perplexity(self, subject: Subject) -> float:
        losses = []
        for start in range(0, len(self._text) - 1, WINDOW):
            window = self._text[start : start + WINDOW + 1]
            logits = subject.logits(window[:-1])
            logits = logits - logits.max(-1, keepdims=True)
            chosen = logits[np.arange(len(logits)), window[1:]]
            sums = np.exp(logits).sum(-1, dtype=np.float64)
            losses += (np.log(sums) - chosen).tolist()
        return float(np.exp(np.mean(losses)))


def _common_prefix(ours: list[int], theirs: list[int]) -> int:
    pairs = zip(ours, theirs, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(ours))


class NativeSubject:
    """The native runner."""

    def __init__(self, runner: NativeModelRunner) -> None:
        self._runner = runner

    def greedy(self, prompts: Tokens, num_tokens: int) -> Tokens:
        scheduler = MiniScheduler(self._runner)
        sequences = [scheduler.add(prompt) for prompt in prompts]
        scheduler.run(sequences, num_tokens)
        return [sequence.output for sequence in sequences]

    def logits(self, tokens: Sequence[int]) -> Float32Array:
        blocks = list(range(-(-len(tokens) // self._runner.block_size)))
        return self._runner.logits(make_batch([(tokens, 0, blocks)], all_rows=True))[1]


class TorchSubject:
    """transformers' own modelling code, all prompts in one batch."""

    def __init__(self, model_dir: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=getattr(torch, dtype)
        ).eval()
        self._model.generation_config.eos_token_id = None  # every answer is to be as long

    def greedy(self, prompts: Tokens, num_tokens: int) -> Tokens:
        import torch

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
            )
        answers: Tokens = out[:, ids.shape[1] :].tolist()
        return answers

    def logits(self, tokens: Sequence[int]) -> Float32Array:
        import torch

        with torch.inference_mode():
            out = self._model(torch.tensor([list(tokens)]), use_cache=False)
        result: Float32Array = out.logits[0].float().numpy()
        return result


# Checkpoints ------------------------------------------------------------------------------------


def default_model_dir() -> Path:
    """Return the default model's checkpoint; skip where it is not in the cache."""
    from trioengine.models.resolve import prepared_dir, resolve_model

    directory = prepared_dir(resolve_model("smollm2-135m-instruct"))
    if directory is None:
        pytest.skip(
            "not in the cache; `trioengine models fetch smollm2-135m-instruct` puts it there"
        )
    return directory


def shipped_tokens(model_dir: Path) -> list[int]:
    """Return the text as the model's tokens."""
    from trioengine.text.tokenizer import Tokenizer

    return Tokenizer.from_dir(model_dir).encode(TEXT.read_text(encoding="utf-8"))


def read_model(model_dir: Path) -> NumpyLlama:
    """Read a Llama checkpoint."""
    from safetensors.torch import load_file

    config = read_json(model_dir / "config.json")
    model = NumpyLlama(TinyShape(layers=0))
    model.shape = TinyShape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        tied=config["tie_word_embeddings"],
    )
    tensors = load_file(model_dir / "model.safetensors")
    model.tensors = {name: tensor.float().numpy() for name, tensor in tensors.items()}
    return model


def move_off_the_grid(model: NumpyLlama, seed: int = 0) -> None:
    """Rescale channels so that the function stays and the weights do not.

    The default model is made from a file of 4-bit blocks, and rounding its weights to 4 bits again
    would cost next to nothing. Norms, and the matrices that read what they scale, share a factor a
    channel; so do rows of the up projection and columns of the down projection.
    """
    rng = np.random.default_rng(seed)
    t, s = model.tensors, model.shape

    def factors(count: int) -> Float32Array:
        return rng.uniform(0.7, 1.4, count).astype(np.float32)

    for i in range(s.layers):
        prefix = f"model.layers.{i}."
        for norm, readers in (
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            scale = factors(s.hidden)
            t[f"{prefix}{norm}.weight"] = t[f"{prefix}{norm}.weight"] * scale
            for reader in readers:
                t[f"{prefix}{reader}.weight"] = t[f"{prefix}{reader}.weight"] / scale
        scale = factors(s.intermediate)
        up, down = f"{prefix}mlp.up_proj.weight", f"{prefix}mlp.down_proj.weight"
        t[up], t[down] = t[up] * scale[:, None], t[down] / scale
        scale = factors(s.kv_heads * s.head_dim)
        value, output = f"{prefix}self_attn.v_proj.weight", f"{prefix}self_attn.o_proj.weight"
        group = s.heads // s.kv_heads
        wide = np.repeat(scale.reshape(s.kv_heads, s.head_dim), group, axis=0).reshape(-1)
        t[value], t[output] = t[value] * scale[:, None], t[output] / wide


def write_checkpoint(model: NumpyLlama, like: Path, directory: Path) -> Path:
    """Write weights as bfloat16 beside links to the other files of ``like``."""
    directory.mkdir()
    for path in like.iterdir():
        if path.suffix not in {".safetensors", ".gguf"}:
            (directory / path.name).symlink_to(path)
    write_safetensors(directory / "model.safetensors", model.tensors)
    return directory


def write_with_blocks(model_dir: Path, directory: Path, kind: str) -> Path:
    """Link a checkpoint into ``directory``, with a GGUF file of it whose layers are ``kind``."""
    directory.mkdir()
    for path in model_dir.iterdir():
        if path.suffix != ".gguf":
            (directory / path.name).symlink_to(path)
    write_llama_gguf(directory / "model.gguf", read_model(model_dir), {"embed": "q8_0"}, kind)
    return directory
