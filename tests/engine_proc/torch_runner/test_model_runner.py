"""The runner against transformers itself: the same logits and the same greedy tokens."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from helpers.reference import (
    GREEDY,
    MiniScheduler,
    Sampling,
    Seq,
    load_reference,
    reference_generate,
    reference_logits,
    sampling_rows,
    tap_logits,
)
from helpers.tiny_models import TINY, VOCAB
from trioengine.engine_proc.runner import StepBatch
from trioengine.errors import InvalidRequestError

if TYPE_CHECKING:
    from pathlib import Path

    from helpers.torch_fixtures import Checkpoints, OpenRunner
    from trioengine.engine_proc.torch_runner.model_runner import TorchModelRunner

pytestmark = pytest.mark.model

TOLERANCE = 1e-4  # of logits whose standard deviation is about 1
LENGTHS = (1, 2, 15, 16, 17, 45, 70)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed} {length}").choices(range(VOCAB), k=length)


def assert_equals_reference(reference: Any, sequences: list[Seq]) -> None:
    """Every logit of every sampled row, and every token, is transformers' own."""
    for seq in sequences:
        count = len(seq.output)
        expected = reference_logits(reference, seq.tokens[:-1], count)
        np.testing.assert_allclose(np.array(seq.logits), expected, rtol=0, atol=TOLERANCE)
        assert_same_tokens(seq.output, reference, seq.tokens[: seq.prompt_len], expected)


def assert_same_tokens(
    output: list[int], reference: Any, tokens: list[int], logits: np.ndarray[Any, Any]
) -> None:
    """Compare with ``generate``, up to a tie that rounding may turn either way, if there is one."""
    generated = reference_generate(reference, tokens, len(output))
    for i, (ours, theirs) in enumerate(zip(output, generated, strict=True)):
        if ours != theirs:
            assert abs(logits[i, ours] - logits[i, theirs]) < TOLERANCE
            return


@pytest.mark.parametrize("name", TINY)
def test_every_architecture_equals_transformers(
    checkpoints: Checkpoints, open_runner: OpenRunner, name: str
) -> None:
    """Mixed lengths, odd chunks, a shared prefix and a preemption, all in one batch."""
    reference = load_reference(checkpoints(name))
    runner = open_runner(name)
    with tap_logits(runner) as tap:
        scheduler = MiniScheduler(runner, seed=1, tap=tap)
        sequences = [scheduler.add(prompt(length)) for length in LENGTHS]
        scheduler.run(sequences, 2, chunk=13)
        longest = sequences[-1]
        sharing = scheduler.add(
            longest.tokens[:64] + prompt(9, seed=5), share=longest, shared_blocks=4
        )
        scheduler.preempt(sequences[-2])
        sequences.append(sharing)
        scheduler.run(sequences, 5, chunk=7)
    assert_equals_reference(reference, sequences)


@pytest.mark.parametrize("chunk", [1, 3, 16, 64, None])
@pytest.mark.parametrize("name", ["llama-gqa3-hd80", "mistral-sliding"])
def test_chunks_of_any_size_give_the_same(
    checkpoints: Checkpoints, open_runner: OpenRunner, name: str, chunk: int | None
) -> None:
    runner = open_runner(name)
    with tap_logits(runner) as tap:
        scheduler = MiniScheduler(runner, tap=tap)
        sequences = [scheduler.add(prompt(length)) for length in (5, 33, 100)]
        scheduler.run(sequences, 4, chunk=chunk)
    assert_equals_reference(load_reference(checkpoints(name)), sequences)


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_blocks_of_any_size_give_the_same(
    checkpoints: Checkpoints, open_runner: OpenRunner, block_size: int
) -> None:
    runner = open_runner("llama-mha", block_size_tokens=block_size)
    with tap_logits(runner) as tap:
        scheduler = MiniScheduler(runner, tap=tap)
        sequences = [scheduler.add(prompt(length)) for length in (5, 33, 100)]
        scheduler.run(sequences, 4, chunk=11)
    assert_equals_reference(load_reference(checkpoints("llama-mha")), sequences)


@pytest.mark.parametrize("name", ["llama-mha", "mistral-sliding", "gemma2"])
def test_long_chunks_and_long_contexts(
    checkpoints: Checkpoints, open_runner: OpenRunner, name: str
) -> None:
    """More than one tile of queries, and decodes so uneven that they need several buckets."""
    runner = open_runner(name, block_size_tokens=4)
    with tap_logits(runner) as tap:
        scheduler = MiniScheduler(runner, tap=tap)
        sequences = [scheduler.add(prompt(length)) for length in (3, 480, 31, 300)]
        scheduler.step(sequences[1:], [5, None, 290])
        scheduler.run(sequences, 3)
    assert_equals_reference(load_reference(checkpoints(name)), sequences)


