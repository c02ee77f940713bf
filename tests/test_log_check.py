"""The log check (docs/rules.md section 10): good logs pass, and each promise that a log breaks is found.

Faults it stands for: a request granted in two pools, a grant that nobody took, a pool over capacity, a requester over
its limit or its reserved share, a lost grant, a second end, a log that was changed, a fold that is not the state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from ray_pools import log_check
from ray_pools.core import records as ev
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.pool_state import PoolState
from ray_pools.core.system import System
from ray_pools.errors import BadInput
from ray_pools.log_check import LogReport, check_logs
from ray_pools.store import NoLog, open_store

Logs = dict[str, list[tuple[float, bytes]]]
_labels = itertools.count()


def played() -> System:
    """Two pools and three requesters, with fallback, reclaim, retries, a nomination, a cancel and restarts."""
    pools = {"a": PoolConfig("a", {"gpu": 8}, grace_s=5.0), "b": PoolConfig("b", {"gpu": 8}, grace_s=5.0)}
    policies = [
        PolicyConfig("a", "ml", 10, {"gpu": 4}, {"gpu": 8}),
        PolicyConfig("b", "ml", 5),
        PolicyConfig("a", "ops", 1, {"gpu": 4}),
        PolicyConfig("b", "ops", 9, {"gpu": 8}),
    ]
    world = System(pools, policies)
    world.submit("borrows", "ml", {"gpu": 8}, retries=2)
    world.submit("falls-back", "ml", {"gpu": 6}, retries=1)
    world.submit("reclaims", "ops", {"gpu": 8})
    world.advance(1.0)
    world.stopped("falls-back")
    world.submit("pinned", "ops", {"gpu": 4}, preemptible=False)
    world.restart("all")
    world.advance(6.0)
    world.submit("too-large", "ml", {"gpu": 64})
    world.submit("unwanted", "ml", {"gpu": 2})
    world.cancel("unwanted")
    for id in ("reclaims", "pinned", "borrows"):
        world.release(id)
    world.restart("a")
    world.release("falls-back")
    return world


def kept(logs: Logs, snapshot: Callable[[str], int] | None = None, address: str = "") -> str:
    """The logs in stores; returns their address."""
    address = address or f"memory:log-check-{next(_labels)}"
    for name, rows in logs.items():
        store = open_store(address, name if name == "coordinator" else f"pool:{name}")
        store.open()
        store.append(rows, 0)
        if snapshot is not None and name != "coordinator":
            seq, state = snapshot(name), PoolState()
            for at, body in rows[:seq]:
                state.apply(ev.unpack(body), at)
            store.snapshot(seq, msgpack.packb(state.dump()))
            store.prune(seq)
        store.close()
    return address


def checked(logs: Logs) -> LogReport:
    return check_logs(kept(logs), [name for name in logs if name != "coordinator"])


def unpacked(rows: list[tuple[float, bytes]]) -> list[tuple[int, Any]]:
    return [(index, ev.unpack(body)) for index, (_, body) in enumerate(rows)]


def found(rows: list[tuple[float, bytes]], kind: type[Any], id: str) -> int:
    return next(i for i, event in unpacked(rows) if isinstance(event, kind) and event.id == id)


def as_of(logs: Logs, cut: int) -> Logs:
    """All logs at the moment at which the coordinator's had `cut` rows: what it had heard of is in the pools' logs, and
    no more than that and what it led to by then.
    """
    heard = {"a": 0, "b": 0}
    for _, event in unpacked(logs["coordinator"][:cut]):
        if isinstance(event, ev.Peer):
            heard[event.name] = event.heard
    return {"coordinator": logs["coordinator"][:cut], **{name: logs[name][: heard[name]] for name in heard}}


def grow(address: str, logs: Logs, before: Logs) -> None:
    for name, rows in logs.items():
        store = open_store(address, name if name == "coordinator" else f"pool:{name}")
        store.open()
        store.append(rows[len(before[name]) :], len(before[name]))
        store.close()


def holds(report: LogReport, item: int, request: str, *words: str) -> None:
    """Among the problems is one of this item and request, with these words."""
    said = [str(p) for p in report.problems if (p.item, p.request) == (item, request)]
    assert any(all(word in text for word in words) for text in said), report.problems


@pytest.fixture(scope="module")
def world() -> System:
    return played()


@pytest.fixture
def logs(world: System) -> Logs:
    return {name: list(rows) for name, rows in world.logs.items()}


@pytest.fixture(params=["memory", "sqlite"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}" if request.param == "sqlite" else ""


def test_good_logs_pass(world: System, logs: Logs, address: str) -> None:
    live = {"pool:a": {"seq": world.pools["a"].state.seq, "digest": world.pools["a"].state.digest()}}
    report = check_logs(kept(logs, address=address), ["a", "b"], live)
    assert report.ok, report.problems
    assert report.text().startswith("log check: ok")
    assert report.events == {
        "coordinator": len(logs["coordinator"]),
        "pool:a": len(logs["a"]),
        "pool:b": len(logs["b"]),
    }
    assert report.digests["coordinator"] == world.coordinator.state.digest()
    assert report.open == 0
    assert report.final == {"cancelled": 1, "preempted": 1, "rejected": 1, "released": 3}
    # the case is worth checking only if it has what can go wrong
    kinds = {type(event) for name in logs for _, event in unpacked(logs[name])}
    assert {ev.Nominated, ev.Taken, ev.Opened, ev.Granted, ev.Ended, ev.Asked} <= kinds


def test_requests_that_go_on_are_no_problem() -> None:
    world = System({"a": PoolConfig("a", {"gpu": 2})}, [PolicyConfig("a", "ml")])
    world.submit("one", "ml", {"gpu": 2})
    world.submit("two", "ml", {"gpu": 2})
    report = checked({name: list(rows) for name, rows in world.logs.items()})
    assert report.ok, report.problems
    assert report.open == 2


def test_logs_that_grow_while_they_are_read(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is read, at whatever moment each log is: the pools' lengths come first, then the coordinator's log."""
    read = log_check._read
    for cut in range(4, len(logs["coordinator"]), 7):
        before = as_of(logs, cut)
        address = kept(before)
        left = [before]

        def then_grow(store: str, story: Any, live: Any, left: list[Logs] = left) -> None:
            read(store, story, live)
            if left:  # all goes on as soon as the coordinator's log was read
                grow(store, logs, left.pop())

        monkeypatch.setattr(log_check, "_read", then_grow)
        report = check_logs(address, ["a", "b"])
        assert not left
        assert report.ok, (cut, report.problems)


