"""The waiting queue: classes by priority, each in order of arrival."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice

from leadframe.request import Request


class WaitingQueue:
    """Requests that hold no blocks, in the order in which they may be admitted.

    Every operation is O(1) in the number of requests, removal from the middle included.

    Args:
      by_priority: lower `Request.priority` goes first; otherwise there is one class only.
    """

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._priorities: list[int] = []
        self._classes: dict[int, OrderedDict[str, Request]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """Yields requests in order of admission; do not change the queue meanwhile."""
        return chain.from_iterable(self._classes[p].values() for p in self._priorities)

    def append(self, request: Request) -> None:
        """Adds a request at the end of its class."""
        priority = self._priority(request)
        if priority not in self._classes:
            self._classes[priority] = OrderedDict()
            insort(self._priorities, priority)
        self._classes[priority][request.request_id] = request
        self._size += 1

    def appendleft(self, request: Request) -> None:
        """Adds a request at the front of its class."""
        self.append(request)
        self._classes[self._priority(request)].move_to_end(request.request_id, last=False)

    def remove(self, request: Request) -> None:
        """Takes a request out of the queue, wherever it is."""
        priority = self._priority(request)
        del self._classes[priority][request.request_id]
        if not self._classes[priority]:
            del self._classes[priority]
            self._priorities.remove(priority)
        self._size -= 1

    def first(self, count: int) -> list[Request]:
        """Returns the first `count` requests, or all if there are fewer."""
        return list(islice(self, count))

    def _priority(self, request: Request) -> int:
        return request.priority if self._by_priority else 0
