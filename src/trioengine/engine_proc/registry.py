"""From a configuration to a loaded backend. Each runner is imported only when it is wanted."""

from __future__ import annotations

import functools
import importlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from trioengine.engine_proc.core import EngineCore
from trioengine.engine_proc.detokenizer import Detokenizer, DetokenizerVocab, simulated_vocab
from trioengine.engine_proc.embedding_core import EmbeddingCore
from trioengine.engine_proc.kv_sizing import KVCacheSizeError
from trioengine.engine_proc.sim_runner import SimModelRunner, SimScript
from trioengine.engine_proc.structured_output.compilations import Compilations
from trioengine.engine_proc.structured_output.guidance import GuidanceCompiler
from trioengine.engine_proc.structured_output.trials import Trials
from trioengine.errors import ConfigError
from trioengine.models.checkpoint_files import eos_token_ids
from trioengine.models.embedding_files import read_embedding_files
from trioengine.text.vocabulary import SIMULATED_EOS_ID

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.config import EngineConfig, EngineOptions
    from trioengine.engine_proc.backend import EngineBackend
    from trioengine.engine_proc.faults import EngineFaults
    from trioengine.engine_proc.profiling import StepTimeline
    from trioengine.engine_proc.request import TextBuilder
    from trioengine.engine_proc.runner import ModelRunner
    from trioengine.engine_proc.structured_output.grammar import Compile
    from trioengine.models.embedding_files import EmbeddingFiles
    from trioengine.protocol import ModelInfo
    from trioengine.sampling_params import SamplingParams

    Progress = Callable[[str, float], None]

__all__ = ["build_backend"]

MAX_NUM_SEQS_CPU: Final = 64
MAX_NUM_SEQS_CUDA: Final = 256
_NVIDIA_DRIVER: Final = Path("/dev/nvidiactl")
_TORCHS_TOO: Final = frozenset({"auto", "none"})  # of --quantization: these torch can do without

log = logging.getLogger(__name__)


def build_backend(
    config: EngineConfig,
    progress: Progress,
    timeline: StepTimeline | None = None,
    faults: EngineFaults | None = None,
    *,
    ahead_s: float | None = None,
) -> EngineBackend:
    """Load what the configuration names.

    Args:
        config: One incarnation's configuration.
        progress: Told of (phase, fraction in [0, 1]) while loading.
        timeline: Shared between the backend and its loop.
        faults: What is to go wrong on purpose.
        ahead_s: In how many seconds to have ready what the first grammar would wait for; ``None``
            for when it comes.

    Raises:
        ConfigError: The options do not fit each other, the model or this machine.
        Exception: Whatever loading raises.
    """
    options = config.options
    if options.backend == "sim":
        runner, vocab = _load_simulated(config, progress)
    else:
        model_dir = _require_model_dir(config)
        if (files := read_embedding_files(model_dir)) is not None:
            return _load_embedder(model_dir, files, config, progress)
        vocab = DetokenizerVocab.from_dir(model_dir)
        runner = _load_model(model_dir, options, progress)
    runner.model = msgspec.structs.replace(runner.model, name=config.model_name)
    max_num_seqs = _max_num_seqs(options, runner.model)
    make_text: Callable[[SamplingParams], TextBuilder] = functools.partial(_make_text, vocab)
    compile_: Compile = _grammar_compiler(config, runner.model, ahead_s)
    if faults is not None:
        runner, make_text = faults.runner(runner), faults.make_text(make_text)
        compile_ = faults.compile(compile_)
    core = EngineCore(
        runner,
        make_text,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        num_scheduler_steps=options.num_scheduler_steps,
        enable_prefix_caching=options.enable_prefix_caching,
        seed=options.seed,
        grammars=Compilations(compile_),
        profile_dir=None if options.profile_dir is None else Path(options.profile_dir),
        timeline=timeline,
    )
    return core if faults is None else faults.backend(core)


def _grammar_compiler(config: EngineConfig, model: ModelInfo, ahead_s: float | None) -> Trials:
    def tokenizer_json() -> str:
        if config.model_dir is not None:
            return (Path(config.model_dir) / "tokenizer.json").read_text(encoding="utf-8")
        from trioengine.text.tokenizer import Tokenizer

        return Tokenizer.simulated(model.vocab_size).to_json()

    compiler = GuidanceCompiler(
        tokenizer_json, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
    )
    trials = Trials(compiler)
    if ahead_s is not None:
        trials.start_ahead(ahead_s)
    return trials


