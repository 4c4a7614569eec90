"""Do queues, rows and blocks tell the same story? Asked between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioengine.engine_proc.request import RequestStatus
from trioengine.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Collection

    from trioengine.engine_proc.input_batch import InputBatch
    from trioengine.engine_proc.kv_cache.block_pool import BlockPool
    from trioengine.engine_proc.request import Request
    from trioengine.engine_proc.scheduler import Scheduler

__all__ = ["check_agreement"]


def check_agreement(
    scheduler: Scheduler, batch: InputBatch, pool: BlockPool, live: Collection[Request]
) -> None:
    """Check that every live request is where its status says, and every block is somebody's.

    Raises:
        InternalError: They do not agree; the message says how.
    """
    live_ids = {request.request_id for request in live}
    queued = {request.request_id for request in [*scheduler.running, *scheduler.waiting]}
    queued |= {r.request_id for r in live if r.status is RequestStatus.COMPILING}
    if queued != live_ids:
        raise InternalError(f"live {sorted(live_ids)}, but queued {sorted(queued)}")
    if set(scheduler.running) != set(batch.requests):
        raise InternalError("the rows of the batch are not the running requests")
    held = {block for request in scheduler.running for block in request.block_ids}
    if len(held) + pool.num_free != pool.num_blocks:
        raise InternalError(f"{len(held)} blocks are in use, but {pool!r}")
