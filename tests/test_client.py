"""The client without Ray: a slot is waited for by push, held, given back whatever the block does, and what breaks on
the way (a coordinator that restarts, answers that are lost or late) costs nobody more than a delay."""

# ruff: noqa: PT012 - a with-block of a slot is what is tested, and it is more than one statement
from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from fake_pools import FakePools

import ray_pools as pools
from ray_pools import wire
from ray_pools.client.transport import RayTransport, TryAgain

# --- waiting


def test_a_slot_is_there_when_granted_and_its_group_ready(
    fake: FakePools, client: pools.Client, aside: Any
) -> None:
    ticket = client.submit("vision", gpus=2, id="r1")
    waiting = aside(ticket.wait, 30)
    fake.grant("r1", ready=False)
    fake.until(lambda: fake.waits_seen >= 2)  # told, and listening again
    assert not waiting.done()
    fake.grant("r1", placement={"pg": "ab" * 18, "bundles": [{"CPU": 1.0, "GPU": 2.0}]})
    slot = waiting.result(30)
    assert (slot.id, slot.pool, slot.k, slot.resources) == ("r1", "a", 1, {"gpu": 2, "step_run": 1})
    assert slot.bundles == [{"CPU": 1.0, "GPU": 2.0}]
    assert (ticket.state, ticket.pool, ticket.k) == ("allocated", "a", 1)
    assert ticket.wait() is slot


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ("rejected", pools.SlotRejected),
        ("cancelled", pools.SlotCancelled),
        ("expired", pools.LeaseExpired),
        ("preempted", pools.SlotPreempted),
        ("released", pools.SlotOver),
    ],
)
def test_a_request_that_ends_raises_why(
    fake: FakePools, client: pools.Client, aside: Any, state: str, error: type[Exception]
) -> None:
    ticket = client.submit("vision", gpus=1, id="r1")
    waiting = aside(ticket.wait)
    fake.finish("r1", state, causes={"a": "no_policy"} if state == "rejected" else {})
    with pytest.raises(error, match="r1") as caught:
        waiting.result(30)
    if isinstance(caught.value, pools.SlotRejected):
        assert caught.value.causes == {"a": "no_policy"}
        assert ticket.explain() == {"a": {"cause": "no_policy"}}
    assert ticket.done


def test_a_waiter_whose_lease_ran_out_is_told_so(fake: FakePools, client: pools.Client) -> None:
    ticket = client.submit("vision", gpus=1, id="r1")
    fake.finish("r1", "cancelled", asked="expire")
    with pytest.raises(pools.LeaseExpired):
        ticket.wait(30)


def test_the_callers_time_runs_out_and_the_request_goes_on(fake: FakePools, client: pools.Client) -> None:
    ticket = client.submit("vision", gpus=1, id="r1")
    with pytest.raises(pools.WaitTimeout, match="queued after 0 s"):
        ticket.wait(0)
    assert fake.views["r1"]["state"] == "queued"


def test_wait_for_a_state_and_for_one_that_cannot_come(
    fake: FakePools, client: pools.Client, aside: Any
) -> None:
    ticket = client.submit("vision", gpus=1, id="r1")
    waiting = aside(ticket.wait_for, ["allocated", "rejected"], 30)
    fake.grant("r1", ready=False)
    assert waiting.result(30)["state"] == "allocated"
    waiting = aside(ticket.wait_for, "preempting", 30)
    fake.finish("r1", "expired")
    with pytest.raises(pools.LeaseExpired):
        waiting.result(30)
    with pytest.raises(pools.BadInput, match="running"):
        ticket.wait_for("running")


def test_an_answer_that_comes_late_does_not_undo_a_newer_one(fake: FakePools, client: pools.Client) -> None:
    ticket = client.submit("vision", gpus=1, id="r1")
    old = dict(ticket.view)
    fake.grant("r1")
    ticket.wait(30)
    fake.instead["get"] = [lambda op: [old]]
    assert ticket.status()["state"] == "allocated"


