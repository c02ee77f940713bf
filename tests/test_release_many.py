"""Many slots given back in one call: as one by one (docs/rules.md section 8); one that is refused keeps no other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_pools import FakePools
from shell_pools import shell_pools

import ray_pools as pools

ASKED = {"requester": "vision", "gpus": 1}


def releases(fake: FakePools) -> list[str]:
    return [op["id"] for op in fake.ops("release")]


@pytest.fixture(params=["sync", "async"])
def give_back(request: pytest.FixtureRequest, client: pools.Client) -> object:
    if request.param == "sync":
        return client.release_many
    return lambda tickets: asyncio.run(client.release_many_async(tickets))


def test_what_is_held_is_released_and_what_waits_cancelled(
    fake: FakePools, client: pools.Client, give_back: object
) -> None:
    assert callable(give_back)
    held, waiting, over, again = client.submit_many([ASKED] * 4)
    for ticket in (held, over, again):
        fake.grant(ticket.id)
    slot = held.wait(30)
    over.wait(30).release()
    fake.calls.clear()
    views = give_back([held, waiting, over, again, again])
    assert [view["state"] for view in views] == ["released", "cancelled", "released", "released", "released"]
    assert releases(fake) == [held.id, waiting.id, again.id]  # not one that is over, and none twice
    assert slot.over
    assert not slot.preempting.is_set()  # its holder gave it back: nobody took it
    assert give_back([]) == []


def test_one_that_is_refused_keeps_no_other(fake: FakePools, client: pools.Client, give_back: object) -> None:
    assert callable(give_back)
    first, second, third = client.submit_many([ASKED] * 3)
    fake.tokens[first.id] = b"of another client"
    with pytest.raises(pools.Refused, match="token"):
        give_back([first, second, third])
    assert (first.done, second.done, third.done) == (False, True, True)


def test_it_returns_when_nothing_is_held_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of actors: all ends of a call are in one turn of the pool, and the next in the queue have the capacity."""
    config = """
pools:
  a: {capacity: {gpu: 150}, placement: none}
policies:
  - {requester: vision, pool: a}
"""
    monkeypatch.setattr("ray_pools.client.connection.SUBMIT_BATCH", 50)
    with shell_pools(tmp_path, config) as live, live.client() as client:
        tickets = client.submit_many([ASKED] * 250)
        for ticket in tickets[:150]:
            ticket.wait(30)
        views = client.release_many(tickets[:120])
        assert {view["state"] for view in views} == {"released"}
        for ticket in tickets[150:]:
            ticket.wait(30)
        assert live.ask("a", op="status")["held"]["gpu"] == 130
        with pytest.raises(pools.PoolsError, match="closed"):
            client.close(), client.release_many(tickets)
