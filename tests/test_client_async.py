"""The async twins without Ray: thousands wait on one loop and in no thread, and whoever is cancelled leaves nothing
behind, wherever it was (docs/rules.md section 8: capacity comes back from whoever is gone)."""

# ruff: noqa: PT012 - a with-block of a slot is what is tested, and it is more than one statement
from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fake_pools import FakePools

import ray_pools as pools
from ray_pools.client.transport import TryAgain

WAITERS = 2000


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(story(), 60)

    asyncio.run(limited())


async def until(fake: FakePools, holds: Callable[[], bool]) -> None:
    await asyncio.to_thread(fake.until, holds)


def grants_at_once(fake: FakePools) -> None:
    fake.instead["submit"] = [
        lambda op: (fake._op_submit(op), fake.grant(op["id"]), fake.views[op["id"]])[-1]
    ]


# --- what they do


def test_a_slot_is_waited_for_used_and_given_back(fake: FakePools, client: pools.Client) -> None:
    async def story() -> None:
        ticket = await client.submit_async("vision", gpus=1, id="r1")
        waiting = asyncio.create_task(ticket.wait_async(30))
        fake.grant("r1", ready=False)
        assert (await ticket.wait_for_async("allocated", 30))["ready"] is False
        assert not waiting.done()
        fake.grant("r1")
        slot = await waiting
        assert slot is await ticket.wait_async()
        async with slot:
            assert slot.scheduling_strategy == "DEFAULT"
        assert (await ticket.status_async())["state"] == "released"
        assert str(await ticket.explain_async()) == "request r1 was given back"
        with pytest.raises(pools.SlotOver):
            await ticket.wait_async()
        assert (await ticket.cancel_async())["state"] == "released"

    play(story)


def test_many_are_submitted_and_each_ends_in_its_own_way(fake: FakePools, client: pools.Client) -> None:
    async def story() -> None:
        first, second, third = await client.submit_many_async(
            {"requester": "vision", "gpus": 1, "id": f"r{n}"} for n in range(3)
        )
        with pytest.raises(pools.WaitTimeout, match="queued after 0 s"):
            await first.wait_async(0)
        with pytest.raises(pools.WaitTimeout):
            await first.wait_async(0.01)
        fake.finish("r0", "rejected", causes={"a": "no_policy"})
        with pytest.raises(pools.SlotRejected):
            await first.wait_async(30)
        fake.grant("r1")
        fake.preempt("r1")  # before anybody saw it: it stops at once
        with pytest.raises(pools.SlotPreempted):
            await second.wait_async(30)
        assert (await third.release_async())["state"] == "cancelled"
        with pytest.raises(pools.SlotCancelled):
            await third.wait_for_async("allocated")
        with pytest.raises(pools.BadInput):
            await third.wait_for_async("running")

    play(story)


def test_a_preempted_block_is_told_and_says_that_it_stopped(fake: FakePools, client: pools.Client) -> None:
    grants_at_once(fake)

    async def story() -> None:
        with pytest.raises(pools.SlotPreempted):
            async with client.slot_async("vision", gpus=1, id="r1", retries=1) as slot:
                told = asyncio.create_task(slot.preempting_async())
                fake.preempt("r1", grace_s=3600)
                await told
                slot.check()

    play(story)
    assert len(fake.ops("stopped")) == 1
    assert fake.views["r1"]["state"] == "cancelled"  # the block can't begin anew


@pytest.mark.parametrize("word", ["stopped_async", "release_async"])
def test_the_slots_own_last_word(fake: FakePools, client: pools.Client, word: str) -> None:
    async def story() -> None:
        ticket = await client.submit_async("vision", gpus=1, id="r1")
        fake.grant("r1")
        slot = await ticket.wait_async()
        fake.preempt("r1")
        await slot.preempting_async()
        await getattr(slot, word)()
        await getattr(slot, word)()

    play(story)
    assert fake.views["r1"]["state"] == ("preempted" if word == "stopped_async" else "released")


def test_an_operation_is_sent_again_until_it_is_answered(fake: FakePools) -> None:
    async def story() -> None:
        with fake.client(give_up_s=0.2) as client:
            fake.instead["submit"] = [TryAgain("it restarts"), TryAgain("it restarts")]
            ticket = await client.submit_async("vision", gpus=1, id="r1")
            assert len(fake.ops("submit")) == 3
            fake.down = TryAgain("it is gone")
            fake.break_waits()
            with pytest.raises(pools.Unreachable, match="it is gone"):
                await ticket.wait_async()
            with pytest.raises(pools.Unreachable, match="did not answer within"):
                await ticket.release_async()

    play(story)


# --- cancellation, at each await


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_cancelled_while_it_submits(fake: FakePools, client: pools.Client) -> None:
    """The request may have arrived, its answer did not: it is not wanted."""

    def done_and_lost(op: dict[str, Any]) -> None:
        fake._op_submit(op)
        raise TryAgain("the answer is lost")

    fake.instead["submit"] = [done_and_lost, *(TryAgain("away") for _ in range(1000))]

    async def story() -> None:
        submitting = asyncio.create_task(client.submit_async("vision", gpus=1, id="r1"))
        await until(fake, lambda: len(fake.ops("submit")) >= 2)
        await cancelled(submitting)

    play(story)
    assert fake.views["r1"]["state"] == "cancelled"
    assert client._live() == []


