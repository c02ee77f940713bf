"""What runs a client's calls, without Ray: a call runs when a test says so, or at once in the thread that starts it."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from ray_pools.client import Slot
from ray_pools.client.tasks import Call


class Crash(Exception):
    """A worker's process died."""


class FakeTask:
    def __init__(self, slot: Slot, call: Call) -> None:
        self.slot, self.call = slot, call
        self.outcome: Future[Any] = Future()
        self.killed = False

    def run(self) -> None:
        more = {"slot": self.slot} if self.call.wants_slot else {}
        try:
            result = self.call.plain(*self.call.args, **self.call.kwargs, **more)
        except Exception as problem:  # noqa: BLE001 - whatever the function raises is its outcome
            self.outcome.set_exception(problem)
        else:
            self.outcome.set_result(result)

    def kill(self) -> None:
        self.killed = True


class FakeTasks:
    """Give it to a client as its `_tasks`. by_hand: a task ends only when the test ends it."""

    def __init__(self, by_hand: bool = False) -> None:
        self.by_hand = by_hand
        self.started: list[FakeTask] = []
        self.changed = threading.Condition()
        self.group_gone = False

    def start(self, slot: Slot, call: Call) -> FakeTask:
        _ = slot.scheduling_strategy  # SlotOver when it is over
        task = FakeTask(slot, call)
        with self.changed:
            self.started.append(task)
            self.changed.notify_all()
        if not self.by_hand:
            task.run()
        return task

    def until(self, count: int) -> FakeTask:
        """The task of this number, from 1, once it was started."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.started) >= count, 30), "it was never started"
            return self.started[count - 1]

    def crash(self, problem: BaseException) -> bool:
        return isinstance(problem, Crash)

    def own_error(self, problem: BaseException) -> BaseException:
        return problem

    def group_is_gone(self, slot: Slot) -> bool:
        return self.group_gone
