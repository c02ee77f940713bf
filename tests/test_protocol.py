"""The protocol (docs/protocol.md) on cores that run as live actors do: turns, messages, crashes, full disks.

Faults it stands for: terms that began before a restart, turns that fail half-way, bids that nobody asks for again,
pools that are silent, placement groups that don't come up or are lost, answers that cross each other on the way.
`test_protocol_random.py` plays random ones of all of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from live_style import COORDINATOR, LiveStyle

from ray_pools.core import records as ev
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.link import StalePeer
from ray_pools.errors import Refused
from ray_pools.store import AppendFailed, Fenced

PLACEMENT = {"strategy": "PACK", "provision_timeout_s": 60.0}

MakeWorld = Callable[..., LiveStyle]


@pytest.fixture
def make() -> Iterator[MakeWorld]:
    """Makes worlds, and looks at what their auditors found."""
    worlds: list[LiveStyle] = []

    def made(pools: list[PoolConfig], policies: list[PolicyConfig]) -> LiveStyle:
        worlds.append(LiveStyle({pool.name: pool for pool in pools}, policies))
        return worlds[-1]

    yield made
    for world in worlds:
        assert world.auditor.problems == []
        world.close()


def pool(name: str, gpu: int = 2, **options: Any) -> PoolConfig:
    return PoolConfig(name, {"gpu": gpu}, **options)


def two_full_pools(make: MakeWorld) -> LiveStyle:
    """p and q are full of b's work; y and z of b wait in both, and both pools have answered no."""
    policies = [PolicyConfig(name, who) for name in ("p", "q") for who in ("a", "b")]
    world = make([pool("p"), pool("q")], policies)
    for id, gpu in (("on-p", 2), ("on-q", 2), ("y", 1), ("z", 1)):
        world.submit(id, "b", gpu)
        world.run()
    assert world.states() == {"on-p": "allocated@p", "on-q": "allocated@q", "y": "queued", "z": "queued"}
    return world


# ---------------------------------------------------------------- full terms after a restart


def test_a_lease_has_its_full_term_from_the_restart_on_also_after_a_quiet_hour(make: MakeWorld) -> None:
    """Fault: renewals are in no log, so the term began at the last event, and a holder that renewed expired at once."""
    world = make([pool("p")], [PolicyConfig("p", "a")])
    world.submit("x", "a", 1, lease_s=30.0)
    world.run()
    while world.now < 3600.0:
        world.advance(world.now + 10.0)
        world.about("renew", "x")
    world.advance(3625.0)
    world.restart(COORDINATOR)
    world.advance(3625.0 + 29.0)
    assert world.states() == {"x": "allocated@p"}
    world.advance(3625.0 + 30.0)
    assert world.states() == {"x": "expired"}


def test_a_victim_has_its_full_grace_from_the_restart_on(make: MakeWorld) -> None:
    """Fault: as above, for the deadlines of a pool; and leases of waiters."""
    world = make([pool("p", grace_s=30.0)], [PolicyConfig("p", "low"), PolicyConfig("p", "high", 1)])
    world.submit("l", "low", 2)
    world.run()
    world.submit("h", "high", 2, lease_s=50.0)
    world.run()
    world.advance(29.0)
    world.restart("p")
    world.restart(COORDINATOR)
    world.advance(58.0)
    assert world.states() == {"l": "preempting@p", "h": "queued"}
    world.advance(59.0)
    assert world.states() == {"l": "preempted", "h": "allocated@p"}


# ---------------------------------------------------------------- turns that fail


def test_a_submission_that_could_not_be_written_is_not_there_and_can_be_made_again(make: MakeWorld) -> None:
    """Fault: the caller gets the error, and the request is there all the same, or its id is spent."""
    world = make([pool("p")], [PolicyConfig("p", "a")])
    digest = world.coordinator.state.digest()
    world.fail_next_append(COORDINATOR)
    with pytest.raises(AppendFailed):
        world.submit("x", "a", 1)
    assert world.coordinator.state.digest() == digest
    world.run()
    assert world.states() == {}
    assert world.pool("p").state.attempts == {}
    world.submit("x", "a", 2)
    world.run()
    assert world.states() == {"x": "allocated@p"}


