"""Single decisions of the scheduler; histories are in tests/property/test_scheduler.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers.requests import make_request
from trioengine.engine_proc.kv_cache.block_pool import BlockPool
from trioengine.engine_proc.kv_cache.manager import KVCacheManager
from trioengine.engine_proc.request import RequestStatus
from trioengine.engine_proc.scheduler import RankedQueue, Scheduler, SchedulerOutput
from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from trioengine.engine_proc.request import Request

BLOCK_SIZE = 4


class World:
    """A scheduler and the little that it needs: someone who applies its steps."""

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        seats: int = 8,
        budget: int = 100,
        beside: int = 10,
        num_steps: int = 1,
    ) -> None:
        self.cache = KVCacheManager(BlockPool(num_blocks), BLOCK_SIZE, enable_prefix_caching=True)
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            prefill_tokens_beside_decodes=beside,
            max_num_steps=num_steps,
        )
        self.arrivals = 0

    def add(self, num_tokens: int, *, priority: int = 0, shared: bool = False) -> Request:
        self.arrivals += 1
        first = 0 if shared else self.arrivals * 10_000
        request = make_request(
            range(first, first + num_tokens),
            request_id=self.arrivals,
            rank=(priority, self.arrivals),
        )
        self.scheduler.add(request)
        return request

    def step(self) -> SchedulerOutput:
        plan = self.scheduler.schedule()
        for request in plan.decodes:
            count = min(plan.num_steps, request.tokens_left)
            request.num_computed += count
            request.tokens.extend([7] * count)
        for chunk in plan.prefills:
            last = chunk.is_last
            chunk.request.num_computed += chunk.num_tokens
            self.cache.seal(chunk.request)
            if last:
                chunk.request.decoding = True
                chunk.request.tokens.append(7)
        return plan

    def chunks(self) -> list[tuple[int, int]]:
        return [(chunk.request.request_id, chunk.num_tokens) for chunk in self.step().prefills]


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    world = World(budget=40)
    world.add(100)
    assert [world.chunks() for _ in range(4)] == [[(1, 40)], [(1, 40)], [(1, 20)], []]


def test_short_prompts_share_a_step() -> None:
    world = World(budget=40)
    for _ in range(3):
        world.add(15)
    assert world.chunks() == [(1, 15), (2, 15), (3, 10)]


def test_beside_decodes_all_chunks_together_are_modest() -> None:
    world = World(beside=10)
    world.add(5)
    world.step()
    world.add(8)
    world.add(8)
    plan = world.step()
    assert [request.request_id for request in plan.decodes] == [1]
    assert sum(chunk.num_tokens for chunk in plan.prefills) == 10


def test_decodes_count_against_the_budget() -> None:
    world = World(seats=4, budget=6, beside=100)
    for _ in range(3):
        world.add(2)
    world.step()
    world.add(50)
    assert world.step().num_tokens == 6


def test_no_more_run_than_there_are_seats() -> None:
    world = World(seats=2)
    for _ in range(3):
        world.add(5)
    world.step()
    assert (len(world.scheduler.running), len(world.scheduler.waiting)) == (2, 1)


def test_priority_orders_those_that_wait_and_arrival_breaks_ties() -> None:
    world = World(seats=1)
    late = [world.add(5, priority=1), world.add(5, priority=0), world.add(5, priority=0)]
    order = []
    for _ in range(3):
        (chunk,) = world.step().prefills
        order.append(late.index(chunk.request))
        world.scheduler.forget(chunk.request)
    assert order == [1, 2, 0]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    world = World(num_blocks=10)
    world.add(20)  # five blocks
    world.step()
    big, small = world.add(30), world.add(2)
    world.step()
    assert list(world.scheduler.waiting) == [big, small]


def test_admission_leaves_a_block_for_each_that_runs() -> None:
    world = World(num_blocks=6)
    world.add(7)
    world.step()
    world.add(16)  # four blocks: they are free, but then the first could not grow
    world.step()
    assert len(world.scheduler.waiting) == 1
    world.add(1, priority=-1)
    world.step()
    assert len(world.scheduler.running) == 2


def test_the_latest_is_preempted_and_keeps_its_tokens() -> None:
    world = World(num_blocks=4, seats=2)
    first, second = world.add(4), world.add(4)
    world.step()
    while not (plan := world.step()).preempted:
        pass
    assert plan.preempted == [second]
    assert second.status is RequestStatus.PREEMPTED
    assert (second.num_computed, second.block_ids, second.decoding) == (0, [], False)
    assert len(second.tokens) > 4
    assert plan.decodes == [first]
    assert world.scheduler.num_preemptions == 1


def test_the_worse_priority_is_preempted_even_if_it_came_first() -> None:
    world = World(num_blocks=4, seats=2)
    first = world.add(4, priority=1)
    world.add(4, priority=0)
    world.step()
    while not (plan := world.step()).preempted:
        pass
    assert plan.preempted == [first]


def test_one_that_is_last_preempts_itself() -> None:
    world = World(num_blocks=4, seats=2)
    first = world.add(6)
    second = world.add(4)
    world.step()  # both decode; one needs a block next, and three more steps fill the pool
    while not (plan := world.step()).preempted:
        pass
    assert plan.preempted == [second]
    assert first in plan.decodes


def test_a_preempted_request_comes_back_before_later_ones_and_computes_all_again() -> None:
    world = World(num_blocks=4, seats=2)
    first, second = world.add(4), world.add(4)
    world.step()
    while not world.step().preempted:
        pass
    world.add(1)
    world.scheduler.forget(first)
    plan = world.step()
    assert plan.admitted[0] is second
    assert second.num_cached_tokens == 0, "its own blocks are no prefix hit"
    assert world.scheduler.prompt_tokens == 8, "its prompt was counted twice"


def test_no_admission_in_a_step_that_preempts() -> None:
    world = World(num_blocks=4, seats=3)
    world.add(4)
    world.add(4)
    world.step()
    world.add(1, priority=-1)
    seen = [plan for plan in (world.step() for _ in range(12)) if plan.preempted]
    assert seen
    assert all(not plan.admitted for plan in seen)


def test_a_shared_cold_prefix_is_computed_once() -> None:
    world = World(budget=200)
    for _ in range(4):
        world.add(41, shared=True)
    assert world.chunks() == [(1, 41)]
    assert world.chunks() == [(2, 1), (3, 1), (4, 1)]
    assert world.scheduler.prefix_hit_tokens == 3 * 40


def test_forget_takes_from_either_queue() -> None:
    world = World(seats=1)
    running, waiting = world.add(5), world.add(5)
    world.step()
    world.scheduler.forget(waiting)
    world.scheduler.forget(running)
    assert not world.scheduler.has_requests()
    world.cache.check_idle()


@pytest.mark.parametrize(("seats", "budget", "beside"), [(0, 10, 1), (11, 10, 1), (1, 10, 0)])
def test_an_impossible_budget_is_refused(seats: int, budget: int, beside: int) -> None:
    with pytest.raises(ConfigError):
        World(seats=seats, budget=budget, beside=beside)


def test_ranked_queue_stays_sorted() -> None:
    world = World()
    requests = [world.add(1, priority=priority) for priority in (2, 0, 1, 0)]
    queue = RankedQueue()
    for request in requests:
        queue.add(request)
    queue.remove(requests[2])
    assert list(queue) == [requests[1], requests[3], requests[0]]
    assert queue[-1] is requests[0]


# Several steps to a plan --------------------------------------------------------------------


def test_decodes_alone_are_planned_for_several_steps() -> None:
    world = World(num_steps=4)
    one, two = world.add(3), world.add(3)
    assert world.step().num_steps == 1  # a prefill
    plan = world.step()
    assert (plan.decodes, plan.num_steps) == ([one, two], 4)
    # The last of the four computes position 6: with 7 tokens there are two blocks.
    assert one.capacity == two.capacity == 8
    world.add(3)
    assert world.step().num_steps == 1


def test_a_plan_stops_where_the_longest_answer_does() -> None:
    world = World(num_steps=8)
    one, two = world.add(3), world.add(3)
    world.step()
    one.max_len, two.max_len = 6, 11
    plan = world.scheduler.schedule()
    assert plan.num_steps == 7
    assert plan.after(1).decodes == [one, two]
    assert plan.after(2).decodes == [two]
    assert plan.after(6).decodes == [two]
    assert (one.capacity, two.capacity) == (8, 12)  # nothing beyond their ends


def test_without_room_for_all_steps_there_are_fewer_and_nobody_is_preempted() -> None:
    world = World(num_blocks=5, num_steps=8)
    one, two = world.add(7), world.add(7)  # two blocks each: one left, and 8 steps want two each
    world.step()
    plan = world.step()
    assert (plan.num_steps, plan.preempted) == (1, [])
    assert one.capacity == two.capacity == 8
    plan = world.step()  # both need a block now: the usual rules
    assert plan.preempted == [two]


def test_fewer_steps_where_those_fit() -> None:
    world = World(num_blocks=4, num_steps=8)
    one = world.add(7)
    world.step()
    world.cache.pool.allocate(1)
    assert world.step().num_steps == 4  # one more block: up to 12 tokens
    assert one.capacity == 12


def test_a_request_that_wants_single_steps_gets_them_for_all() -> None:
    world = World(num_steps=4)
    one, two = world.add(3), world.add(3)
    two.single_steps = True
    world.step()
    assert world.step().num_steps == 1
    world.scheduler.forget(two)
    assert one.decoding
    assert world.step().num_steps == 4


def test_no_steps_is_no_number_of_steps() -> None:
    with pytest.raises(ConfigError, match="max_num_steps"):
        World(num_steps=0)
