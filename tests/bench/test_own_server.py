"""A server of our own, played by scripts."""

from __future__ import annotations

import sys

import pytest

from helpers.server_process import process_lives
from trioengine.bench.own_server import own_server
from trioengine.errors import EngineStartError

pytestmark = pytest.mark.process

WORDS = (
    "import os, sys\n"
    "def say(text): print(text, file=sys.stderr, flush=True)\n"
    "say('01:02:03.456 INFO    x: listening on http://127.0.0.1:4711')\n"
    "say('01:02:03.456 INFO    x: ready after 0.8 s: m on sim, up to 8192 tokens')\n"
)
WAIT = "import signal; signal.sigwait([signal.SIGTERM])\n"


def command(script: str) -> list[str]:
    mask = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
    return [sys.executable, "-c", mask + script]


def test_it_is_waited_for_and_stopped() -> None:
    script = WORDS + WAIT + "say('asked to stop')\n"
    with own_server("m", [], command(script)) as server:
        assert server.url == "http://127.0.0.1:4711"
        assert server.engine == "m on sim, up to 8192 tokens"
        assert process_lives(server.pid)
    assert not process_lives(server.pid)
    assert server.last_line == "asked to stop"


def test_it_is_told_model_and_flags_and_a_free_port() -> None:
    script = WORDS + WAIT + "say(sys.argv[1:])\n"
    with own_server("m", ["--engine=sim"], command(script)) as server:
        pass
    assert server.last_line == str(["m", "--engine=sim", "--host", "127.0.0.1", "--port", "0"])
    with own_server(None, [], command(script)) as server:
        pass
    assert server.last_line == str(["--host", "127.0.0.1", "--port", "0"])


def test_options_of_the_environment_do_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIOENGINE_PORT", "1")
    monkeypatch.setenv("TRIOENGINE_CACHE_DIR", "/cache")
    monkeypatch.setenv("HF_HOME", "/hf")
    names = "sorted(n for n in os.environ if n.startswith('TRIOENGINE') or n == 'HF_HOME')"
    with own_server(None, [], command(f"{WORDS}{WAIT}say({names})\n")) as server:
        pass
    assert server.last_line == "['HF_HOME', 'TRIOENGINE_CACHE_DIR']"


def test_one_that_does_not_start_says_why() -> None:
    script = "import sys; print('trioengine: no such model', file=sys.stderr); sys.exit(2)"
    with pytest.raises(EngineStartError) as raised, own_server("m", [], command(script)):
        pass
    assert raised.value.message == "no such model"


def test_one_that_says_nothing_is_told_by_its_code() -> None:
    with (
        pytest.raises(EngineStartError, match="exit code 3"),
        own_server("m", [], command("import sys; sys.exit(3)")),
    ):
        pass


def test_it_ends_with_an_error_of_ours() -> None:
    with pytest.raises(KeyboardInterrupt), own_server("m", [], command(WORDS + WAIT)) as server:
        raise KeyboardInterrupt
    assert not process_lives(server.pid)


def test_it_may_say_more_than_a_pipe_holds() -> None:
    script = WORDS + "for _ in range(3000): say('x' * 100)\n" + WAIT + "say('still here')\n"
    with own_server("m", [], command(script)) as server:
        pass
    assert server.last_line == "still here"
