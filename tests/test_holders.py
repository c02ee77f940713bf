"""Dead holders (docs/rules.md section 8), without Ray: what ends with a process, what does not, and what is sure.

Faults it stands for: a holder that is ended although it lives (it left its cluster and came back, it is of another
cluster, its request was taken on by another process, its node's processes still end); one that is dead and keeps what
it had, although Ray knows; a restart that forgets whom to look for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from test_shells import Play, Shells, play

from ray_pools import wire
from ray_pools.actors.holders import LOOKUPS_MAX, NODE_ENDS_S, HolderWatch, Judge, Worker
from ray_pools.cli.maintenance import Findings, _look_at_node
from ray_pools.core import holders
from ray_pools.core import records as ev
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.errors import BadInput, Refused
from ray_pools.log_words import words

__all__ = ["play"]


def process(worker: str, **more: str) -> dict[str, str]:
    return {
        "cluster": "c1",
        "job": "01",
        "node": "n1",
        "worker": worker,
        "kind": "worker",
        "pid": "7",
        **more,
    }


def driver(worker: str, **more: str) -> dict[str, str]:
    return process(worker, kind="driver", **more)


DEAD, LEFT, ALIVE = Worker(False, False, "killed"), Worker(False, True, "shutdown"), Worker(True, False, "")


class Tables:
    """Ray's tables as a test has them."""

    def __init__(self, **workers: Worker) -> None:
        self.workers, self.nodes, self.jobs, self.here = workers, set[str](), set[str](), "c1"
        self.asked: list[str] = []
        self.problem: Exception | None = None

    def cluster(self) -> str:
        return self.here

    def dead_nodes(self) -> set[str]:
        if self.problem is not None:
            raise self.problem
        return self.nodes

    def dead_jobs(self) -> set[str]:
        return self.jobs

    def worker(self, worker_id: str) -> Worker | None:
        self.asked.append(worker_id)
        return self.workers.get(worker_id)


def names(found: list[tuple[str, Any, str]]) -> list[str]:
    return sorted(client for client, _, _ in found)


# --- what is sure


def test_only_a_process_that_the_table_calls_dead_is_gone() -> None:
    tables = Tables(a=ALIVE, b=DEAD)
    known = [(name, process(name)) for name in ("a", "b", "unheard-of")]
    assert names(Judge(tables).gone(known)) == ["b"]


def test_a_job_that_is_over_ends_its_driver_and_nobody_else() -> None:
    """Fault: a detached actor, or a task's process that lives, ends with the job that made it."""
    tables = Tables(driver=DEAD, detached=ALIVE, other=ALIVE)
    tables.jobs = {"01"}
    known = [
        ("d", driver("driver")),
        ("a", process("detached", actor="aa")),
        ("o", driver("other", job="02")),
    ]
    assert names(Judge(tables).gone(known)) == ["d"]
    assert "other" not in tables.asked, "drivers of live jobs cost no call of their own"


def test_a_driver_that_left_in_good_order_may_live_on() -> None:
    """Fault: after ray.shutdown() and another ray.init() its slots are taken away although it renews them."""
    tables = Tables(w=LEFT)
    tables.jobs = {"01"}
    judge = Judge(tables)
    for _ in range(3):
        assert judge.gone([("d", driver("w"))]) == []
    assert tables.asked == ["w"], "nothing more will be known of it"


def test_whoever_is_of_another_cluster_is_not_judged() -> None:
    """Fault: a fresh head gives out job 01 again, and its end is taken for that of a job of before."""
    tables = Tables(w=DEAD)
    tables.jobs = {"01"}
    assert Judge(tables).gone([("d", driver("w", cluster="c0"))]) == []
    tables.here = ""
    assert Judge(tables).gone([("d", driver("w", cluster=""))]) == []
    assert tables.asked == []


def test_the_processes_of_a_dead_node_have_some_seconds_to_end() -> None:
    now = [100.0]
    tables = Tables(w=ALIVE)
    judge = Judge(tables, lambda: now[0])
    known = [("a", process("w"))]
    tables.nodes = {"n1"}
    assert judge.gone(known) == []
    now[0] += NODE_ENDS_S
    assert names(judge.gone(known)) == ["a"]