def test_a_pruned_log_is_checked_from_its_snapshot_on(logs: Logs) -> None:
    report = check_logs(kept(logs, snapshot=lambda name: len(logs[name]) // 2), ["a", "b"])
    assert report.ok, report.problems


def test_a_pool_without_a_log_and_a_missing_coordinator(logs: Logs) -> None:
    assert check_logs(kept(logs), ["a", "b", "never-up"]).ok
    with pytest.raises(NoLog):
        check_logs("memory:empty-log-check", ["a"])
    with pytest.raises(BadInput):
        check_logs("ftp://somewhere", ["a"])


# --- each promise broken


def test_a_second_grant_in_another_pool(logs: Logs) -> None:
    at = found(logs["b"], ev.Granted, "reclaims")
    queued = unpacked(logs["b"])[found(logs["b"], ev.Queued, "reclaims")][1]
    when = logs["b"][at][0]
    logs["a"] += [(when, ev.pack(queued)), (when, ev.pack(ev.Granted("reclaims", queued.k)))]
    report = checked(logs)
    holds(report, 1, "reclaims", "pool:a", "pool b took it")
    holds(report, 1, "reclaims", "is held in pools a and b")
    holds(report, 6, "reclaims", "still holds, but the request is preempted")


def test_a_grant_that_nobody_took(logs: Logs) -> None:
    rows = logs["coordinator"]
    at = found(rows, ev.Taken, "falls-back")
    # a harmless event in its place keeps what follows where it is
    rows[at] = (rows[at][0], ev.pack(ev.Peer("nobody", 0, 0, 0, 0)))
    holds(checked(logs), 1, "falls-back", "says of no pool that it took it")


def test_an_attempt_that_opens_before_the_last_one_ended(logs: Logs) -> None:
    rows = logs["coordinator"]
    at = found(rows, ev.Opened, "falls-back")
    rows.insert(at - 1, rows.pop(at))  # before the turn in which the end was heard
    moved = logs["b"]
    end = found(moved, ev.Ended, "falls-back")
    moved.append(moved.pop(end))
    report = checked(logs)
    holds(report, 1, "falls-back", "opens before the end of attempt")


def test_an_attempt_that_never_ended(logs: Logs) -> None:
    end = found(logs["b"], ev.Ended, "falls-back")
    del logs["b"][end]
    report = checked(logs)
    holds(report, 1, "falls-back", "never ended in pool b")
    holds(report, 2, "reclaims", "gpu held 14, capacity 8")


def test_over_capacity(logs: Logs) -> None:
    at = found(logs["a"], ev.Granted, "borrows")
    queued = ev.Queued("extra", 1, True, "ml", [["gpu", 1]], True, 99, 0.0, 0.0, {})
    logs["a"][at + 1 : at + 1] = [(0.0, ev.pack(queued)), (0.0, ev.pack(ev.Granted("extra", 1)))]
    report = checked(logs)
    holds(report, 2, "extra", "gpu held 9, capacity 8")
    holds(report, 3, "extra", "requester ml holds gpu 9, limit 8")
    holds(report, 1, "extra", "says of no pool that it took it")


def test_after_a_shrink_held_may_only_fall() -> None:
    world = System({"a": PoolConfig("a", {"gpu": 8})}, [PolicyConfig("a", "ml")])
    world.submit("one", "ml", {"gpu": 4})
    world.submit("two", "ml", {"gpu": 4})
    world.set_capacity("a", {"gpu": 2})
    world.release("one")
    logs = {name: list(rows) for name, rows in world.logs.items()}
    assert checked(logs).ok
    queued = ev.Queued("late", 1, True, "ml", [["gpu", 1]], True, 99, 0.0, 0.0, {})
    logs["a"] += [(0.0, ev.pack(queued)), (0.0, ev.pack(ev.Granted("late", 1)))]
    holds(checked(logs), 2, "late", "gpu held 5, capacity 2")


def test_non_preemptible_beyond_reserved(logs: Logs) -> None:
    rows = logs["b"]
    for index, event in unpacked(rows):
        if isinstance(event, ev.Configured):
            policies = [{**p, "reserved": {"gpu": 1}} for p in event.policies]
            rows[index] = (rows[index][0], ev.pack(event._replace(policies=policies)))
    holds(checked(logs), 3, "pinned", "requester ops holds non-preemptible gpu 4, reserved 1")


def test_a_grant_that_was_told_and_is_lost(logs: Logs) -> None:
    """A pool whose log lost its end: what the coordinator heard is not there any more."""
    at = found(logs["b"], ev.Granted, "reclaims")
    del logs["b"][at:]
    holds(checked(logs), 6, "reclaims", "whose log knows no such grant")


def test_two_ends(logs: Logs) -> None:
    logs["coordinator"].append((99.0, ev.pack(ev.Finished("unwanted", "released", {}))))
    holds(checked(logs), 6, "unwanted", "after the request was cancelled")


def test_an_end_of_a_request_that_was_never_submitted(logs: Logs) -> None:
    logs["coordinator"].append((99.0, ev.pack(ev.Finished("ghost", "released", {}))))
    holds(checked(logs), 6, "ghost", "never submitted")


def test_an_event_that_can_not_follow(logs: Logs) -> None:
    logs["a"].append((99.0, ev.pack(ev.Placed("ghost", 1, {}))))
    holds(checked(logs), 7, "ghost", "can't follow here")


def test_an_actor_whose_state_is_not_what_its_log_gives(logs: Logs) -> None:
    live = {"pool:a": {"seq": 3, "digest": "0" * 32}}
    report = check_logs(kept(logs), ["a", "b"], live)
    holds(report, 7, "", "pool:a row 3", "differs from what its log gives")


def test_a_snapshot_that_is_not_the_fold(logs: Logs) -> None:
    address = kept(logs)
    store = open_store(address, "pool:a")
    store.open()
    other = PoolState()
    for at, body in logs["a"][:5]:
        other.apply(ev.unpack(body), at)
    other.clock += 1e6
    store.snapshot(5, msgpack.packb(other.dump()))
    store.close()
    holds(check_logs(address, ["a", "b"]), 7, "", "the snapshot of row 5 and what follows")


def test_a_changed_byte(logs: Logs, tmp_path: Path) -> None:
    import sqlite3

    address = kept(logs, address=f"sqlite://{tmp_path}")
    (file,) = tmp_path.glob("pool*a.sqlite")
    with sqlite3.connect(file) as db:
        (first,) = db.execute("SELECT max(first) FROM log WHERE first > 1").fetchone()
        assert db.execute("UPDATE log SET body = x'00' WHERE first = ?", (first,)).rowcount == 1
    db.close()
    report = check_logs(address, ["a", "b"])
    assert any(p.log == "pool:a" and p.seq == first and p.item == 7 for p in report.problems), report.problems