def test_a_decision_that_could_not_be_written_is_made_again(make: MakeWorld) -> None:
    """Fault: the bids of the turn that failed count as heard, and the pools never make them again."""
    world = make([pool("p"), pool("q")], [PolicyConfig("p", "a"), PolicyConfig("q", "a")])
    world.fails_in[COORDINATOR] = 1
    world.submit("x", "a", 1)
    world.run()
    assert world.failed_turns == 1
    assert world.states() == {"x": "allocated@p"}


@pytest.mark.parametrize("who", ["p", "q", COORDINATOR])
def test_after_a_failed_turn_bids_are_made_again(make: MakeWorld, who: str) -> None:
    """Fault: the core that was rebuilt numbers its bids from the start, below what the coordinator has seen (R2)."""
    world = two_full_pools(make)
    world.fails_in[who] = 0
    world.try_to(lambda: world.submit("other", "a", 1))
    world.run()
    assert world.failed_turns == 1
    world.run()
    for id in ("on-q", "on-p"):
        world.about("release", id)
        world.run()
    shown = world.states()
    assert {shown["y"], shown["z"]} <= {"allocated@p", "allocated@q"}


# ---------------------------------------------------------------- restarts and bids


@pytest.mark.parametrize("first", [COORDINATOR, "p", "q"])
def test_bids_that_stand_are_made_again_to_a_new_coordinator_whoever_speaks_first(
    make: MakeWorld, first: str
) -> None:
    """R3. Fault: neither side has news after the restart, so nobody says anything, and who waits, waits for ever."""
    world = two_full_pools(make)
    world.submit("no", "nobody", 1)  # rejected: an event by which all acknowledgements become durable
    world.restart(COORDINATOR)
    for name in ("p", "q"):
        if first == COORDINATOR:
            assert world.has_news(COORDINATOR, name), "who starts anew asks all pools"
        elif first == name:
            world.exchange(name, COORDINATOR)
    world.run()
    requests = world.coordinator.state.requests
    assert {id: sorted(requests[id].answers) for id in "yz"} == {"y": ["p", "q"], "z": ["p", "q"]}
    world.about("release", "on-q")
    world.run()
    shown = world.states()
    assert (shown["on-q"], shown["y"], shown["z"]) == ("released", "allocated@q", "allocated@q")


def test_room_that_is_promised_outlives_a_restart_of_the_coordinator(make: MakeWorld) -> None:
    """R3, R5. Fault: the promise stays booked at the pool, and nobody remembers to take it."""
    world = make([pool("p"), pool("q")], [PolicyConfig("p", "a", 1), PolicyConfig("q", "a")])
    world.submit("x", "a", 1)
    world.exchange(COORDINATOR, "q")  # q has room; p is better and has not spoken
    assert list(world.pool("q").promised) == ["x"]
    world.restart(COORDINATOR)
    world.run()
    assert world.states() == {"x": "allocated@p"}
    assert world.pool("q").promised == {}


def test_a_zombie_can_neither_write_nor_be_heard(make: MakeWorld) -> None:
    """Fault: two coordinators at once, and what the old one decides counts."""
    world = two_full_pools(make)
    zombie = world.restart(COORDINATOR)
    assert zombie is not None
    world.run()
    zombie.core.release(zombie.core.find("on-p"))
    with pytest.raises(Fenced):
        zombie.store.append([(0.0, b"")], zombie.core.state.seq)
    message = zombie.core.outgoing("p")
    with pytest.raises(StalePeer, match="epoch 2 has taken over"):
        world.turn("p", lambda core: core.exchange(message))
    world.run()
    assert world.states()["on-p"] == "allocated@p"


def test_room_that_is_promised_no_more_is_room_for_others_of_the_same_requester(make: MakeWorld) -> None:
    """Fault: who waits at its limit because of a promise is not looked at again when the promise is gone."""
    world = make(
        [pool("p"), pool("q", gpu=1)], [PolicyConfig("p", "a", 0, {}, {"gpu": 2}), PolicyConfig("q", "a", 1)]
    )
    world.submit("x", "a", 1)
    world.exchange(COORDINATOR, "p")  # promised; q is better and has not spoken
    world.submit("y", "a", 2)  # p alone admits it
    world.exchange(COORDINATOR, "p")
    assert world.states() == {"x": "queued", "y": "queued"}
    world.run()
    assert world.states() == {"x": "allocated@q", "y": "allocated@p"}


# ---------------------------------------------------------------- time alone