def test_many_processes_are_looked_up_in_turn() -> None:
    count = 2 * LOOKUPS_MAX + 10
    tables = Tables(**{f"w{n}": DEAD for n in range(count)})
    judge = Judge(tables)
    known = [(f"c{n}", process(f"w{n}")) for n in range(count)]
    seen = set()
    for _ in range(3):
        before = len(tables.asked)
        seen |= set(names(judge.gone(known)))
        assert len(tables.asked) - before <= LOOKUPS_MAX
    assert len(seen) == count


@pytest.mark.parametrize("problem", [AttributeError("no such function"), RuntimeError("the GCS is away")])
def test_tables_that_cannot_be_read_leave_it_to_the_leases(problem: Exception, caplog: Any) -> None:
    """Fault: a Ray whose private parts moved costs a line a second, or the coordinator; an outage ends the watch."""

    async def main() -> None:
        tables, reported = Tables(w=DEAD), asyncio.Event()
        tables.problem = problem
        asked = 0

        def known() -> list[Any]:
            nonlocal asked
            asked += 1
            if asked == 3:
                tables.problem = None
            return [("a", process("w"))]

        watch = HolderWatch(known, lambda found: reported.set(), tables, period_s=0.001)
        if isinstance(problem, AttributeError):
            while watch._look_begins is not None:
                await asyncio.sleep(0.001)
            assert "AttributeError" in watch.trouble
            assert not reported.is_set()
            assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
        else:
            await asyncio.wait_for(reported.wait(), 30)
        watch.close()

    asyncio.run(main())


# --- what ends with it


def logged(shells: Shells, *kinds: type) -> list[Any]:
    every = [ev.unpack(row.body) for row in shells.coordinator.store.read(1)]
    return [event for event in every if isinstance(event, kinds)]


async def hold(shells: Shells, client: str, id: str, gpu: int = 2, lease_s: float = 60.0, **more: Any) -> Any:
    return await shells.submit(
        id,
        "low",
        gpu,
        client=client,
        token=id.encode(),
        lease_s=lease_s,
        holder=process("w-" + client),
        **more,
    )


async def gone(shells: Shells, client: str, who: dict[str, str] | None = None) -> None:
    found = [[client, who or process("w-" + client), "killed"]]
    await shells.coordinator.command([{"op": "_holders_gone", "found": found}])


def test_what_a_dead_process_holds_goes_to_the_next_and_what_it_waits_for_is_cancelled(play: Play) -> None:
    async def story(shells: Shells) -> None:
        await hold(shells, "a", "a1")
        await hold(shells, "a", "a2")
        await hold(shells, "b", "b1")
        await shells.until({"a1": "allocated", "a2": "queued", "b1": "queued"})
        await gone(shells, "a")
        await shells.until({"a1": "expired", "a2": "cancelled", "b1": "allocated"})
        (told,) = logged(shells, ev.HolderGone)
        assert (told.client, told.ids, told.why) == ("a", ["a1", "a2"], "killed")
        assert (await shells.ask("get", ids=["a2"]))[0]["asked"] == "expire"

    play(story)


def test_a_request_without_a_lease_outlives_its_client(play: Play) -> None:
    """Fault: `pools submit` ends, and with it what it asked for."""

    async def story(shells: Shells) -> None:
        await hold(shells, "a", "a1", gpu=1, lease_s=0.0)
        await hold(shells, "a", "a2", gpu=1)
        await shells.until({"a1": "allocated", "a2": "allocated"})
        await gone(shells, "a")
        await shells.until({"a1": "allocated", "a2": "expired"})

    play(story)


def test_who_came_back_as_another_process_is_not_ended_by_the_end_of_the_first(play: Play) -> None:
    async def story(shells: Shells) -> None:
        await hold(shells, "a", "a1")
        renewed = await shells.ask("renew", client="a", holder=driver("w2", job="02"), items=[["a1", b"a1"]])
        assert renewed["renewed"] == 1
        await gone(shells, "a")
        await shells.until({"a1": "allocated"})
        assert shells.coordinator.state.holders["a"]["worker"] == "w2"
        await shells.ask("renew", client="a", holder=process("stranger"), items=[["a1", b"wrong"]])
        assert shells.coordinator.state.holders["a"]["worker"] == "w2", "who has no token says nothing"

    play(story)