def test_each_attempt_has_its_own_slot(fake: FakePools, client: pools.Client, aside: Any) -> None:
    """The stream may skip states: an attempt with a higher number tells that the one before is gone."""
    ticket = client.submit("vision", gpus=1, id="r1", retries=1)
    fake.grant("r1")
    first = ticket.wait(30)
    with fake.changed:  # preempted, stopped by force, queued and granted again before anyone asks
        fake.views["r1"].update(k=2)
        fake.grant("r1", pool="b")
    assert first.preempting.wait(30)
    second = ticket.wait(30)
    assert (first.k, second.k, second.pool) == (1, 2, "b")
    assert first.over
    assert not second.over
    with pytest.raises(pools.SlotPreempted):
        first.check()
    first.release()  # harmless: the second attempt is another's
    first.stopped()
    assert fake.views["r1"]["state"] == "allocated"


# --- the with-block


def test_the_block_gives_its_slot_back(fake: FakePools, client: pools.Client, aside: Any) -> None:
    fake.instead["submit"] = [
        lambda op: (fake._op_submit(op), fake.grant(op["id"]), fake.views[op["id"]])[-1]
    ]
    with client.slot("vision", gpus=1, id="r1") as slot:
        assert slot.scheduling_strategy == "DEFAULT"  # this pool only counts
        assert slot.placement_group is None
    assert fake.views["r1"]["state"] == "released"
    with pytest.raises(pools.SlotOver):
        _ = slot.scheduling_strategy
    with pytest.raises(pools.SlotOver):
        slot.check()
    slot.release()
    assert len(fake.ops("release")) == 1


def granted_slot(fake: FakePools, client: pools.Client, **arguments: Any) -> Any:
    fake.instead["submit"] = [
        lambda op: (fake._op_submit(op), fake.grant(op["id"]), fake.views[op["id"]])[-1]
    ]
    return client.slot("vision", gpus=1, id="r1", **arguments)