def test_cancelled_at_the_moment_when_it_was_accepted(
    fake: FakePools, client: pools.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tickets are made, and nobody will hear of them."""

    async def story() -> None:
        submitting = asyncio.create_task(client.submit_async("vision", gpus=1, id="r1"))
        await asyncio.sleep(0)
        # this loop is held up until the answer is there: result and cancellation meet
        fake.until(lambda: bool(client._live()) and "r1" in fake.views)
        await cancelled(submitting)

    play(story)
    assert fake.views["r1"]["state"] == "cancelled"


def test_cancelled_while_it_waits(fake: FakePools, client: pools.Client) -> None:
    async def story() -> None:
        async def use() -> None:
            async with client.slot_async("vision", gpus=1, id="r1"):
                pytest.fail("never granted")

        using = asyncio.create_task(use())
        await until(fake, lambda: "r1" in fake.views)
        await cancelled(using)

    play(story)
    assert fake.views["r1"]["state"] == "cancelled"


def test_a_ticket_whose_waiter_is_cancelled_waits_on(fake: FakePools, client: pools.Client) -> None:
    async def story() -> None:
        ticket = await client.submit_async("vision", gpus=1, id="r1")
        waiting = asyncio.create_task(ticket.wait_async())
        await asyncio.sleep(0)
        await cancelled(waiting)
        assert ticket._listeners == set()
        fake.grant("r1")
        assert (await ticket.wait_async(30)).id == "r1"

    play(story)


def test_cancelled_inside_the_block(fake: FakePools, client: pools.Client) -> None:
    grants_at_once(fake)

    async def story() -> None:
        inside = asyncio.Event()

        async def use() -> None:
            async with client.slot_async("vision", gpus=1, id="r1"):
                inside.set()
                await asyncio.Event().wait()

        using = asyncio.create_task(use())
        await inside.wait()
        await cancelled(using)

    play(story)
    assert fake.views["r1"]["state"] == "released"


def test_cancelled_while_it_gives_back(fake: FakePools, client: pools.Client) -> None:
    """What was begun is carried out; its loop may be gone by then."""
    grants_at_once(fake)
    fake.hold_ends = True

    async def story() -> None:
        async def use() -> None:
            async with client.slot_async("vision", gpus=1, id="r1"):
                pass

        using = asyncio.create_task(use())
        await until(fake, lambda: len(fake.ops("release")) == 1)
        using.cancel()
        await until(fake, lambda: len(fake.ops("cancel")) == 1)  # the block's own clean-up waits as well
        await cancelled(using)

    play(story)
    fake.finish("r1", "released")
    fake.until(lambda: client._live() == [])


# --- loops and threads


def test_thousands_wait_on_one_loop_and_in_no_thread(fake: FakePools, client: pools.Client) -> None:
    async def story() -> None:
        tickets = await client.submit_many_async(
            {"requester": "vision", "gpus": 1, "id": f"r{n}"} for n in range(WAITERS)
        )
        before = threading.active_count()
        waiting = [asyncio.create_task(ticket.wait_async(60)) for ticket in tickets]
        await asyncio.sleep(0)
        for n in range(WAITERS):
            fake.grant(f"r{n}")
        slots = await asyncio.gather(*waiting)
        assert [slot.id for slot in slots] == [f"r{n}" for n in range(WAITERS)]
        assert threading.active_count() <= before

    play(story)


def test_several_loops_wait_for_tickets_of_one_client(
    fake: FakePools, client: pools.Client, aside: Any
) -> None:
    shared = client.submit("vision", gpus=1, id="shared")

    def loop(name: str) -> list[str]:
        async def story() -> list[str]:
            own = await client.submit_async("vision", gpus=1, id=name)
            return [each.id for each in await asyncio.gather(own.wait_async(30), shared.wait_async(30))]

        return asyncio.run(story())

    loops = [aside(loop, name) for name in ("r1", "r2", "r3")]
    fake.until(lambda: len(fake.views) == 4)
    for id in fake.views:
        fake.grant(id)
    assert [each.result(30) for each in loops] == [["r1", "shared"], ["r2", "shared"], ["r3", "shared"]]


def test_a_loop_that_is_gone_is_no_harm_to_the_others(fake: FakePools, client: pools.Client) -> None:
    ticket = client.submit("vision", gpus=1, id="r1")
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(ticket.wait_async())
    loop.run_until_complete(asyncio.sleep(0))
    loop.set_exception_handler(lambda *_: None)  # that a task was left behind is what is meant here
    loop.close()
    fake.grant("r1")
    assert ticket.wait(30).id == "r1"
    del waiting


def test_closing_the_client_wakes_all_who_wait(fake: FakePools, client: pools.Client) -> None:
    async def story() -> None:
        ticket = await client.submit_async("vision", gpus=1, id="r1")
        waiting = asyncio.create_task(ticket.wait_async())
        fake.hold_ends = True
        ending = asyncio.create_task(ticket.cancel_async())
        await until(fake, lambda: len(fake.ops("cancel")) == 1)
        client.close()
        for task in (waiting, ending):
            with pytest.raises(pools.PoolsError, match="closed"):
                await task
        with pytest.raises(pools.PoolsError, match="closed"):
            await client.submit_async("vision", gpus=1)

    play(story)