def test_who_submits_a_request_again_holds_it_from_then_on(play: Play) -> None:
    """Fault: a driver that was started anew waits for a word that goes to the one before, and ends with it."""

    async def story(shells: Shells) -> None:
        await hold(shells, "a", "a1")
        waiting = asyncio.ensure_future(shells.coordinator.wait(wire.encode_wait("b", 0, 30.0)))
        with pytest.raises(Refused, match="token"):
            await shells.submit("a1", "low", 2, client="b", token=b"other", lease_s=60.0)
        await hold(shells, "b", "a1")
        _, changes = wire.decode_changes(await waiting)
        assert [view["id"] for view in changes] == ["a1"]
        await gone(shells, "a")
        shells.start()
        await shells.until({"a1": "allocated"})
        await gone(shells, "b")
        await shells.until({"a1": "expired"})

    play(story)


def test_a_restarted_coordinator_knows_whom_to_look_for(play: Play) -> None:
    async def story(shells: Shells) -> None:
        await hold(shells, "a", "a1")
        await shells.until({"a1": "allocated"})
        before = shells.coordinator.state.digest()
        dumped = CoordinatorState.load(shells.coordinator.state.dump())
        assert dumped.digest() == before
        shells.start()
        assert shells.coordinator.state.digest() == before
        for state in (dumped, shells.coordinator.state):
            assert state.holders == {"a": process("w-a")}
            assert state.live_of_client == {"a": {"a1": None}}
        assert holders.watched(shells.coordinator.core) == [("a", process("w-a"))]
        await shells.until({"a1": "allocated"})
        await shells.ask("release", id="a1", token=b"a1")
        assert holders.watched(shells.coordinator.core) == []

    play(story)


def test_the_process_that_ends_says_so_itself(play: Play) -> None:
    async def story(shells: Shells) -> None:
        await hold(shells, "a", "a1", gpu=1)
        await hold(shells, "a", "a2", gpu=1)
        await shells.until({"a1": "allocated", "a2": "allocated"})
        with pytest.raises(Refused, match="token"):
            await shells.ask("leave", items=[["a1", b"a1"], ["a2", b"wrong"]])
        await shells.until({"a1": "allocated", "a2": "allocated"})
        assert await shells.ask("leave", items=[["a1", b"a1"], ["gone", b"x"]]) == {"ended": 1}
        await shells.until({"a1": "expired", "a2": "allocated"})

    play(story)


def test_nobody_from_outside_can_say_that_a_process_is_dead(play: Play) -> None:
    async def story(shells: Shells) -> None:
        await hold(shells, "a", "a1")
        op = {"op": "_holders_gone", "found": [["a", process("w-a"), "a lie"]]}
        with pytest.raises(BadInput):
            wire.decode_response(await shells.coordinator.call(wire.encode_request([op])), 1)
        await shells.until({"a1": "allocated"})

    play(story)


def test_two_nodes_are_never_told_apart_by_nothing() -> None:
    """Fault: ids of a local cluster's nodes differ in their last characters only."""
    head, worker = ("f" * 51 + end for end in ("00000", "00001"))
    assert holders.short_node(head) != holders.short_node(worker) == "ffffffff..00001"
    assert "on node ffffffff..00001" in words(ev.HolderSeen("c", {"node": worker}))
    assert holders.short_node("node-1") == "node-1"


def test_the_doctor_tells_nodes_apart() -> None:
    found = Findings()
    for end in ("00000", "00001"):
        node = {"node": "f" * 51 + end, "address": "127.0.0.1", "head": False, "problem": "x"}
        _look_at_node(found, node, "2")
    assert len({what for _, what, _ in found.lines}) == 2


def test_what_a_client_says_of_itself_is_checked(refuses: Callable[..., Any]) -> None:
    assert holders.check_holder(None) == {}
    assert holders.check_holder({"worker": "ab", "newer": 1}) == {"worker": "ab"}
    with refuses("holder", "mapping"):
        holders.check_holder(["worker"])
    with refuses("holder.node", "name"):
        holders.check_holder({"node": "x" * 500})
