"""Requests of other processes, without Ray: a task follows the request in whose slot it runs. It is told by push, and
nothing is done for it that only its holder may do."""

from __future__ import annotations

from typing import Any

import pytest
from fake_pools import FakePools

import ray_pools as pools
from ray_pools import wire


def test_a_request_of_another_process_is_followed_by_push(
    fake: FakePools, client: pools.Client, aside: Any
) -> None:
    """Also by a process whose own poll is under way; and nothing that its holder alone may do is done for it."""
    client.submit("vision", gpus=1, id="r1")
    with fake.client() as other:
        other.submit("vision", gpus=1, id="own")
        fake.until(lambda: any(wait.client == other.client_id for wait, _ in fake._waits))
        ticket = other.follow("r1")
        assert other.follow("r1") is ticket
        waiting = aside(ticket.wait, 30)
        fake.grant("r1")
        slot = waiting.result(30)
        assert (slot.id, slot.pool) == ("r1", "a")
        fake.preempt("r1", grace_s=3600)
        assert slot.preempting.wait(30)
        with pytest.raises(pools.SlotPreempted):
            slot.check()
        with pytest.raises(pools.Refused, match="token"):
            ticket.release()
        assert fake.ops("stopped") == []


def test_the_slot_that_holds_now_can_be_had_while_it_is_called_back(
    fake: FakePools, client: pools.Client
) -> None:
    client.submit("vision", gpus=1, id="r1", retries=1)
    with fake.client() as other:
        with pytest.raises(pools.SlotOver, match="queued"):
            other.follow("r1").held()
        fake.grant("r1")
        fake.preempt("r1")
        slot = other.follow("r1").held(k=1)
        assert slot.preempting.is_set()
        with pytest.raises(pools.SlotOver):
            other.follow("r1").held(k=2)
        fake.requeue("r1")
        fake.until(lambda: slot.over)
        with pytest.raises(pools.Refused, match="not know"):
            other.follow("r9")


def test_a_coordinator_that_tells_only_of_ones_own_is_asked(
    fake: FakePools, client: pools.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an older version leaves `ids` unread: its empty answers are when the others are looked after."""
    client.submit("vision", gpus=1, id="r1")
    monkeypatch.setattr(fake, "_tell", lambda: None)
    with fake.client() as other:
        ticket = other.follow("r1")
        fake.grant("r1")
        fake.until(lambda: bool(fake._waits))
        for _, answer in fake._waits:
            answer.set_result(wire.encode_changes(fake.seq, []))
        ticket.wait(30)


def test_a_token_that_comes_later_counts_and_one_that_can_not_be_is_named(
    fake: FakePools, client: pools.Client
) -> None:
    token = b"known to both of them"
    client.submit("vision", gpus=1, id="r1", token=token)
    with fake.client() as other:
        other.follow("r1")
        for wrong in ("known to both of them", b"short"):
            with pytest.raises(pools.BadInput, match="token"):
                other.follow("r1", token=wrong)  # type: ignore[arg-type]
        assert other.follow("r1", token=token).release()["state"] == "cancelled"
