"""``python -m trioengine.engine_proc``: one incarnation of the engine, from Hello to its last word.

Nothing heavy is imported before the lifeline is armed: from then on this process cannot outlive its
server. SIGINT and SIGTERM are ignored, since a terminal's Ctrl-C and a service manager's group kill
reach it too and the server decides when it leaves; SIGHUP keeps its meaning.

Exit codes: 0 after ``Shutdown``, 1 after ``Fatal`` or when the server is gone.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from trioengine.config import EngineConfig
    from trioengine.engine_proc.channel import EngineChannel
    from trioengine.engine_proc.faults import EngineFaults
    from trioengine.heartbeat import HeartbeatPage

FAILED: Final = 1
GRAMMARS_AHEAD_S: Final = 2.0  # after loading: nobody's start is to be slower for it
_STDIN: Final = 0


def main() -> int:
    """Run one incarnation; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    config, page = _arm()
    from trioengine.engine_proc.loop import fatal_from

    with _open_channel(config) as channel:
        try:
            channel.greet(config.token)
            return _serve(config, channel, page)
        except Exception as error:
            last_word = fatal_from(error)
            # The frame may find nobody, the captured pipe is read to its end.
            sys.stderr.write(f"{last_word.cause}\n" if last_word.refused else last_word.traceback)
            channel.send(last_word)
            return FAILED


def _arm() -> tuple[EngineConfig, HeartbeatPage]:
    """Read the configuration, and from then on die with the server."""
    from pathlib import Path

    import msgspec

    from trioengine.config import EngineConfig
    from trioengine.engine_proc.lifeline import Lifeline, read_config_line
    from trioengine.engine_proc.lossy_stream import make_standard_streams_lossy
    from trioengine.heartbeat import HeartbeatPage

    make_standard_streams_lossy()
    logging.basicConfig(format="%(levelname)s engine: %(message)s", level=logging.INFO)
    config = msgspec.json.decode(read_config_line(_STDIN), type=EngineConfig)
    page = HeartbeatPage(Path(config.heartbeat_path), writable=True)
    Lifeline(_STDIN, page, config.runtime_dir).start()
    return config, page


def _open_channel(config: EngineConfig) -> EngineChannel:
    commands, outputs = config.commands_address, config.outputs_address
    if config.options.fault_plan is not None:
        from trioengine.engine_proc.faults import FaultyChannel

        plan = config.options.fault_plan
        return FaultyChannel(plan, commands_address=commands, outputs_address=outputs)
    from trioengine.engine_proc.channel import EngineChannel

    return EngineChannel(commands_address=commands, outputs_address=outputs)


def _engine_faults(config: EngineConfig) -> EngineFaults | None:
    if config.options.fault_plan is None:
        return None
    from trioengine.engine_proc.faults import EngineFaults

    faults = EngineFaults(config.options.fault_plan)
    faults.on_load()
    return faults


def _serve(config: EngineConfig, channel: EngineChannel, page: HeartbeatPage) -> int:
    """Load, say Ready, and run the loop to its end.

    Raises:
        Exception: Loading failed, or a step did.
    """
    from trioengine.engine_proc.loop import EngineLoop
    from trioengine.engine_proc.profiling import StepTimeline
    from trioengine.engine_proc.registry import build_backend
    from trioengine.protocol import Progress, Ready

    faults = _engine_faults(config)
    timeline = StepTimeline() if faults is None else faults.timeline()
    backend = build_backend(
        config,
        lambda phase, done: channel.send(Progress(phase, done)),
        timeline,
        faults,
        ahead_s=GRAMMARS_AHEAD_S,
    )
    gc.collect()
    gc.freeze()  # what loading left is here to stay: collections need not walk it again
    channel.send(Ready(backend.model, backend.limits))
    EngineLoop(backend, channel, page, timeline).run()
    backend.shutdown()
    return 0


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of kernels and libraries have no say in how long an exit takes.
    os._exit(exit_code)
