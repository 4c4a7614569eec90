"""The offline library, on the simulated engine in its own process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import trio

import trioengine
from helpers.server_process import process_lives, wait_until
from trioengine import LLM, Generation, SamplingParams
from trioengine.errors import ConfigError, EngineDeadError, EngineStartError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow]

CLOSED_S = 20.0  # a bound for a loaded machine
SEEDED: dict[str, Any] = {"tokens_from": "seed"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(engine="sim", engine_args=SEEDED, max_num_seqs=8) as llm:
        yield llm


def engine_pid(llm: LLM) -> int:
    engine = llm._server._start.engine
    assert engine is not None
    return int(engine.name.split()[-1])


def test_results_keep_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt {number}" for number in range(30)]
    params = [
        SamplingParams(max_tokens=number % 7 + 1, seed=number, ignore_eos=True)
        for number in range(30)
    ]
    results = llm.generate(prompts, params)
    assert [result.prompt for result in results] == prompts
    assert [len(result.token_ids) for result in results] == [p.max_tokens for p in params]
    assert {result.finish_reason for result in results} == {"length"}
    alone = llm.generate(prompts[17], params[17])
    assert alone[0].text == results[17].text
    assert alone[0].text != ""


def test_token_ids_are_a_prompt_too(llm: LLM) -> None:
    (one,) = llm.generate([300, 301, 302], SamplingParams(max_tokens=2))
    assert one.prompt is None
    assert one.prompt_token_ids == [300, 301, 302]
    mixed: list[str | list[int]] = [[300], "text"]
    both = llm.generate(mixed, SamplingParams(max_tokens=2))
    assert [result.prompt for result in both] == [None, "text"]


def test_n_completions_of_a_prompt_differ(llm: LLM) -> None:
    (result,) = llm.generate("x", SamplingParams(max_tokens=8, n=3, seed=1))
    assert len({completion.text for completion in result.completions}) == 3


def test_chat_goes_through_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(conversation, SamplingParams(max_tokens=3, seed=1))
    assert one.prompt == "user: hi\nassistant:"
    two = llm.chat([conversation, conversation], SamplingParams(max_tokens=3, seed=1))
    assert [result.text for result in two] == [one.text, one.text]


def test_nothing_asked_is_nothing_answered(llm: LLM) -> None:
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "must not be empty"),
        ([[]], "must not be empty"),
        ([[1, 49_152]], "token ids must be in"),
        ([[1, -1]], "token ids must be in"),
        ([[1] * 8192], "maximum context length is 8192 tokens"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompts)


def test_there_must_be_params_for_each(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="1 params for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])


def test_several_threads_share_it(llm: LLM) -> None:
    def one(number: int) -> Generation:
        return llm.generate(f"{number}", SamplingParams(max_tokens=5, seed=number))[0]

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(one, range(24)))
    assert results == [one(number) for number in range(24)]


def test_asyncio_code_calls_it_in_a_thread(llm: LLM) -> None:
    async def main() -> list[list[Generation]]:
        calls = (asyncio.to_thread(llm.generate, f"{number}") for number in range(4))
        return list(await asyncio.gather(*calls))

    assert [batch[0].prompt for batch in asyncio.run(main())] == ["0", "1", "2", "3"]


async def test_trio_code_calls_it_in_a_thread(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3)
    (result,) = await trio.to_thread.run_sync(llm.generate, "x", params)
    assert len(result.token_ids) == 3
    for call in (lambda: LLM(engine="sim"), lambda: llm.generate("x", params)):
        with pytest.raises(RuntimeError, match=r"await trio\.to_thread\.run_sync"):
            call()


async def test_it_is_closed_in_trio_code_all_the_same() -> None:
    """Garbage is collected wherever it falls due, and must not hang there."""
    llm = await trio.to_thread.run_sync(lambda: LLM(engine="sim"))
    pid = engine_pid(llm)
    closing = threading.Thread(target=trio.run, args=(_close, llm), daemon=True)
    closing.start()
    await trio.to_thread.run_sync(closing.join, CLOSED_S)
    assert not closing.is_alive()
    assert not process_lives(pid)


async def _close(llm: LLM) -> None:
    llm.close()


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="LLM has no option 'port'"):
        LLM(engine="sim", port=1)


def test_a_bad_value_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="max-num-seqs"):
        LLM(engine="sim", max_num_seqs=0)


def test_a_model_that_does_not_load_leaves_nothing_behind() -> None:
    def portals() -> int:
        return sum(thread.name == "trioengine" for thread in threading.enumerate())

    before = portals()
    with pytest.raises(EngineStartError, match="no such weights"):
        LLM(engine="sim", engine_args={"fail_on_load": "no such weights"})
    assert portals() == before


def test_a_dead_engine_is_told_now_and_later() -> None:
    with LLM(engine="sim", engine_args={"hang_at_step": 1}) as llm:
        pid = engine_pid(llm)
        killer = threading.Timer(0.05, os.kill, (pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            llm.generate("x")
        killer.join()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            llm.generate("x")


def test_closed_it_is_gone_and_says_so() -> None:
    llm = LLM(engine="sim")
    pid = engine_pid(llm)
    llm.close()
    llm.close()
    assert not process_lives(pid)
    with pytest.raises(RuntimeError, match="has been closed"):
        llm.generate([[1]])


def run_script(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def test_ctrl_c_aborts_what_runs() -> None:
    script = (
        "import threading, time\n"
        "from trioengine import LLM, SamplingParams\n"
        "endless = SamplingParams(max_tokens=8000, ignore_eos=True)\n"
        "with LLM(engine='sim', engine_args={'step_time_ms': 5}) as llm:\n"
        "    client = llm._server.client\n"
        "    def tell():\n"
        "        while not client._stats.last.num_running: time.sleep(0.001)\n"
        "        print('running', flush=True)\n"
        "    threading.Thread(target=tell, daemon=True).start()\n"
        "    try:\n"
        "        llm.generate(['x'] * 100, endless)\n"
        "    except KeyboardInterrupt:\n"
        "        print(client._table.idle, client._stats.last.num_running, flush=True)\n"
        "    print(len(llm.generate('x', SamplingParams(max_tokens=3))[0].token_ids))\n"
    )
    with run_script(script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b"True 0\n3\n"
        assert process.wait() == 0


def test_a_program_that_forgets_to_close_ends_all_the_same() -> None:
    script = (
        "from trioengine import LLM\n"
        "llm = LLM(engine='sim')\n"
        "print(llm._server._start.engine.name.split()[-1], len(llm.generate('x')), flush=True)\n"
    )
    with run_script(script) as process:
        assert process.stdout is not None
        pid, num_results = map(int, process.stdout.read().split())
        assert process.wait(20) == 0
        assert num_results == 1
        wait_until(lambda: not process_lives(pid), what="its engine is gone")


def test_a_program_without_standard_streams_uses_it(tmp_path: Path) -> None:
    told = tmp_path / "told"
    script = (
        "import sys; from trioengine import LLM\n"
        "with LLM(engine='sim') as llm:\n"
        "    open(sys.argv[1], 'w').write(str(len(llm.generate(['x', 'y']))))\n"
    )
    shell = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", sys.executable, "-c", script, str(told)]
    assert subprocess.run(shell, timeout=60).returncode == 0
    assert told.read_text() == "2"


def test_importing_the_package_is_light() -> None:
    script = "import sys, trioengine; print('trio' in sys.modules, 'msgspec' in sys.modules)"
    with run_script(script) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b"False False\n"


def test_what_is_exported_is_there() -> None:
    for name in trioengine.__all__:
        assert getattr(trioengine, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = trioengine.nothing


def test_importing_the_library_imports_neither_torch_nor_transformers() -> None:
    script = (
        "import sys, json, trioengine.llm, trioengine.cli, trioengine.http.app;"
        "print(json.dumps([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules]))"
    )
    with run_script(script) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.read()) == []
