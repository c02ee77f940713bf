"""A client and its leases, without Ray: renewed in time, tried again at once, and never worked on in doubt.

Faults it stands for: a process that was stopped for longer than its lease works on in a slot that is another's; a
renewal that failed is left until the next one is due; a request that was forgotten while its client was away is waited
for for ever; the operator's default is not what clients ask for (docs/rules.md section 8).
"""

# ruff: noqa: PT012 - a with-block of a slot is what is tested, and it is more than one statement
from __future__ import annotations

from typing import Any

import pytest
from fake_pools import FakePools

import ray_pools as pools
from ray_pools.errors import Refused, Unreachable


def held(fake: FakePools, client: pools.Client, id: str, lease_s: float = 100.0) -> pools.Slot:
    ticket = client.submit("vision", gpus=1, id=id, lease_s=lease_s)
    fake.grant(id, placement={"pg": "ab" * 18})
    return ticket.wait(30)


def stop_for(slot: pools.Slot, seconds: float) -> None:
    """To the process it is as if it had been stopped: nobody renewed for so long, and it heard nothing."""
    slot._ticket._renewed_at -= seconds


def unheard(fake: FakePools, id: str, **fields: Any) -> None:
    """The request changes, and its client is not told."""
    with fake.changed:
        fake.seq += 1
        fake.views[id].update(fields, changed_seq=fake.seq)


def test_a_holder_that_was_stopped_learns_at_its_first_check_that_the_slot_is_gone(
    fake: FakePools, client: pools.Client
) -> None:
    slot = held(fake, client, "r1")
    unheard(fake, "r1", state="expired", ready=False)
    slot.check()  # renewed a moment ago: no call is made for this
    assert fake.ops("renew") == []
    stop_for(slot, 100.0)
    with pytest.raises(pools.LeaseExpired):
        slot.check()
    assert slot.preempting.is_set()
    with pytest.raises(pools.SlotOver, match="lease"):
        _ = slot.scheduling_strategy


def test_a_holder_that_was_stopped_is_handed_no_place_to_work_in(
    fake: FakePools, client: pools.Client
) -> None:
    slot = held(fake, client, "r1")
    unheard(fake, "r1", state="expired", ready=False)
    stop_for(slot, 100.0)
    with pytest.raises(pools.SlotOver):
        _ = slot.scheduling_strategy


def test_the_block_of_a_holder_that_was_stopped_ends_in_why(fake: FakePools, client: pools.Client) -> None:
    slot = held(fake, client, "r1")
    with pytest.raises(pools.LeaseExpired), slot:
        unheard(fake, "r1", state="expired", ready=False)
        stop_for(slot, 100.0)


def test_a_holder_that_was_stopped_for_less_than_it_seems_keeps_its_slot(
    fake: FakePools, client: pools.Client
) -> None:
    slot = held(fake, client, "r1")
    stop_for(slot, 100.0)
    slot.check()
    slot.check()
    assert len(fake.ops("renew")) == 1, "it is renewed, and not asked for again"


def test_a_coordinator_that_is_away_ends_nothing(fake: FakePools, client: pools.Client) -> None:
    """Fault: an outage longer than the lease stops all work, although every lease has its full term after it."""
    slot = held(fake, client, "r1", lease_s=0.2)
    fake.down = Unreachable("no way")
    stop_for(slot, 100.0)
    slot.check()
    fake.down = None
    stop_for(slot, 100.0)
    slot.check()


def test_a_renewal_that_failed_is_tried_again_at_once(fake: FakePools, client: pools.Client) -> None:
    fake.instead["renew"] = [Unreachable("gone for a moment"), Refused("internal", "a turn failed")]
    slot = held(fake, client, "r1", lease_s=1000.0)  # else once in 250 s
    client._renewer.ensure(0.04)
    fake.until(lambda: len(fake.ops("renew")) >= 3)
    slot.check()


def test_a_lease_that_comes_later_and_is_shorter_is_renewed_in_its_own_time(
    fake: FakePools, client: pools.Client
) -> None:
    held(fake, client, "long", lease_s=10_000.0)
    held(fake, client, "short", lease_s=0.04)
    fake.until(lambda: len(fake.ops("renew")) >= 3)


def test_the_operators_default_is_what_a_request_has_that_names_no_lease(
    fake: FakePools, client: pools.Client
) -> None:
    client.submit("vision", gpus=1)
    client._go_by({"lease": {"default_s": 7, "renew_s": 0.02}})
    client.submit("vision", gpus=1)
    client.submit("vision", gpus=1, lease_s=0)
    assert [op["lease_s"] for op in fake.ops("submit")] == [60.0, 7.0, 0.0]
    fake.until(lambda: len(fake.ops("renew")) >= 3)  # more often than the lease asks for
    client._go_by({})  # of an older coordinator
    client.submit("vision", gpus=1)
    assert fake.ops("submit")[-1]["lease_s"] == 60.0


def test_what_was_forgotten_while_nobody_was_heard_is_not_waited_for(
    fake: FakePools, client: pools.Client, aside: Any
) -> None:
    """Without a lease no renewal would tell either."""
    waiting = [aside(client.submit("vision", gpus=1, id=id, lease_s=0).wait) for id in ("r1", "r2")]
    fake.until(lambda: len(fake._waits) == 1)
    with fake.changed:
        fake.down = Unreachable("it restarts")
    fake.break_waits()
    with fake.changed:
        del fake.views["r1"]
        fake.down = None
    with pytest.raises(pools.SlotLost):
        waiting[0].result(30)
    fake.grant("r2")
    assert waiting[1].result(30).id == "r2"
    assert len(fake.ops("get")) == 1, "one look, then it listens again"
