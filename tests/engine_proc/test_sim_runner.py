"""The simulated runner can be foretold, and does the harm it is told to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from helpers.sim_core import sim_core
from trioengine.config import EngineOptions
from trioengine.engine_proc.sim_runner import SimModelRunner, SimScript, sim_tokens
from trioengine.errors import ConfigError
from trioengine.outputs import FinishReason
from trioengine.protocol import Add
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trioengine.engine_proc.core import EngineCore


def run(core: EngineCore) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    while core.has_work():
        for output in core.step(list):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


def answer(script: SimScript, request_id: int = 1, **params: object) -> list[int]:
    core, _ = sim_core(script)
    chosen = SamplingParams(**{"seed": 3, "max_tokens": 40, **params})  # type: ignore[arg-type]
    core.add_request(Add(request_id, [300] * 5, chosen))
    return run(core)[request_id]


def test_tokens_are_a_function_of_seed_id_and_position() -> None:
    core, runner = sim_core()
    for request_id in (1, 2):
        core.add_request(Add(request_id, [300] * 5, SamplingParams(seed=3, max_tokens=40)))
    tokens = run(core)
    for request_id in (1, 2):
        foretold = sim_tokens(3, request_id, range(5, 45), runner.speakable)
        assert tokens[request_id] == foretold.tolist()
    assert tokens[1] != tokens[2]


def test_tokens_from_the_seed_alone() -> None:
    script = SimScript(tokens_from="seed")
    assert answer(script, 1) == answer(script, 2) != answer(script, 2, seed=4)


def test_never_an_end_unless_scripted() -> None:
    runner = SimModelRunner(SimScript(), vocab_size=10, eos_token_ids=(2, 5))
    assert runner.speakable.tolist() == [0, 1, 3, 4, 6, 7, 8, 9]
    assert answer(SimScript(eos_probability=1.0)) == [0]
    assert len(answer(SimScript(eos_probability=1.0), min_tokens=4)) == 5


def test_a_scripted_end_comes_about_as_often_as_asked() -> None:
    script = SimScript(eos_probability=0.1, max_model_len=20_000)
    tokens = answer(script, ignore_eos=True, max_tokens=4_000)
    assert 300 < tokens.count(0) < 500


def test_masked_tokens_are_not_said() -> None:
    plain = answer(SimScript())
    masked = answer(SimScript(), stop_token_ids=tuple(plain[:5]), min_tokens=40)
    assert not set(masked) & set(plain[:5])


def test_a_scripted_failure_comes_at_its_step() -> None:
    core, _ = sim_core(SimScript(fail_at_step=3))
    core.add_request(Add(1, [300], SamplingParams(max_tokens=9)))
    assert len([*core.step(list), *core.step(list)]) == 2
    with pytest.raises(RuntimeError, match="scripted failure of step 3"):
        core.step(list)


def test_a_bad_token_ends_one_request() -> None:
    core, _ = sim_core(SimScript(bad_token_at_step=2))
    for request_id in (1, 2):
        core.add_request(Add(request_id, [300], SamplingParams(max_tokens=3)))
    core.step(list)
    reasons = {output.request_id: output.finish_reason for output in core.step(list)}
    assert reasons == {1: FinishReason.ERROR, 2: None}


def load(**engine_args: str | int | float | bool) -> tuple[SimModelRunner, list[float]]:
    told: list[float] = []
    runner = SimModelRunner.load(
        EngineOptions(engine_args=engine_args, block_size_tokens=8, max_model_len_tokens=99),
        vocab_size=500,
        eos_token_ids=(0,),
        speakable=None,
        progress=lambda phase, fraction: told.append(fraction),
    )
    return runner, told


def test_loading_takes_its_options_and_says_that_it_simulates() -> None:
    runner, told = load(num_blocks=7, load_time_ms=0.01)
    assert (runner.block_size, runner.num_blocks) == (8, 7)
    assert runner.model.max_model_len == 99
    assert runner.model.simulated
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_loading_fails_as_scripted() -> None:
    with pytest.raises(RuntimeError, match="no such weights"):
        load(fail_on_load="no such weights")


@pytest.mark.parametrize("engine_args", [{"step_tme_ms": 1}, {"num_blocks": "many"}])
def test_a_script_with_a_mistake_is_refused(engine_args: dict[str, str | int]) -> None:
    with pytest.raises(ConfigError, match="simulated engine"):
        SimScript.from_args(engine_args)


def test_it_has_nothing_to_call() -> None:
    _, runner = sim_core()
    with pytest.raises(KeyError):
        runner.call("start_profile", {})


def test_sim_tokens_broadcast() -> None:
    speakable = np.arange(100, dtype=np.int32)
    assert sim_tokens([1, 2], 7, 3, speakable).shape == (2,)