def test_a_grant_that_comes_of_age_wakes_the_pool(make: MakeWorld) -> None:
    """Fault: nothing is due when `min_runtime` is over, so a live pool sleeps, and who waits for it waits on."""
    world = make(
        [pool("p", min_runtime_s=60.0, grace_s=10.0)],
        [PolicyConfig("p", "low"), PolicyConfig("p", "high", 9)],
    )
    world.submit("l", "low", 2)
    world.run()
    world.advance(5.0)
    world.submit("h", "high", 2)
    world.run()
    assert world.pool("p").next_event_at() == 60.0
    world.now = 60.0
    world.turn("p")
    world.run()
    assert world.states() == {"l": "preempting@p", "h": "queued"}
    world.advance(70.0)
    assert world.states() == {"l": "preempted", "h": "allocated@p"}


# ---------------------------------------------------------------- pools that go, and pools that are silent


def test_a_pool_in_use_can_not_be_taken_away(make: MakeWorld) -> None:
    """Fault: the grant of a pool that is gone can be released by nobody, and its waiters wait for its answer."""
    world = make(
        [pool("p"), pool("q")], [PolicyConfig("p", "a"), PolicyConfig("q", "a"), PolicyConfig("q", "b")]
    )
    world.submit("runs", "a", 2)
    world.run()
    world.submit("full", "b", 2)
    world.run()
    world.submit("open", "a", 1)
    world.run()
    digest = world.coordinator.state.digest()
    for name, first in (("p", "runs"), ("q", "full")):  # "runs" may be in p alone, whatever pools it asked
        with pytest.raises(Refused, match=f"pool '{name}' is in use by 2 requests, '{first}' first"):
            world.ask("change", [("policy", PolicyConfig("q", "c")), ("unpool", name)])
    assert world.coordinator.state.digest() == digest
    for id in ("runs", "open"):
        world.about("cancel", id)
        world.run()
    world.ask("change", [("unpool", "p")])
    world.submit("later", "a", 1)
    world.about("release", "full")
    world.run()
    assert world.states() == {
        "runs": "cancelled",
        "open": "cancelled",
        "full": "released",
        "later": "allocated@q",
    }


def test_a_late_change_does_not_make_a_running_pool_another_one(make: MakeWorld) -> None:
    """Fault: two operators make a pool of one name, or a change comes late, after an operator declared the pool lost:
    the uid that it brings is not that of the pool that runs, and nothing that this one says is heard any more."""
    world = make([pool("p")], [PolicyConfig("p", "a")])
    world.submit("x", "a", 1)
    world.run()
    with pytest.raises(Refused, match="there is a pool 'p' by now") as refused:
        world.ask("change", [("pool", pool("p", gpu=3), "p#0")], "late", "", None)
    assert refused.value.code == "changed_meanwhile"
    world.ask("change", [("pool", pool("p", gpu=4), "p#1")])
    world.submit("y", "a", 3)
    world.run()
    assert world.states() == {"x": "allocated@p", "y": "allocated@p"}


def test_a_pools_log_begins_with_whose_it_is(make: MakeWorld) -> None:
    """Fault: an old copy of a log has waiters and no uid, so that the pool takes the one that took its place after it
    was declared lost for itself, and goes on with waiters that nobody knows."""
    world = make([pool("p")], [PolicyConfig("p", "a")])
    world.restart("q")  # its process is late
    world.ask("change", [("pool", pool("q"), "q#1"), ("policy", PolicyConfig("q", "a"))])
    world.submit("x", "a", 1)
    world.ask(
        "change", [("policy", PolicyConfig("q", "b"))]
    )  # what it is told of itself is newer than the request
    world.run()
    first = next(iter(world.stores["q"].read()))
    assert type(ev.unpack(first.body)) is ev.Configured


def test_a_pool_that_comes_back_with_its_old_log_is_told_everything(make: MakeWorld) -> None:
    """Fault: the link goes on where the pool of that name was, whose log knows less: neither side hears the other."""
    world = make([pool("p"), pool("q")], [PolicyConfig("q", "a"), PolicyConfig("p", "a")])
    for id in ("x", "y"):
        world.submit(id, "a", 2)
        world.run()
        world.about("release", id)
        world.run()
    for _ in range(2):
        world.exchange(COORDINATOR, "p")  # nothing that it logs, and yet it is heard and acknowledged
    world.ask("change", [("unpool", "p")])
    world.run()
    world.restart("p")
    world.fails_in[COORDINATOR] = 0
    new = [("pool", pool("p", gpu=5), "p#2"), ("policy", PolicyConfig("p", "a"))]
    world.try_to(lambda: world.ask("change", new))
    world.ask("change", new)
    world.run()
    world.submit("z", "a", 5)
    world.run()
    assert world.states()["z"] == "allocated@p"


