"""The scheduler's invariants, recomputed from scratch."""

from __future__ import annotations

from collections.abc import Mapping

from leadframe.errors import InternalError
from leadframe.kv_cache import KVCacheManager
from leadframe.request import Request, RequestStatus
from leadframe.scheduler.waiting import WaitingQueue


def check_queues(
    requests: Mapping[str, Request],
    running: Mapping[str, Request],
    waiting: WaitingQueue,
    kv: KVCacheManager,
) -> None:
    """Checks both queues, and the blocks of the requests in them.

    Args:
      requests: every live request by id.
      running: those that hold blocks.
      waiting: those that hold none.
      kv: the blocks.

    Raises:
      InternalError: an invariant does not hold.
    """
    queued = [*running.values(), *waiting]
    if len(waiting) != len(queued) - len(running):
        raise InternalError(f"{len(waiting)} requests are counted as waiting, not those that wait")
    if len(queued) != len(requests) or {r.request_id: r for r in queued} != requests:
        raise InternalError("a live request is not in exactly one queue")
    for request in running.values():
        _check_running(request)
    for request in waiting:
        _check_waiting(request, kv)
    if set(kv.table_rows) != set(running):
        raise InternalError("the running requests are not those that have block tables")
    kv.check()


def _check_running(request: Request) -> None:
    name = f"request {request.request_id}"
    if request.status is not RequestStatus.RUNNING:
        raise InternalError(f"{name} runs as {request.status.value}")
    if request.num_computed_tokens >= request.num_tokens:
        raise InternalError(f"{name} runs and has nothing left to compute")


def _check_waiting(request: Request, kv: KVCacheManager) -> None:
    name = f"request {request.request_id}"
    if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
        raise InternalError(f"{name} waits as {request.status.value}")
    if request.num_computed_tokens or len(kv.block_ids(request)):
        raise InternalError(f"{name} waits and has computed tokens or blocks")
