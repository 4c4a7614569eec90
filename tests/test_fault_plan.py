"""A plan is data that says what it means, or is refused; without it nothing is wrapped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from trioengine.cli import main
from trioengine.engine_proc.faults import EngineFaults
from trioengine.errors import ConfigError
from trioengine.exit_codes import ExitCode
from trioengine.fault_plan import PLACES, Fault, FaultPlan, FrameSpoiler, Trigger, decode_plan
from trioengine.settings import load_config

if TYPE_CHECKING:
    from pathlib import Path

    from trioengine.fault_plan import Action

PLAN = """
[[fault]]
at = "forward"
do = "raise"
step = 3

[[fault]]
at = "to_server"
do = "drop"
message = "outputs"
"""


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    return path


def test_a_plan_is_read_where_faults_are_allowed(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIOENGINE_ALLOW_FAULTS", "1")
    plan = load_config({"fault_plan": str(plan_file)}, {}).engine.fault_plan
    assert plan == FaultPlan(
        (Fault(at="forward", do="raise", step=3), Fault(at="to_server", do="drop",
         message="outputs"))
    )  # fmt: skip
    again = msgspec.json.decode(msgspec.json.encode(plan), type=FaultPlan)
    assert again == plan  # as the engine is told it


@pytest.mark.parametrize("allowed", [None, "", "0", "yes"])
def test_a_plan_is_refused_elsewhere(
    plan_file: Path, allowed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRIOENGINE_ALLOW_FAULTS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("TRIOENGINE_ALLOW_FAULTS", allowed)
    with pytest.raises(ConfigError, match="--fault-plan: faults on purpose are not allowed"):
        load_config({"fault_plan": str(plan_file)}, {})
    with pytest.raises(ConfigError, match="TRIOENGINE_FAULT_PLAN: faults on purpose"):
        load_config({}, {"TRIOENGINE_FAULT_PLAN": str(plan_file)})


@pytest.mark.parametrize(
    "text",
    [
        "[[fault]]\nat = 'forward'\ndo = 'drop'",
        "[[fault]]\nat = 'nowhere'\ndo = 'raise'",
        "[[fault]]\nat = 'forward'\ndo = 'raise'\nwhen = 3",
        "[[fault]]\nat = 'forward'\ndo = 'raise'\nnth = 0",
        "[[fault",
    ],
)
def test_what_is_no_plan_is_refused(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIOENGINE_ALLOW_FAULTS", "1")
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--fault-plan"):
        load_config({"fault_plan": str(path)}, {})


def test_the_option_is_hidden_from_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "--help"])
    assert end.value.code == ExitCode.ASKED
    assert "fault-plan" not in capsys.readouterr().out


def test_a_trigger_waits_for_all_its_conditions_and_happens_once() -> None:
    trigger = Trigger(Fault(at="detokenizer", do="raise", step=3, request=2, nth=2))
    assert not trigger.is_due(step=3, request=1)
    assert not trigger.is_due(step=2, request=2)
    assert not trigger.is_due(step=3, request=2)  # the first of two
    assert trigger.is_due(step=3, request=2)
    assert not trigger.is_due(step=3, request=2)


@pytest.mark.parametrize(
    ("how", "sent"),
    [
        ("drop", [b"[0]", b"[2]", b"[3]"]),
        ("duplicate", [b"[0]", b"[1]", b"[1]", b"[2]", b"[3]"]),
        ("swap", [b"[0]", b"[2]", b"[1]", b"[3]"]),
        ("corrupt", [b"[0]", b"[\xc1]", b"[2]", b"[3]"]),
    ],
)
def test_one_frame_is_spoilt(how: Action, sent: list[bytes]) -> None:
    plan = FaultPlan((Fault(at="to_server", do=how, nth=2),))
    spoiler = FrameSpoiler(plan.triggers("to_server"))
    assert [out for i in range(4) for out in spoiler(b"[%d]" % i)] == sent


def test_a_frame_is_known_by_its_message() -> None:
    trigger = Trigger(Fault(at="to_server", do="drop", message="outputs"))
    assert not trigger.is_due(message=msgspec.msgpack.encode((7, ("accepted", [1]))))
    assert trigger.is_due(message=msgspec.msgpack.encode((8, ("outputs", 1, []))))


def test_what_a_plan_leaves_alone_is_not_wrapped() -> None:
    faults = EngineFaults(FaultPlan((Fault(at="clock", do="jump"),)))
    part = object()
    for wrap in (faults.runner, faults.make_text, faults.compile):
        assert wrap(part) is part  # type: ignore[arg-type]


def test_every_place_can_do_something() -> None:
    assert all(PLACES.values())
    assert decode_plan("{}", msgspec.json.decode) == FaultPlan()
