"""`Client.map` without Ray: every input has one result, in its place, whatever is called back on the way; memory,
threads and requests stay bounded however many inputs there are; leaving it leaves nothing behind."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import BadInputReader
from fake_pools import FINAL, FakePools
from fake_tasks import Crash, FakeTasks

import ray_pools as pools
from ray_pools.client import Slot
from ray_pools.client.map_progress import MapProgress
from ray_pools.client.mapping import DEFAULT_CONCURRENCY
from ray_pools.client.tasks import Call


class GrantsAll(FakePools):
    """Whatever is submitted, or queues again, is granted. `most_open`: requests that were not final, at one time."""

    most_open = 0

    def _op_submit(self, op: dict[str, Any]) -> Any:
        super()._op_submit(op)
        self.grant(op["id"])
        open_now = sum(view["state"] not in FINAL for view in self.views.values())
        self.most_open = max(self.most_open, open_now)
        return dict(self.views[op["id"]])

    def requeue(self, id: str) -> None:
        super().requeue(id)
        self.views[id]["retries"] -= 1
        self.grant(id)


@pytest.fixture
def fake() -> GrantsAll:
    return GrantsAll()


@pytest.fixture
def tasks(client: pools.Client) -> FakeTasks:
    client._tasks = FakeTasks()
    return client._tasks


def nothing_left(fake: FakePools) -> None:
    fake.until(lambda: all(view["state"] in FINAL for view in fake.views.values()))


def square(number: int) -> int:
    if number < 0:
        raise ValueError(number)
    return number * number


def test_thousands_of_inputs_in_order_and_few_slots(
    fake: GrantsAll, client: pools.Client, tasks: FakeTasks
) -> None:
    before = threading.active_count()
    most_threads = 0
    found = []
    for result in client.map(square, range(10_000), requester="vision", gpus=1, concurrency=8):
        found.append(result)
        most_threads = max(most_threads, threading.active_count())
    assert found == [n * n for n in range(10_000)]
    assert most_threads <= before + 7
    assert fake.most_open <= 8
    nothing_left(fake)


def test_each_input_has_a_slot_of_its_own_if_wanted(
    fake: GrantsAll, client: pools.Client, tasks: FakeTasks
) -> None:
    found = sorted(client.map(square, range(20), requester="vision", gpus=1, slot_s=0, ordered=False))
    assert found == [n * n for n in range(20)]
    assert len({task.slot.id for task in tasks.started}) == 20
    nothing_left(fake)


def test_no_more_requests_than_inputs(fake: GrantsAll, client: pools.Client, tasks: FakeTasks) -> None:
    assert list(client.map(square, [3, 4], requester="vision", gpus=1)) == [9, 16]
    assert len(fake.views) <= 2
    assert list(client.map(square, [], requester="vision", gpus=1)) == []
    nothing_left(fake)


def test_endless_inputs_are_not_read_ahead_of_who_reads_the_results(
    fake: GrantsAll, client: pools.Client, tasks: FakeTasks
) -> None:
    read = 0

    def endless() -> Iterator[int]:
        nonlocal read
        while True:
            read += 1
            yield read

    results = client.map(square, endless(), requester="vision", gpus=1, concurrency=2)
    assert read == 0  # nothing is begun before the first result is asked for
    assert [next(results) for _ in range(50)] == [n * n for n in range(1, 51)]
    assert read <= 50 + 3 * 4 * 2
    results.close()  # type: ignore[attr-defined]
    nothing_left(fake)


def test_the_first_error_ends_the_rest(fake: GrantsAll, client: pools.Client, tasks: FakeTasks) -> None:
    with pytest.raises(ValueError, match="-5") as caught:
        list(client.map(square, [1, 2, -5, *range(1000)], requester="vision", gpus=1, concurrency=2))
    assert len(tasks.started) < 100
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["input 2 of a map"]
    nothing_left(fake)


def test_errors_take_their_results_places_if_wanted(
    fake: GrantsAll, client: pools.Client, tasks: FakeTasks
) -> None:
    found = list(client.map(square, [1, -2, 3], requester="vision", gpus=1, return_exceptions=True))
    assert (found[0], str(found[1]), found[2]) == (1, "-2", 9)
    nothing_left(fake)


class Preempting(FakeTasks):
    """The first runs of some inputs are called back, or crash."""

    def __init__(self, fake: FakePools, runs: dict[int, int], crash: bool = False) -> None:
        super().__init__(by_hand=True)
        self.fake, self.left, self.crashing = fake, dict(runs), crash

    def start(self, slot: Slot, call: Call) -> Any:
        task = super().start(slot, call)
        (number,) = call.args
        if self.left.get(number, 0) == 0:
            task.run()
            return task
        self.left[number] -= 1
        if self.crashing:
            task.outcome.set_exception(Crash("killed"))
        else:
            self.fake.preempt(slot.id, grace_s=3600)
            task.outcome.set_exception(pools.SlotPreempted(slot.id))
        return task


def test_an_input_that_is_called_back_runs_again(fake: GrantsAll, client: pools.Client) -> None:
    client._tasks = Preempting(fake, {3: 2, 7: 1})
    found = list(client.map(square, range(10), requester="vision", gpus=1, concurrency=2, retries=2))
    assert found == [n * n for n in range(10)]
    nothing_left(fake)


def test_an_input_without_retries_left_fails_and_the_others_go_on(
    fake: GrantsAll, client: pools.Client
) -> None:
    client._tasks = Preempting(fake, {3: 2, 7: 1})
    found = list(
        client.map(
            square, range(10), requester="vision", gpus=1, concurrency=2, retries=1, return_exceptions=True
        )
    )
    assert isinstance(found[3], pools.SlotPreempted)
    assert "2 attempts, and no retries left" in str(found[3])
    assert found[7] == 49
    nothing_left(fake)


@pytest.mark.parametrize("crash_retries", [0, 1])
def test_a_crash_counts_per_input(fake: GrantsAll, client: pools.Client, crash_retries: int) -> None:
    client._tasks = Preempting(fake, {1: 1, 2: 1}, crash=True)
    found = list(
        client.map(square, range(4), requester="vision", crash_retries=crash_retries, return_exceptions=True)
    )
    assert [type(each) for each in found] == [int, *([int, int] if crash_retries else [Crash, Crash]), int]
    nothing_left(fake)


def test_what_is_no_inputs_error_ends_the_map(client: pools.Client, fake: GrantsAll) -> None:
    fake.instead["submit"] = [pools.Refused("too_many", "too many requests")] * 100
    with pytest.raises(pools.Refused, match="too many"):
        list(client.map(square, range(10), requester="vision", gpus=1, return_exceptions=True))


def test_inputs_that_raise_end_the_map(fake: GrantsAll, client: pools.Client, tasks: FakeTasks) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("the data set")

    with pytest.raises(KeyError, match="the data set"):
        list(client.map(square, broken(), requester="vision", gpus=1, concurrency=1))
    nothing_left(fake)


def test_the_async_twin(fake: GrantsAll, client: pools.Client, tasks: FakeTasks) -> None:
    async def story() -> list[int]:
        found = []
        async for result in client.map_async(square, range(100), requester="vision", gpus=1):
            found.append(result)
        return found

    assert asyncio.run(story()) == [n * n for n in range(100)]
    nothing_left(fake)


def test_cancelled_while_it_maps(fake: GrantsAll, client: pools.Client) -> None:
    client._tasks = tasks = FakeTasks(by_hand=True)

    async def story() -> None:
        async def use() -> None:
            async for _ in client.map_async(square, range(100), requester="vision", gpus=1, concurrency=2):
                pytest.fail("nothing ends by itself here")

        using = asyncio.create_task(use())
        await asyncio.to_thread(tasks.until, 2)
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using

    asyncio.run(story())
    nothing_left(fake)
    assert all(task.killed for task in tasks.started)


def test_a_decorated_function_maps(fake: GrantsAll, client: pools.Client, tasks: FakeTasks) -> None:
    twice = client.function(requester="vision", gpus=1)(square)
    assert list(twice.map([1, 2], concurrency=1)) == [1, 4]


def test_bad_arguments_are_named(refuses: BadInputReader, client: pools.Client) -> None:
    with refuses("concurrency", "integer"):
        client.map(square, [1], requester="vision", concurrency=0)
    with refuses("inputs", "iterated"):
        client.map(square, 3, requester="vision")  # type: ignore[arg-type]
    with refuses("id", "many requests"):
        client.map(square, [1], requester="vision", id="mine")
    with refuses("slot_s", "seconds"):
        client.map(square, [1], requester="vision", slot_s=-1)
    assert DEFAULT_CONCURRENCY == 32  # the docstring says it


def test_the_bar_counts_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    with MapProgress(3, None) as silent:
        silent.show(1, 1, 1)
    assert shown.getvalue() == ""
    with MapProgress(3, True) as bar:
        bar.show(2, 1, 0)
    assert "2/3" in shown.getvalue()
    assert "1 running, 0 queued" in shown.getvalue()
