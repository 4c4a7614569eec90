"""How many deaths are too many, and how long to wait between them."""

from __future__ import annotations

import pytest

from trioengine.client.restart_budget import WINDOW_S, RestartBudget


def deaths(budget: RestartBudget, *served_s: float) -> list[bool]:
    """Let one engine after the other serve for so long and die; return what each death allows."""
    now_s, allowed = 100.0, []
    for each in served_s:
        budget.note_ready(now_s)
        now_s += each
        allowed.append(budget.note_death(now_s))
        now_s += 1000.0  # the next start takes its time, which is no service
    return allowed


def test_without_restarts_the_first_death_is_the_end() -> None:
    assert deaths(RestartBudget(), 5.0) == [False]


def test_one_death_more_than_the_limit_is_the_end() -> None:
    assert deaths(RestartBudget(3), 1.0, 1.0, 1.0, 1.0) == [True, True, True, False]


def test_deaths_long_ago_in_service_do_not_count() -> None:
    budget = RestartBudget(1)
    assert deaths(budget, 5.0, WINDOW_S + 1.0, WINDOW_S - 1.0) == [True, True, False]
    assert deaths(RestartBudget(1), *[WINDOW_S + 1.0] * 50) == [True] * 50


def test_starts_that_fail_count_and_take_no_time() -> None:
    budget = RestartBudget(3)
    budget.note_ready(0.0)
    assert [budget.note_death(now_s) for now_s in (10.0, 700.0, 1400.0, 2100.0)] == [
        True,
        True,
        True,
        False,
    ]


def test_the_wait_doubles_up_to_a_bound_and_begins_anew() -> None:
    budget, waits = RestartBudget(100), []
    for _ in range(9):
        budget.note_death(0.0)
        waits.append(budget.wait_s)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    budget.note_ready(0.0)
    budget.note_death(WINDOW_S + 1.0)
    assert budget.wait_s == pytest.approx(0.5)