def _make_text(vocab: DetokenizerVocab, params: SamplingParams) -> Detokenizer:
    return Detokenizer(
        vocab,
        stop=params.stop,
        min_tokens=params.min_tokens,
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        continues_prompt=True,
    )


def _max_num_seqs(options: EngineOptions, model: ModelInfo) -> int:
    if options.max_num_seqs is not None:
        return options.max_num_seqs
    default = MAX_NUM_SEQS_CUDA if "cuda" in model.runner else MAX_NUM_SEQS_CPU
    return min(default, options.max_num_batched_tokens)


def _load_embedder(
    model_dir: Path, files: EmbeddingFiles, config: EngineConfig, progress: Progress
) -> EngineBackend:
    options = config.options
    if options.backend == "native":
        raise ConfigError("--engine native makes no embeddings; torch does")
    from trioengine.engine_proc.torch_runner.embedder import load_embedder

    runner = load_embedder(model_dir, files, options, progress)
    runner.model = msgspec.structs.replace(runner.model, name=config.model_name)
    return EmbeddingCore(
        runner,
        max_num_seqs=_max_num_seqs(options, runner.model),
        max_num_batched_tokens=options.max_num_batched_tokens,
    )


def _load_simulated(
    config: EngineConfig, progress: Progress
) -> tuple[ModelRunner, DetokenizerVocab]:
    """Load the pretended model, with the words of a real one where a checkpoint is given."""
    options = config.options
    if config.model_dir is None:
        vocab = simulated_vocab(SimScript.from_args(options.engine_args).vocab_size)
        eos_ids: tuple[int, ...] = (SIMULATED_EOS_ID,)
    else:
        model_dir = Path(config.model_dir)
        vocab, eos_ids = DetokenizerVocab.from_dir(model_dir), eos_token_ids(model_dir)
    # No parts of characters and no control characters: a simulated answer reads as text.
    speakable = [
        token_id for token_id, text in vocab.texts.items() if text.strip() and text.isprintable()
    ]
    runner = SimModelRunner.load(
        options,
        vocab_size=vocab.size,
        eos_token_ids=eos_ids,
        speakable=speakable,
        progress=progress,
    )
    return runner, vocab


def _require_model_dir(config: EngineConfig) -> Path:
    if config.model_dir is None:
        raise ConfigError(f"the {config.options.backend} engine needs a checkpoint")
    return Path(config.model_dir)


def _load_model(model_dir: Path, options: EngineOptions, progress: Progress) -> ModelRunner:
    if options.backend == "native":
        return _load_native(model_dir, options, progress)
    if options.backend == "auto" and not _wants_cuda(options):
        try:
            return _load_native(model_dir, options, progress)
        except KVCacheSizeError:  # torch has no more memory, and would say so seconds later
            raise
        except ConfigError as error:
            if options.quantization not in _TORCHS_TOO:  # torch would take several times the memory
                raise ConfigError(
                    f"--quantization {options.quantization} is the native runner's, "
                    f"which does not fit: {error}"
                ) from error
            log.warning("the native runner does not fit, torch computes instead: %s", error)
    return _load_torch(model_dir, options, progress)


def _wants_cuda(options: EngineOptions) -> bool:
    if options.quantization not in _TORCHS_TOO:
        return False
    # Looking at the device file spares the seconds that importing torch to ask it would take.
    return options.device == "cuda" or (options.device == "auto" and _NVIDIA_DRIVER.exists())


def _load_native(model_dir: Path, options: EngineOptions, progress: Progress) -> ModelRunner:
    native_runner = importlib.import_module("trioengine.engine_proc.native_runner")
    runner: ModelRunner = native_runner.load(model_dir, options, progress)
    return runner


def _load_torch(model_dir: Path, options: EngineOptions, progress: Progress) -> ModelRunner:
    from trioengine.engine_proc import torch_runner

    return torch_runner.load(model_dir, options, progress)
