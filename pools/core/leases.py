"""Leases of requests: soft deadlines, by which a holder or waiter must say again that it is alive (section 8)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator


class Leases:
    """When each lease runs out. A renewal costs nothing: the heap learns of it when the old deadline comes up."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        # (deadline as last looked at, age, id)
        self._heap: list[tuple[float, int, str]] = []

    def start(self, id: str, age: int, until: float) -> None:
        """The request must be renewed before `until`."""
        self._until[id] = until
        heapq.heappush(self._heap, (until, age, id))

    def renew(self, id: str, until: float) -> None:
        """Its deadline moves on; without effect where none runs."""
        if id in self._until:
            self._until[id] = until

    def drop(self, id: str) -> None:
        """None runs for it any more."""
        self._until.pop(id, None)

    def next_at(self) -> float | None:
        """When the next one runs out."""
        heap = self._heap
        while heap:
            at, age, id = heap[0]
            until = self._until.get(id)
            if until == at:
                return at
            heapq.heappop(heap)
            if until is not None:
                heapq.heappush(heap, (until, age, id))
        return None

    def pop_due(self, now: float) -> str | None:
        """The one that ran out first, then the oldest; its lease is gone."""
        at = self.next_at()
        if at is None or at > now:
            return None
        _, _, id = heapq.heappop(self._heap)
        del self._until[id]
        return id

    def __len__(self) -> int:
        return len(self._until)

    def __iter__(self) -> Iterator[str]:
        return iter(self._until)
