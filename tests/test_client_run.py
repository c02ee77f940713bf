"""`Client.run` and `Client.function` without Ray: a call runs in a slot, again when the slot is called back, and never
hangs on a task that nobody runs (docs/rules.md section 8: who is stopped queues again while retries last)."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from conftest import BadInputReader
from fake_pools import FakePools
from fake_tasks import Crash, FakeTasks

import ray_pools as pools
from ray_pools.client.tasks import Call
from ray_pools.client.transport import TryAgain


@pytest.fixture
def tasks(client: pools.Client) -> FakeTasks:
    """Tasks that end when the test ends them."""
    client._tasks = FakeTasks(by_hand=True)
    return client._tasks


def double(number: int, times: int = 2) -> int:
    return number * times


def with_slot(number: int, slot: Any = None) -> Any:
    return number, slot


def submitted(fake: FakePools, id: str = "r1") -> None:
    fake.until(lambda: id in fake.views)


def test_the_result_comes_back_and_the_slot_is_given_back(
    fake: FakePools, client: pools.Client, tasks: FakeTasks, aside: Any
) -> None:
    running = aside(client.run, double, 4, requester="vision", gpus=1, id="r1", kwargs={"times": 3})
    submitted(fake)
    fake.grant("r1")
    tasks.until(1).run()
    assert running.result(30) == 12
    assert fake.views["r1"]["state"] == "released"


def test_what_the_function_raised_goes_through(
    fake: FakePools, client: pools.Client, tasks: FakeTasks, aside: Any
) -> None:
    running = aside(client.run, lambda: 1 / 0, requester="vision", gpus=1, id="r1", retries=3)
    submitted(fake)
    fake.grant("r1")
    tasks.until(1).run()
    with pytest.raises(ZeroDivisionError):
        running.result(30)
    assert fake.views["r1"]["state"] == "released"


def test_called_back_it_queues_again_and_runs_again(
    fake: FakePools, client: pools.Client, tasks: FakeTasks, aside: Any
) -> None:
    """The function looked at its slot and left: the stop is confirmed at once, not at the end of the grace."""

    def leaves(slot: Any) -> str:
        if slot.k == 1:
            assert slot.preempting.wait(30)
            slot.check()
        return f"attempt {slot.k}"

    running = aside(client.run, leaves, requester="vision", gpus=1, id="r1", retries=1)
    submitted(fake)
    fake.grant("r1")
    first = tasks.until(1)
    fake.preempt("r1", grace_s=3600)
    first.run()
    fake.until(lambda: fake.views["r1"]["k"] == 2)
    fake.grant("r1")
    tasks.until(2).run()
    assert running.result(30) == "attempt 2"
    assert len(fake.ops("stopped")) == 1


def test_without_retries_left_the_error_says_so(
    fake: FakePools, client: pools.Client, tasks: FakeTasks, aside: Any
) -> None:
    running = aside(client.run, lambda slot: slot.check(), requester="vision", gpus=1, id="r1")
    submitted(fake)
    fake.grant("r1")
    task = tasks.until(1)
    fake.preempt("r1", grace_s=3600)
    assert task.slot.preempting.wait(30)
    task.run()
    with pytest.raises(pools.SlotPreempted, match="1 attempt, and no retries left"):
        running.result(30)


def test_a_result_in_the_grace_counts(
    fake: FakePools, client: pools.Client, tasks: FakeTasks, aside: Any
) -> None:
    running = aside(client.run, double, 4, requester="vision", gpus=1, id="r1")
    submitted(fake)
    fake.grant("r1")
    task = tasks.until(1)
    fake.preempt("r1", grace_s=3600)
    assert task.slot.preempting.wait(30)
    task.run()
    assert running.result(30) == 8
    assert fake.views["r1"]["state"] == "released"


def test_a_task_whose_slot_is_gone_is_not_waited_for(
    fake: FakePools, client: pools.Client, tasks: FakeTasks, aside: Any
) -> None:
    """Fault: one that was sent into a removed placement group never ends, with no error."""
    running = aside(client.run, double, 4, requester="vision", gpus=1, id="r1", retries=1)
    submitted(fake)
    fake.grant("r1")
    first = tasks.until(1)
    fake.requeue("r1")  # stopped by force, with a retry left
    fake.until(lambda: first.slot.over)
    fake.grant("r1")
    tasks.until(2).run()
    assert running.result(30) == 8
    assert first.killed


def test_an_end_from_outside_ends_it(
    fake: FakePools, client: pools.Client, tasks: FakeTasks, aside: Any
) -> None:
    running = aside(client.run, double, 4, requester="vision", gpus=1, id="r1", retries=5)
    submitted(fake)
    fake.grant("r1")
    task = tasks.until(1)
    fake.finish("r1", "cancelled")
    with pytest.raises(pools.SlotCancelled):
        running.result(30)
    assert task.killed


@pytest.mark.parametrize("crash_retries", [0, 1])
def test_a_process_that_dies_by_itself_is_an_error_unless_retried(
    fake: FakePools, client: pools.Client, tasks: FakeTasks, aside: Any, crash_retries: int
) -> None:
    running = aside(
        client.run, double, 4, requester="vision", gpus=1, id="r1", retries=5, crash_retries=crash_retries
    )
    submitted(fake)
    fake.grant("r1")
    tasks.until(1).outcome.set_exception(Crash("out of memory"))
    if crash_retries:
        tasks.until(2).run()  # in the same slot
        assert running.result(30) == 8
    else:
        with pytest.raises(Crash):
            running.result(30)
    assert fake.views["r1"]["state"] == "released"


def test_a_process_that_dies_with_its_group_was_called_back(
    fake: FakePools, client: pools.Client, tasks: FakeTasks, aside: Any
) -> None:
    """Ray's word of the death may be here before ours of the preemption."""
    running = aside(client.run, double, 4, requester="vision", gpus=1, id="r1", retries=1)
    submitted(fake)
    fake.grant("r1")
    first = tasks.until(1)
    tasks.group_gone = True
    first.outcome.set_exception(Crash("killed"))
    fake.requeue("r1")
    fake.until(lambda: first.slot.over)
    fake.grant("r1")
    tasks.until(2).run()
    assert running.result(30) == 8