def test_what_a_pool_said_before_it_fell_silent_counts_as_no(make: MakeWorld) -> None:
    """Fault: the attempt is given to a pool that can't be reached, since that one had room when it was last heard."""
    world = make(
        [pool("p"), pool("q"), pool("r")],
        [PolicyConfig("p", "a", 3), PolicyConfig("q", "a", 2), PolicyConfig("r", "a", 1)],
    )
    world.submit("x", "a", 1)
    world.exchange(COORDINATOR, "q")
    assert world.coordinator.unanswered() == {"p", "r"}
    world.ask("set_silent", "q")
    world.exchange(COORDINATOR, "r")
    assert world.states() == {"x": "queued"}, "p is better and unknown"
    world.ask("set_silent", "p")
    assert world.coordinator.state.requests["x"].owner == "r"
    world.run()
    assert world.states() == {"x": "allocated@r"}


def test_a_silent_pool_that_speaks_again_is_believed_again(make: MakeWorld) -> None:
    """Fault: all others said no while it was silent; it comes back with nothing new to say, and nobody decides."""
    who_uses_what = [("p", "a"), ("q", "a"), ("r", "a"), ("p", "b"), ("r", "b")]
    world = make([pool("p"), pool("q"), pool("r")], [PolicyConfig(*each) for each in who_uses_what])
    for id in ("fills-p", "fills-r"):
        world.submit(id, "b", 2)
        world.run()
    world.submit("x", "a", 1)
    world.exchange(COORDINATOR, "q")  # it has room, but p is better
    world.ask("set_silent", "q")
    world.exchange(COORDINATOR, "p")
    world.exchange(COORDINATOR, "r")
    assert world.states()["x"] == "queued"
    world.run()
    assert world.states()["x"] == "allocated@q"


# ---------------------------------------------------------------- grants that are placement groups


def placing(make: MakeWorld, *more: PolicyConfig, **options: Any) -> LiveStyle:
    return make([pool("p", placement=PLACEMENT, **options)], [PolicyConfig("p", "a"), *more])


def fails_to_come_up(world: LiveStyle, id: str) -> float:
    """The group of a grant does not come up; returns how long the request pauses then."""
    world.run(errands=False)
    assert world.states() == {id: "allocated@p"}
    world.not_placed(id)
    world.run()
    attempt = world.pool("p").state.attempts[id]
    assert attempt.state == "queued"
    pause_s = attempt.not_before - world.now
    world.now = attempt.not_before
    return pause_s


def test_a_pool_that_can_not_place_a_grant_is_tried_again_after_pauses_that_grow(make: MakeWorld) -> None:
    """Fault: the pause never grows, or grows for ever, or goes on growing after a grant that came up."""
    world = placing(make)
    world.submit("x", "a", 1)
    doubling = [30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 960.0]
    assert [fails_to_come_up(world, "x") for _ in doubling] == doubling
    world.restart(COORDINATOR)
    assert fails_to_come_up(world, "x") == 960.0
    world.run()
    assert world.coordinator.state.requests["x"].told == "placed"
    world.turn("p", lambda core: core.unplaced("x", core.state.attempts["x"].k, "its node is gone"))
    world.run()
    assert world.states() == {"x": "preempted"}


def test_pauses_start_again_after_a_grant_that_came_up(make: MakeWorld) -> None:
    """Fault: a request that ran for days pays for what failed before."""
    world = placing(make)
    world.submit("x", "a", 1, retries=1)
    assert [fails_to_come_up(world, "x") for _ in range(3)] == [30.0, 60.0, 120.0]
    world.run()
    world.turn("p", lambda core: core.unplaced("x", core.state.attempts["x"].k, "its node is gone"))
    world.settle_errand()  # the group is gone: the next attempt opens
    assert [fails_to_come_up(world, "x") for _ in range(2)] == [30.0, 60.0]


def test_a_request_that_pauses_in_one_pool_runs_in_another(make: MakeWorld) -> None:
    """Fault: the pool that could not place it is the better one, has room, and takes it in circles."""
    world = make(
        [pool("p", placement=PLACEMENT), pool("q")], [PolicyConfig("p", "a", 1), PolicyConfig("q", "a")]
    )
    world.submit("x", "a", 1)
    world.run(errands=False)
    world.not_placed("x")
    world.run()
    assert world.states() == {"x": "allocated@q"}


