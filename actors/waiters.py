"""Who waits at the coordinator for something to happen, and is woken when it does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

Subject = tuple[str, str]
"""("client", its id) for all of a client's requests; ("id", a request's) for that one alone."""


class Waiters:
    """Long polls by subject. Nobody is woken but who waits for it."""

    def __init__(self) -> None:
        self._waiting: dict[Subject, set[asyncio.Future[None]]] = {}

    def wake(self, subjects: Iterable[Subject]) -> None:
        """Something happened to these."""
        for subject in subjects:
            for waiter in self._waiting.get(subject, ()):
                self._wake(waiter)

    @staticmethod
    def _wake(waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_result(None)

    async def wait(self, subjects: Sequence[Subject], timeout_s: float) -> None:
        """Until something happens to one of these, or the time is over."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        for subject in subjects:
            self._waiting.setdefault(subject, set()).add(waiter)
        over = loop.call_later(timeout_s, self._wake, waiter)  # no wait_for: it takes more rounds of the loop
        try:
            await waiter
        finally:
            over.cancel()
            for subject in subjects:
                self._waiting[subject].discard(waiter)
                if not self._waiting[subject]:
                    del self._waiting[subject]