def test_random_histories_equal_transformers(
    checkpoints: Checkpoints, open_runner: OpenRunner
) -> None:
    """Random subsets in random order, random chunks, preemptions in the middle of prefill."""
    runner = open_runner("qwen3-qk-norm")
    with tap_logits(runner) as tap:
        scheduler = MiniScheduler(runner, seed=3, tap=tap)
        sequences = [scheduler.add(prompt(length)) for length in LENGTHS]
        while todo := [seq for seq in sequences if len(seq.output) < 4]:
            chosen = scheduler.random.sample(todo, scheduler.random.randint(1, len(todo)))
            scheduler.step(chosen, [scheduler.random.choice([1, 2, 9, 30]) for _ in chosen])
            if scheduler.random.random() < 0.15:
                scheduler.preempt(scheduler.random.choice(sequences))
    assert_equals_reference(load_reference(checkpoints("qwen3-qk-norm")), sequences)


def test_logits_alone_and_in_company_differ_by_rounding_only(open_runner: OpenRunner) -> None:
    runner = open_runner("llama-gqa2-hd64-tied")
    with tap_logits(runner) as tap:
        alone = MiniScheduler(runner, tap=tap).add(prompt(20))
        scheduler = MiniScheduler(runner, tap=tap)
        scheduler.run([alone], 6)
        company = [scheduler.add(prompt(length)) for length in (20, *LENGTHS)]
        scheduler.run(company, 6, chunk=5)
    assert company[0].output == alone.output
    np.testing.assert_allclose(
        np.array(company[0].logits), np.array(alone.logits), rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama-gqa3-hd80", "gemma2", "gpt-neox"])
def test_half_precision_stays_near_the_reference(
    checkpoints: Checkpoints, open_runner: OpenRunner, name: str, dtype: str
) -> None:
    reference = load_reference(checkpoints(name))
    runner = open_runner(name, dtype=dtype)
    with tap_logits(runner) as tap:
        scheduler = MiniScheduler(runner, tap=tap)
        sequences = [scheduler.add(prompt(length)) for length in (1, 33, 70)]
        scheduler.run(sequences, 3, chunk=32)
    for seq in sequences:
        expected = reference_logits(reference, seq.tokens[:-1], 3)
        error = float(np.sqrt(np.mean((np.array(seq.logits) - expected) ** 2)))
        assert error < 0.15  # of logits with deviation 1; a wrong head or mask gives about 1.4


def test_rows_may_be_any_tokens_in_any_order(
    checkpoints: Checkpoints, open_runner: OpenRunner
) -> None:
    """Logits of prompt tokens, of one token twice, and out of order: what prompt logprobs need."""
    tokens = prompt(20)
    rows = [19, 0, 7, 7]
    logits = open_runner("phi3").logits(one_chunk(tokens, rows)).numpy()
    expected = reference_logits(load_reference(checkpoints("phi3")), tokens, 20)
    np.testing.assert_allclose(logits, expected[rows], rtol=0, atol=TOLERANCE)


def one_chunk(tokens: list[int], rows: list[int]) -> StepBatch:
    length = len(tokens)
    return StepBatch(
        token_ids=np.array(tokens, np.int32),
        positions=np.arange(length, dtype=np.int32),
        query_start=np.array([0, length], np.int32),
        seq_lens=np.array([length], np.int32),
        block_tables=np.array([[3, 0]], np.int32),
        logits_rows=np.array(rows, np.int32),
        sampling=sampling_rows([GREEDY] * len(rows)),
    )


def test_the_head_runs_for_wanted_rows_only(open_runner: OpenRunner) -> None:
    runner = open_runner("llama-mha")
    assert runner.logits(one_chunk(prompt(20), [4])).shape == (1, VOCAB)
    tokens = runner.execute(one_chunk(prompt(20), [])).tokens
    assert tokens.dtype == np.int32
    assert tokens.shape == (0,)


def test_softcapped_logits_stay_below_the_cap(open_runner: OpenRunner) -> None:
    logits = open_runner("gemma2").logits(one_chunk(prompt(20), list(range(20))))
    assert float(logits.abs().max()) < 8.0


def test_seeded_draws_do_not_depend_on_company(open_runner: OpenRunner) -> None:
    runner = open_runner("llama-mha")
    sampling = Sampling(temperature=0.9, top_p=0.95, top_k=50, seed=11)
    scheduler = MiniScheduler(runner)
    alone = scheduler.add(prompt(20), sampling)
    scheduler.run([alone], 12)
    company = [scheduler.add(prompt(20), sampling)]
    company += [scheduler.add(prompt(n), Sampling(temperature=1.0, seed=n)) for n in LENGTHS]
    scheduler.run(company, 12, chunk=6)
    assert company[0].output == alone.output
    other = scheduler.add(prompt(20), Sampling(temperature=0.9, top_p=0.95, top_k=50, seed=12))
    scheduler.run([other], 12)
    assert other.output != alone.output


def test_nothing_of_a_freed_block_is_seen_by_its_next_owner(open_runner: OpenRunner) -> None:
    runner = open_runner("llama-mha", kv_cache_memory_gib=0.0005, max_model_len_tokens=256)
    scheduler = MiniScheduler(runner)
    first = scheduler.add(prompt(20))
    scheduler.run([first], 4)
    for length in (90, 70, 100):  # fill the little cache with others' keys
        other = scheduler.add(prompt(length))
        scheduler.run([other], 4, chunk=40)
        scheduler.preempt(other)
    again = scheduler.add(prompt(20))
    scheduler.run([again], 4)
    assert again.output == first.output


def test_two_runners_in_one_process_do_not_meet(open_runner: OpenRunner) -> None:
    names = ("llama-mha", "llama-gqa8-rope3")
    alone = []
    for name in names:
        scheduler = MiniScheduler(open_runner(name))
        alone.append(scheduler.add(prompt(20)))
        scheduler.run(alone[-1:], 5)
    schedulers = [MiniScheduler(open_runner(name)) for name in names]
    together = [scheduler.add(prompt(20)) for scheduler in schedulers]
    for _ in range(5):
        for scheduler, seq in zip(schedulers, together, strict=True):
            scheduler.step([seq], [None])
    assert [seq.output for seq in together] == [seq.output for seq in alone]


def test_a_runner_describes_itself(open_runner: OpenRunner) -> None:
    model = open_runner("llama-mha", max_model_len_tokens=300).model
    assert (model.name, model.runner) == ("llama-mha", "torch cpu float32")
    assert (model.simulated, model.max_model_len, model.vocab_size) == (False, 300, VOCAB)


def test_global_state_of_torch_is_left_alone(open_runner: OpenRunner) -> None:
    torch = pytest.importorskip("torch")
    state = torch.random.get_rng_state()
    scheduler = MiniScheduler(open_runner("llama-mha"))
    sequence = scheduler.add(prompt(20), Sampling(temperature=1.0, seed=1))
    scheduler.run([sequence], 3)
    assert torch.random.get_rng_state().equal(state)
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_a_failed_step_leaves_no_plan_behind(open_runner: OpenRunner) -> None:
    runner = open_runner("llama-mha")
    with pytest.raises(IndexError):
        runner.execute(one_chunk([VOCAB], [0]))
    assert runner._attention.plan is None
    assert runner.execute(one_chunk(prompt(20), [19])).tokens.shape == (1,)


def traces(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def test_a_profile_leaves_a_trace_where_the_call_says(
    open_runner: OpenRunner, tmp_path: Path
) -> None:
    runner = open_runner("llama-mha", profile_dir=str(tmp_path / "default"))
    runner.call("start_profile", {"profile_dir": str(tmp_path / "here")})
    runner.execute(one_chunk(prompt(20), [19]))
    path = runner.call("stop_profile", {})
    assert [path] == [str(tmp_path / "here" / name) for name in traces(tmp_path / "here")]
    runner.call("start_profile", {})
    path = runner.call("stop_profile", {})
    assert [path] == [str(tmp_path / "default" / name) for name in traces(tmp_path / "default")]


def test_a_profile_without_a_directory_is_refused(open_runner: OpenRunner) -> None:
    with pytest.raises(InvalidRequestError, match="--profile-dir"):
        open_runner("llama-mha").call("start_profile", {})


def test_an_unknown_method_is_a_key_error(open_runner: OpenRunner) -> None:
    with pytest.raises(KeyError):
        open_runner("llama-mha").call("make_coffee", {})


def test_close_frees_weights_and_cache_and_is_idempotent(
    open_runner: OpenRunner, tmp_path: Path
) -> None:
    import gc
    import weakref

    torch = pytest.importorskip("torch")

    runner: TorchModelRunner = open_runner("llama-mha")
    runner.call("start_profile", {"profile_dir": str(tmp_path)})
    network = runner._network
    assert network is not None
    weight = weakref.ref(next(network.parameters()))
    cache = weakref.ref(runner._attention._layers[0])
    del network
    runner.close()
    runner.close()
    gc.collect()
    assert weight() is None
    assert cache() is None
    assert not torch.autograd._profiler_enabled()  # the profile that nobody stopped
    assert not traces(tmp_path)
    with pytest.raises(RuntimeError, match="closed"):
        runner.execute(one_chunk(prompt(20), [19]))