def test_groups_made_before_a_pool_stopped_placing_are_still_removed(make: MakeWorld) -> None:
    """Fault: the pool judges a grant by its configuration now, and the group of an older one stays for ever."""
    world = placing(make)
    world.submit("grouped", "a", 1)
    world.run()
    world.submit("half-made", "a", 1)
    world.run(errands=False)
    world.ask("change", [("pool", pool("p", gpu=4), "p#1")])
    world.run(errands=False)
    world.submit("counted", "a", 1)
    world.run(errands=False)
    for id in ("grouped", "half-made", "counted"):
        world.about("release", id)
    world.run(errands=False)
    assert world.states() == {"grouped": "allocated@p", "half-made": "allocated@p", "counted": "released"}
    assert world.held("p") == {"gpu": 2}, "what has a group holds until it is gone"
    removed = [errand.effect.id for errand in world.errands if type(errand.effect).__name__ == "Unplace"]
    assert removed == ["grouped", "half-made"]
    world.run()
    assert world.left_behind() == []


def test_grants_made_before_a_pool_began_to_place_have_no_group_to_remove(make: MakeWorld) -> None:
    """Fault: as above, the other way round: nobody will ever say that the group is gone."""
    world = make([pool("p")], [PolicyConfig("p", "a")])
    world.submit("counted", "a", 1)
    world.run()
    world.ask("change", [("pool", pool("p", placement=PLACEMENT), "p#1")])
    world.about("release", "counted")
    world.run(errands=False)
    assert world.states() == {"counted": "released"}
    assert world.left_behind() == []


@pytest.mark.parametrize(("retries", "after"), [(0, "preempted"), (1, "allocated@p")])
def test_a_placed_grant_whose_group_is_lost_has_stopped(make: MakeWorld, retries: int, after: str) -> None:
    """Fault: work that ran and is lost runs again as if it never had, without a retry, as often as its node dies."""
    world = placing(make)
    world.submit("x", "a", 1, retries=retries)
    world.run()
    world.turn("p", lambda core: core.unplaced("x", 1, "its node is gone"))
    world.run()
    assert world.states() == {"x": after}
    assert world.coordinator.state.requests["x"].retries == 0


def test_a_grant_that_was_never_placed_goes_back_without_a_retry(make: MakeWorld) -> None:
    """Fault: nothing of it ever ran, and yet it is preempted, or has a retry less."""
    world = placing(make)
    world.submit("x", "a", 1)
    fails_to_come_up(world, "x")
    world.run()
    assert world.states() == {"x": "allocated@p"}


def test_releasing_what_was_held_and_given_back_meanwhile_is_a_release(make: MakeWorld) -> None:
    """Fault: the holder's release crosses the pool's `returned`, and the holder hears that it was cancelled."""
    world = placing(make)
    world.submit("x", "a", 1)
    world.run(errands=False)
    assert world.states() == {"x": "allocated@p"}
    world.not_placed("x")
    world.settle_errand()  # the end is durable at the pool, and the coordinator has not heard of it
    world.about("release", "x")
    world.run()
    assert world.states() == {"x": "released"}
    assert world.left_behind() == []


@pytest.mark.parametrize("how", ["release", "cancel"])
def test_what_is_asked_of_a_grant_that_is_over_changes_nothing(make: MakeWorld, how: str) -> None:
    """Fault: its group is lost and gone, the end not yet told; the pool ends it once more, and breaks over it."""
    world = placing(make)
    world.submit("x", "a", 1, retries=3)
    world.run()
    world.turn("p", lambda core: core.unplaced("x", 1, "its node is gone"))
    world.settle_errand()
    world.about(how, "x")
    world.run()
    assert world.states() == {"x": "released" if how == "release" else "cancelled"}
    assert world.left_behind() == []


def test_a_victim_that_was_not_placed_yet_ends_without_grace(make: MakeWorld) -> None:
    """Fault: nobody was told of the grant, so nobody says that it has stopped, and a whole grace is lost."""
    world = placing(make, PolicyConfig("p", "high", 1), grace_s=1000.0)
    world.submit("x", "a", 2, retries=1)
    world.run(errands=False)
    world.submit("h", "high", 2)
    world.run(errands=False)
    assert world.pool("p").state.attempts["x"].state == "ending"
    world.run()
    assert world.states() == {"x": "queued", "h": "allocated@p"}