@pytest.mark.parametrize("problem", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_a_block_that_raises_gives_its_slot_back(
    fake: FakePools, client: pools.Client, problem: BaseException
) -> None:
    with pytest.raises(type(problem)), granted_slot(fake, client):
        raise problem
    assert fake.views["r1"]["state"] == "released"


def test_a_wait_that_is_interrupted_cancels_the_request(
    fake: FakePools, client: pools.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ray_pools.client.ticket.Ticket.wait", interrupted)
    with pytest.raises(KeyboardInterrupt), client.slot("vision", gpus=1, id="r1"):
        pytest.fail("never granted")
    assert fake.views["r1"]["state"] == "cancelled"


def test_a_wait_that_takes_too_long_cancels_the_request(fake: FakePools, client: pools.Client) -> None:
    with pytest.raises(pools.WaitTimeout), client.slot("vision", gpus=1, id="r1", timeout_s=0):
        pytest.fail("never granted")
    assert fake.views["r1"]["state"] == "cancelled"


# --- preemption


def test_the_holder_is_told_and_leaves_in_its_grace(fake: FakePools, client: pools.Client) -> None:
    called = threading.Event()
    with pytest.raises(pools.SlotPreempted), granted_slot(fake, client) as slot:
        assert slot.grace_left_s() is None
        slot.check()
        slot.on_preempt(lambda each: called.set() if each is slot else None)
        fake.preempt("r1", grace_s=3600)
        assert slot.preempting.wait(30)
        assert called.wait(30)
        left_s = slot.grace_left_s()
        assert left_s is not None
        assert 0 < left_s <= 3600
        assert slot.scheduling_strategy == "DEFAULT"  # in its grace it may still start what saves its work
        late = threading.Event()
        slot.on_preempt(lambda _: late.set())
        assert late.wait(30)
        slot.check()
    assert [op["id"] for op in fake.ops("stopped")] == ["r1"]
    assert fake.views["r1"]["state"] == "preempted"
    with pytest.raises(pools.SlotOver):
        _ = slot.scheduling_strategy


def test_a_block_that_does_not_look_ends_in_slot_preempted(fake: FakePools, client: pools.Client) -> None:
    with pytest.raises(pools.SlotPreempted), granted_slot(fake, client) as slot:
        fake.preempt("r1")
        slot.preempting.wait(30)
    assert len(fake.ops("stopped")) == 1


@pytest.mark.parametrize(("last_word", "error"), [("stopped", pools.SlotPreempted), ("release", None)])
def test_the_last_word_of_a_preempted_holder(
    fake: FakePools, client: pools.Client, last_word: str, error: type[Exception] | None
) -> None:
    """Who stopped early hears at the end of the block that it was preempted; who was done by then was not."""
    with pytest.raises(error) if error else nullcontext(), granted_slot(fake, client) as slot:
        fake.preempt("r1")
        slot.preempting.wait(30)
        getattr(slot, last_word)()
    assert fake.views["r1"]["state"] == ("preempted" if error else "released")


def test_a_grant_that_is_called_back_before_anybody_saw_it_stops_at_once(
    fake: FakePools, client: pools.Client
) -> None:
    """Else nobody would say so, and the waiter it was stopped for would wait for the whole grace."""
    ticket = client.submit(requester="ml", gpus=1, id="r1")
    fake.preempt("r1")
    with pytest.raises(pools.SlotPreempted):
        ticket.wait(30)
    assert len(fake.ops("stopped")) == 1


def test_a_block_that_raises_by_itself_while_preempted_says_its_own(
    fake: FakePools, client: pools.Client
) -> None:
    with pytest.raises(ZeroDivisionError), granted_slot(fake, client) as slot:
        fake.preempt("r1")
        slot.preempting.wait(30)
        _ = 1 / 0
    assert fake.views["r1"]["state"] == "preempted"


def test_a_block_with_retries_left_does_not_leave_a_waiter_behind(
    fake: FakePools, client: pools.Client
) -> None:
    with pytest.raises(pools.SlotPreempted), granted_slot(fake, client, retries=3) as slot:
        fake.preempt("r1")
        slot.preempting.wait(30)
    assert fake.views["r1"]["state"] == "cancelled"


@pytest.mark.parametrize(
    ("state", "error"), [("cancelled", pools.SlotCancelled), ("expired", pools.LeaseExpired)]
)
def test_a_slot_lost_in_another_way_is_told_too(
    fake: FakePools, client: pools.Client, state: str, error: type[Exception]
) -> None:
    with pytest.raises(error), granted_slot(fake, client) as slot:
        fake.finish("r1", state)
        assert slot.preempting.wait(30)
        assert slot.grace_left_s() == 0
        with pytest.raises(pools.SlotOver):
            _ = slot.placement_group
    assert fake.ops("release") == []


def test_the_release_may_bring_the_first_word_of_an_expiry(fake: FakePools, client: pools.Client) -> None:
    def expired(op: dict[str, Any]) -> dict[str, Any]:
        fake.views["r1"].update(state="expired", changed_seq=10**6)
        return fake.views["r1"]

    fake.instead["release"] = [expired]
    with pytest.raises(pools.LeaseExpired), granted_slot(fake, client):
        pass


def test_a_callback_that_fails_does_not_stop_the_others(fake: FakePools, client: pools.Client) -> None:
    called = threading.Event()
    with pytest.raises(pools.SlotPreempted), granted_slot(fake, client) as slot:
        slot.on_preempt(lambda _: 1 / 0)
        slot.on_preempt(lambda _: called.set())
        fake.preempt("r1")
        assert called.wait(30)


# --- what breaks


def test_a_command_whose_answer_is_lost_is_sent_again(fake: FakePools, client: pools.Client) -> None:
    def done_and_lost(op: dict[str, Any]) -> None:
        fake._op_submit(op)
        raise TryAgain("ActorUnavailableError")

    fake.instead["submit"] = [done_and_lost, TryAgain("again")]
    ticket = client.submit("vision", gpus=1, id="r1")
    assert ticket.state == "queued"
    assert len({(op["id"], op["token"]) for op in fake.ops("submit")}) == 1
    assert len(fake.ops("submit")) == 3


def test_waiters_outlast_a_restart_of_the_coordinator(
    fake: FakePools, client: pools.Client, aside: Any
) -> None:
    ticket = client.submit("vision", gpus=1, id="r1")
    waiting = aside(ticket.wait, 30)
    fake.until(lambda: len(fake._waits) == 1)
    seen = fake.waits_seen
    fake.down = TryAgain("it restarts")
    fake.break_waits()
    fake.until(lambda: fake.waits_seen >= seen + 3)
    fake.grant("r1")  # while nobody listens
    fake.down = None
    assert waiting.result(30).id == "r1"


def test_a_coordinator_that_stays_away_is_told_to_who_waits(fake: FakePools, aside: Any) -> None:
    with fake.client(give_up_s=0.2) as client:
        ticket = client.submit("vision", gpus=1, id="r1")
        waiting = aside(ticket.wait)
        fake.down = TryAgain("it is gone")
        fake.break_waits()
        with pytest.raises(pools.Unreachable, match=r"the coordinator of namespace 'fake' .*it is gone"):
            waiting.result(30)
        with pytest.raises(pools.Unreachable, match="did not answer"):
            ticket.status()
        fake.down = None  # and it is taken back when it answers again
        fake.grant("r1")
        fake.until(lambda: not fake._waits)
        assert ticket.status()["state"] == "allocated"


def test_no_pools_there_is_said_at_once(fake: FakePools, client: pools.Client) -> None:
    fake.down = pools.Unreachable("no pools run in namespace 'fake'")
    with pytest.raises(pools.Unreachable, match="no pools run"):
        client.submit("vision", gpus=1)


def test_a_request_that_the_coordinator_forgot_is_lost(
    fake: FakePools, client: pools.Client, aside: Any
) -> None:
    with pytest.raises(pools.SlotLost), granted_slot(fake, client, lease_s=0.2) as slot:
        with fake.changed:
            del fake.views["r1"]
        assert slot.preempting.wait(30)
        slot.check()


def test_closing_wakes_all_who_wait(fake: FakePools, client: pools.Client, aside: Any) -> None:
    waiting = aside(client.submit("vision", gpus=1).wait)
    fake.until(lambda: fake.waits_seen >= 1)
    client.close()
    with pytest.raises(pools.PoolsError, match="closed"):
        waiting.result(30)
    with pytest.raises(pools.PoolsError, match="closed"):
        client.submit("vision", gpus=1)


# --- leases


def test_one_call_renews_all_leases_of_the_process(fake: FakePools, client: pools.Client) -> None:
    tickets = client.submit_many({"requester": "vision", "gpus": 1, "lease_s": 0.4} for _ in range(3))
    kept = client.submit("vision", gpus=1, lease_s=0)
    fake.until(lambda: len(fake.ops("renew")) >= 2)
    items = fake.ops("renew")[-1]["items"]
    assert sorted(id for id, _ in items) == sorted(ticket.id for ticket in tickets)
    assert all(fake.tokens[id] == token for id, token in items)
    tickets[0].cancel()
    seen = len(fake.ops("renew"))
    fake.until(lambda: len(fake.ops("renew")) >= seen + 2)
    assert tickets[0].id not in [id for id, _ in fake.ops("renew")[-1]["items"]]
    assert kept.state == "queued"


def test_a_renewal_that_fails_is_tried_again(fake: FakePools, client: pools.Client) -> None:
    fake.instead["renew"] = [pools.Refused("wrong_token", "no"), TryAgain("gone")]
    client.submit("vision", gpus=1, lease_s=0.2)
    fake.until(lambda: len(fake.ops("renew")) >= 5)


def test_an_end_that_the_renewal_tells_of_is_heard(fake: FakePools, client: pools.Client) -> None:
    ticket = client.submit("vision", gpus=1, id="r1", lease_s=0.2)
    with fake.changed:  # the stream says nothing of it
        fake.views["r1"].update(state="expired")
    ticket.wait_for("expired", 30)


# --- many, and other commands


def test_many_are_sent_in_few_calls_and_keep_their_order(fake: FakePools, client: pools.Client) -> None:
    given = [{"requester": "vision", "gpus": 1, "id": f"r{n}", "lease_s": 0} for n in range(1500)]
    tickets = client.submit_many(given)
    assert [ticket.id for ticket in tickets] == [each["id"] for each in given]
    assert client.submit_many([]) == []


def test_of_many_all_or_none_are_wanted(fake: FakePools, client: pools.Client) -> None:
    fake.instead["submit"] = [fake._op_submit, pools.Refused("id_in_use", "taken")]
    with pytest.raises(pools.Refused, match="taken"):
        client.submit_many([pools.Submission("vision", gpus=1, id=f"r{n}") for n in range(3)])
    assert {view["state"] for view in fake.views.values()} == {"cancelled"}
    with pytest.raises(pools.BadInput, match=r"submissions\[1\].gpus"):
        client.submit_many([{"requester": "vision", "gpus": 1}, {"requester": "vision", "gpus": -1}])
    assert len(fake.ops("submit")) == 3


def test_the_same_submission_again_is_the_same_request(fake: FakePools, client: pools.Client) -> None:
    once = pools.Submission("vision", gpus=1, id="r1")
    (ticket,) = client.submit_many([once])
    assert client.submit_many([once, once]) == [ticket, ticket]
    with fake.client() as other, pytest.raises(pools.Refused, match="token"):
        other.submit("vision", gpus=1, id="r1")
    with fake.client() as other:
        assert other.submit_many([once])[0].id == "r1"


def test_the_end_is_answered_when_nothing_is_held_any_more(
    fake: FakePools, client: pools.Client, aside: Any
) -> None:
    ticket = client.submit("vision", gpus=1, id="r1")
    fake.grant("r1")
    ticket.wait(30)
    fake.hold_ends = True
    ending = aside(ticket.release)
    fake.until(lambda: len(fake.ops("release")) == 1)
    assert not ending.done()
    fake.finish("r1", "released")
    assert ending.result(30)["state"] == "released"
    assert ticket.cancel()["state"] == "released"  # final: nothing changes it, and nothing is sent
    assert fake.ops("cancel") == []


def test_an_operator_acts_by_name(fake: FakePools, client: pools.Client) -> None:
    ticket = client.submit("vision", gpus=1, id="r1")
    with fake.client() as other:
        assert other.cancel("r1", operator="ann")["state"] == "cancelled"
        assert fake.ops("cancel")[-1]["operator"] == "ann"
        with pytest.raises(pools.Refused, match="no request"):
            other.release("r9")
    ticket.wait_for("cancelled", 30)


def test_what_is_can_be_asked(fake: FakePools, client: pools.Client) -> None:
    ticket = client.submit("vision", gpus=1, id="r1")
    assert client.get("r1") == ticket.view
    assert client.get("r9") is None
    with pytest.raises(pools.Refused, match="no request 'r9'"):
        client.explain("r9")
    assert [view["id"] for view in client.list(requester="vision", states=["queued"])] == ["r1"]
    assert client.status()["coordinator"]["pools"] == ["a", "b"]
    assert ticket.explain() == {"a": {"cause": "waiting_capacity"}, "b": {"cause": "waiting_capacity"}}
    assert client.change([["unpool", "a"]]) == 2


def test_a_pool_that_is_away_does_not_hide_the_others(fake: FakePools, client: pools.Client) -> None:
    ticket = client.submit("vision", gpus=1, id="r1")
    fake.instead["explain"] = [TryAgain("it restarts")]
    assert ticket.explain() == {"a": {"unreachable": "it restarts"}, "b": {"cause": "waiting_capacity"}}


# --- where it may be used


@pytest.mark.parametrize("make", [lambda c: c, lambda c: c.submit("vision", gpus=1)])
def test_it_is_not_sent_to_another_process(client: pools.Client, make: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="stays in its process"):
        pickle.dumps(make(client))


def test_a_fork_has_to_connect_by_itself(client: pools.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(pools.PoolsError, match="fork"):
        client.submit("vision", gpus=1)


def test_importing_it_does_not_import_ray() -> None:
    code = "import sys, ray_pools as pools; pools.Client, pools.connect; assert 'ray' not in sys.modules; dir(pools)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_actor_that_is_being_replaced_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: an upgrade between two calls of a client reaches its program as an error."""
    import ray

    def nobody(name: str, namespace: str) -> None:
        raise ValueError(name)

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_actor", nobody)
    transport = RayTransport("here")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: ""))
    transport._missing[wire.coordinator_actor_name()] = None
    with pytest.raises(TryAgain, match="the coordinator is not there"):
        transport.start(wire.coordinator_actor_name(), "call", b"")
    with pytest.raises(pools.Unreachable):
        transport.start(wire.pool_actor_name("never"), "call", b"")