def test_a_coordinator_that_is_away_costs_a_running_task_nothing(fake: FakePools, aside: Any) -> None:
    with fake.client(give_up_s=0.1) as client:
        client._tasks = tasks = FakeTasks(by_hand=True)
        running = aside(client.run, double, 4, requester="vision", gpus=1, id="r1")
        submitted(fake)
        fake.grant("r1")
        task = tasks.until(1)
        fake.down = TryAgain("it is gone")
        fake.break_waits()
        fake.until(lambda: client._trouble() is not None or fake.waits_seen > 4)
        task.run()
        assert running.result(30) == 8


def test_a_wait_that_takes_too_long_leaves_nothing_behind(fake: FakePools, client: pools.Client) -> None:
    with pytest.raises(pools.WaitTimeout):
        client.run(double, 4, requester="vision", gpus=1, id="r1", timeout_s=0)
    assert fake.views["r1"]["state"] == "cancelled"


@pytest.mark.parametrize("granted", [False, True])
def test_a_caller_that_is_cancelled_leaves_nothing_behind(
    fake: FakePools, client: pools.Client, tasks: FakeTasks, granted: bool
) -> None:
    async def story() -> None:
        running = asyncio.create_task(client.run_async(double, 4, requester="vision", gpus=1, id="r1"))
        await asyncio.to_thread(submitted, fake)
        if granted:
            fake.grant("r1")
            await asyncio.to_thread(tasks.until, 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(story())
    assert fake.views["r1"]["state"] == "cancelled"
    assert all(task.killed for task in tasks.started)


def test_many_run_at_once_in_few_threads(fake: FakePools, client: pools.Client) -> None:
    client._tasks = FakeTasks()
    fake.instead["submit"] = [
        lambda op: (fake._op_submit(op), fake.grant(op["id"]), fake.views[op["id"]])[-1] for _ in range(200)
    ]

    async def story() -> list[int]:
        before = threading.active_count()
        running = [client.run_async(double, n, requester="vision", gpus=1) for n in range(200)]
        found = await asyncio.gather(*running)
        assert threading.active_count() <= before + 7  # poll, leases, loop, and four for calls
        return found

    assert asyncio.run(story()) == [2 * n for n in range(200)]


# --- what is called, and with what


def test_a_function_is_given_its_slot_if_it_asks_for_one() -> None:
    assert Call(with_slot, (1,)).wants_slot
    assert not Call(with_slot, (1, "mine")).wants_slot
    assert not Call(with_slot, (1,), {"slot": None}).wants_slot
    assert not Call(double, (1,)).wants_slot
    assert not Call(len, ()).wants_slot


def test_bad_arguments_are_named(refuses: BadInputReader, client: pools.Client) -> None:
    with refuses("fn", "function"):
        client.run(3, requester="vision")  # type: ignore[arg-type]
    with refuses("kwargs", "mapping"):
        client.run(double, 1, requester="vision", kwargs=[1])  # type: ignore[arg-type]
    with refuses("ray_options.max_retries", "slot"):
        client.run(double, 1, requester="vision", ray_options={"max_retries": 3})
    with refuses("gpus", "integer"):
        client.run(double, 1, requester="vision", gpus=-1)
    with refuses("crash_retries", "integer"):
        client.run(double, 1, requester="vision", crash_retries=-1)


def test_a_decorated_function_runs_in_a_slot(fake: FakePools, client: pools.Client) -> None:
    client._tasks = FakeTasks()
    fake.instead["submit"] = [
        lambda op: (fake._op_submit(op), fake.grant(op["id"]), fake.views[op["id"]])[-1] for _ in range(2)
    ]

    @client.function(requester="vision", gpus=1, retries=3)
    def triple(number: int, times: int = 3) -> int:
        """Three times as much."""
        return number * times

    assert (triple.__name__, triple.__doc__) == ("triple", "Three times as much.")
    assert triple.local(1) == 3
    assert fake.calls == []
    assert triple(2, times=5) == 10
    assert asyncio.run(triple.options(gpus=2).run_async(2)) == 6
    assert [(op["amounts"]["gpu"], op["retries"]) for op in fake.ops("submit")] == [(1, 3), (2, 3)]
