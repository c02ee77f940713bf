"""Placement groups of grants: one per grant, found again after a restart, none left behind.

The first part drives the placer against a Ray of paper, where every fault can be had: a GCS that is down, an answer
that is lost, a group that somebody else removed, a node that reports late. The second runs on one real local Ray.
Rule: docs/rules.md section 6, capacity is free only when the group is gone.
"""

from __future__ import annotations

import itertools
import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from ray_pools.actors.placement import Placer
from ray_pools.actors.ray_groups import GroupInfo, Impossible, NameTaken, View

Posted = tuple[str, str, int, Any]
PLACEMENT = {"node": {"gpu": 4}, "labels": {}, "strategy": "PACK", "provision_timeout_s": 0.0}
WAIT_S = 30.0


class PaperRay:
    """Groups as Ray has them, with as many GPUs as said, and faults."""

    def __init__(self, gpus: float = 8) -> None:
        self.gpus = gpus
        self.groups: dict[str, dict[str, Any]] = {}
        self.down = 0  # so many calls fail
        self.lose_answers = 0  # so many creations happen, but say that they failed
        self.reported: set[str] = set()  # removed groups that a node still reports
        self.slow_reports = False
        self.busy: set[str] = set()
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()

    def list(self, prefix: str) -> dict[str, str]:
        with self._call():
            return {
                group["name"]: hex for hex, group in self.alive().items() if group["name"].startswith(prefix)
            }

    def create(
        self, name: str, bundles: Sequence[Mapping[str, float]], strategy: str, selector: Mapping[str, str]
    ) -> str:
        with self._call():
            if strategy == "NEVER":
                raise Impossible("no such strategy")
            if any(group["name"] == name for group in self.alive().values()):
                raise NameTaken(name)
            hex = f"{next(self._numbers):032x}"
            self.groups[hex] = {
                "name": name,
                "state": "PENDING",
                "bundles": [dict(each) for each in bundles],
                "selector": dict(selector),
            }
            self.place_all()
            if self.lose_answers:
                self.lose_answers -= 1
                raise ConnectionError("the answer was lost")
            return hex

    def find(self, name: str) -> str | None:
        with self._call():
            return next((hex for hex, group in self.alive().items() if group["name"] == name), None)

    def info(self, hex: str) -> GroupInfo | None:
        with self._call():
            group = self.groups.get(hex)
            return group and GroupInfo(group["state"], group["bundles"], "NO_RESOURCES")

    def remove(self, hex: str) -> None:
        with self._call():
            if self.slow_reports and self.groups[hex]["state"] == "CREATED":
                self.reported.add(hex)
            self.groups[hex]["state"] = "REMOVED"
            self.place_all()

    def view(self) -> View:
        with self._call():
            shown = {
                hex for hex, group in self.alive().items() if group["state"] == "CREATED"
            } | self.reported
            return {hex: len(self.groups[hex]["bundles"]) - 0.001 * (hex in self.busy) for hex in shown}

    def alive(self) -> dict[str, dict[str, Any]]:
        return {hex: group for hex, group in self.groups.items() if group["state"] != "REMOVED"}

    def names(self) -> set[str]:
        with self._lock:
            return {group["name"] for group in self.alive().values()}

    def place_all(self) -> None:
        with self._lock:
            for group in self.alive().values():
                used = sum(
                    bundle.get("GPU", 0)
                    for other in self.alive().values()
                    for bundle in other["bundles"]
                    if other["state"] == "CREATED"
                )
                if (
                    group["state"] == "PENDING"
                    and used + sum(b.get("GPU", 0) for b in group["bundles"]) <= self.gpus
                ):
                    group["state"] = "CREATED"

    def add_gpus(self, gpus: float) -> None:
        with self._lock:
            self.gpus += gpus
            self.place_all()

    def _call(self) -> threading.RLock:
        if self.down:
            self.down -= 1
            raise ConnectionError("the GCS is down")
        return self._lock


class Desk:
    """A placer and what it posted."""

    def __init__(self, groups: Any = None, pool: str = "pool", placement: Any = PLACEMENT) -> None:
        self.posted: queue.Queue[Posted] = queue.Queue()
        self.placer = Placer("tests", pool, lambda *post: self.posted.put(post), groups)
        self.placer.configure(placement)

    def next(self) -> Posted:
        """What is posted next of a request."""
        while (post := self.posted.get(timeout=WAIT_S))[0] == "cleared":
            pass
        return post

    def cleared(self) -> None:
        """Nothing may be posted before that."""
        assert self.posted.get(timeout=WAIT_S) == ("cleared", "", 0, None)

    def expect(self, kind: str, id: str, k: int = 1) -> Any:
        post = self.next()
        assert post[:3] == (kind, id, k), post
        return post[3]

    def gone_after(self, id: str, k: int = 1) -> None:
        """Unplaces, and takes whatever is posted up to `gone`."""
        self.placer.unplace(id, k)
        self.expect("gone", id, k)


@pytest.fixture
def ray_of_paper() -> PaperRay:
    return PaperRay()


@pytest.fixture
def desk(ray_of_paper: PaperRay) -> Iterator[Desk]:
    desk = Desk(ray_of_paper)
    yield desk
    desk.placer.close()


def test_a_grant_is_placed_and_given_back(desk: Desk, ray_of_paper: PaperRay) -> None:
    desk.placer.place("a/1", 2, {"gpu": 8, "step_run": 1}, {})
    detail = desk.expect("placed", "a/1", 2)
    assert detail["name"] == "ray-pools/tests/pool/a%2F1/2"
    assert detail["bundles"] == [{"CPU": 1.0, "GPU": 4.0}] * 2
    assert detail["strategy"] == "PACK"
    assert ray_of_paper.groups[detail["pg"]]["state"] == "CREATED"
    desk.gone_after("a/1", 2)
    assert ray_of_paper.names() == set()


def test_twice_is_harmless(desk: Desk, ray_of_paper: PaperRay) -> None:
    for _ in range(3):
        desk.placer.place("a", 1, {"gpu": 1}, {})
    first = desk.expect("placed", "a")
    desk.placer.place("a", 1, {"gpu": 1}, {})
    assert desk.expect("placed", "a") == first
    assert len(ray_of_paper.groups) == 1
    desk.placer.unplace("a", 1)
    desk.placer.unplace("a", 1)
    desk.expect("gone", "a")
    desk.gone_after("never placed")


def test_what_is_only_counted_has_no_group(desk: Desk, ray_of_paper: PaperRay) -> None:
    desk.placer.place("a", 1, {"step_run": 1, "licence": 2}, {})
    assert desk.expect("placed", "a")["pg"] == ""
    desk.placer.place("b", 1, {"gpu": 1}, {"placement": "none"})
    assert desk.expect("placed", "b")["bundles"] == []
    desk.gone_after("a")
    assert ray_of_paper.groups == {}


def test_a_group_that_finds_no_room_waits_for_it(desk: Desk, ray_of_paper: PaperRay) -> None:
    desk.placer.place("big", 1, {"gpu": 16}, {})
    desk.placer.place("small", 1, {"gpu": 8}, {})
    desk.expect("placed", "small")
    ray_of_paper.add_gpus(16)
    desk.expect("placed", "big")


def test_unplaced_before_it_was_placed(desk: Desk, ray_of_paper: PaperRay) -> None:
    desk.placer.place("a", 1, {"gpu": 16}, {})
    desk.gone_after("a")
    assert ray_of_paper.names() == set()


def test_a_group_that_gets_no_nodes_in_time_goes_back(ray_of_paper: PaperRay) -> None:
    desk = Desk(ray_of_paper, placement={**PLACEMENT, "provision_timeout_s": 0.05})
    desk.placer.place("a", 1, {"gpu": 16}, {})
    assert desk.expect("unplaced", "a") == "not placed within 0.05 s: no node has room"
    assert ray_of_paper.names() == set()
    desk.gone_after("a")
    desk.placer.close()


def test_what_can_never_be_a_group_goes_back_with_the_reason(desk: Desk, ray_of_paper: PaperRay) -> None:
    desk.placer.place("a", 1, {"gpu": 2}, {"bundles": [{"gpu": 1}]})
    assert desk.expect("unplaced", "a").startswith("not placed: bundles = ")
    desk.placer.place("b", 1, {"gpu": 2}, {"strategy": "NEVER"})
    assert desk.expect("unplaced", "b") == "not placed: no such strategy"
    desk.gone_after("a")
    desk.gone_after("b")
    desk.placer.place("c", 1, {"gpu": 1}, {})
    desk.expect("placed", "c")


def test_a_gcs_that_is_down_delays_and_loses_nothing(desk: Desk, ray_of_paper: PaperRay) -> None:
    ray_of_paper.down = 3
    desk.placer.place("a", 1, {"gpu": 1}, {})
    desk.expect("placed", "a")
    ray_of_paper.down = 2
    desk.gone_after("a")
    assert ray_of_paper.names() == set()


def test_a_creation_whose_answer_was_lost_is_found_by_name(desk: Desk, ray_of_paper: PaperRay) -> None:
    ray_of_paper.lose_answers = 1
    desk.placer.place("a", 1, {"gpu": 1}, {})
    desk.expect("placed", "a")
    assert len(ray_of_paper.groups) == 1
    ray_of_paper.lose_answers = 1
    desk.placer.place("b", 1, {"gpu": 1}, {})
    desk.gone_after("b")
    assert ray_of_paper.names() == {desk.placer.name("a", 1)}


def test_gone_waits_until_the_nodes_report_it(desk: Desk, ray_of_paper: PaperRay) -> None:
    """A group made before that would find no room, and be tried again a second later."""
    ray_of_paper.slow_reports = True
    desk.placer.place("a", 1, {"gpu": 8}, {})
    hex = desk.expect("placed", "a")["pg"]
    desk.placer.unplace("a", 1)
    desk.placer.place("b", 1, {"gpu": 8}, {})
    desk.expect("placed", "b")  # so the thread has been around at least once since the removal
    assert ray_of_paper.groups[hex]["state"] == "REMOVED"
    assert desk.posted.empty()
    ray_of_paper.reported.clear()
    desk.expect("gone", "a")


def test_a_group_removed_by_somebody_else_is_told(ray_of_paper: PaperRay) -> None:
    desk = Desk(ray_of_paper)
    desk.placer.place("waits", 1, {"gpu": 16}, {})
    desk.placer.place("stands", 1, {"gpu": 1}, {})
    hex = desk.expect("placed", "stands")["pg"]
    (waiting,) = (each for each in ray_of_paper.groups if each != hex)
    ray_of_paper.remove(waiting)
    assert desk.expect("unplaced", "waits") == "not placed: its group was removed"
    desk.placer.close()
    # the successor is told what stands, and looks
    ray_of_paper.remove(hex)
    second = Desk(ray_of_paper)
    second.placer.reconcile({("stands", 1)}, {("stands", 1): {"pg": hex, "name": "x", "bundles": []}})
    assert second.expect("unplaced", "stands") == "not placed: its group was removed"
    second.placer.close()


def test_a_restart_keeps_what_is_expected_and_removes_the_rest(ray_of_paper: PaperRay) -> None:
    first = Desk(ray_of_paper)
    other = Desk(ray_of_paper, pool="pool/2")
    for id in ("kept", "orphan", "ending"):
        first.placer.place(id, 1, {"gpu": 1}, {})
        first.expect("placed", id)
    other.placer.place("orphan", 1, {"gpu": 1}, {})
    other.expect("placed", "orphan")
    kept = ray_of_paper.find(first.placer.name("kept", 1))
    first.placer.close()

    second = Desk(ray_of_paper)
    ray_of_paper.down = 2
    second.placer.reconcile({("kept", 1), ("ending", 1)})
    second.placer.unplace("ending", 1)
    second.expect("gone", "ending")
    second.placer.place("kept", 1, {"gpu": 1}, {})
    assert second.expect("placed", "kept")["pg"] == kept
    second.gone_after("orphan")  # gone already or about to be: it is said in any case
    assert ray_of_paper.names() == {second.placer.name("kept", 1), other.placer.name("orphan", 1)}
    for desk in (second, other):
        desk.placer.close()


def test_a_successor_says_when_no_group_of_nobody_is_left(ray_of_paper: PaperRay) -> None:
    """What is of no grant may still be in use: nothing may be granted before that is gone."""
    first = Desk(ray_of_paper)
    first.placer.place("orphan", 1, {"gpu": 1}, {})
    first.expect("placed", "orphan")
    first.placer.close()
    for there in (1, 0):
        assert len(ray_of_paper.names()) == there
        second = Desk(ray_of_paper)
        second.placer.reconcile(set())
        second.cleared()
        assert not ray_of_paper.names()
        second.placer.close()


def test_an_actor_that_takes_no_more_posts_does_not_end_the_thread(ray_of_paper: PaperRay) -> None:
    posted: queue.Queue[Posted] = queue.Queue()

    def post(*what: Any) -> None:
        posted.put(what)
        if what[1] == "a":
            raise RuntimeError("the loop is closed")

    placer = Placer("tests", "pool", post, ray_of_paper)
    placer.configure(PLACEMENT)
    placer.place("a", 1, {"gpu": 1}, {})
    placer.place("b", 1, {"gpu": 1}, {})
    assert [posted.get(timeout=WAIT_S)[1] for _ in range(2)] == ["a", "b"]
    placer.close()


# --- on a real Ray


@pytest.fixture(scope="module")
def local_ray() -> Iterator[Any]:
    import ray

    assert os.environ["RAY_AUTH_MODE"] == "disabled", "decided once per process"
    directory = tempfile.mkdtemp(prefix="rp", dir="/tmp")  # Ray's sockets need a short path
    ray.init(
        num_cpus=8,
        num_gpus=8,
        namespace="tests",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=directory,
    )
    yield ray
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def live(local_ray: Any) -> Iterator[Callable[..., Desk]]:
    """Makes desks; all groups are gone afterwards."""
    desks: list[Desk] = []

    def make(**placement: Any) -> Desk:
        desks.append(Desk(pool=f"pool {len(desks)}", placement={**PLACEMENT, **placement}))
        return desks[-1]

    yield make
    from ray.util import placement_group_table, remove_placement_group
    from ray.util.placement_group import PlacementGroup, PlacementGroupID

    for desk in desks:
        desk.placer.close()
    for hex, info in placement_group_table().items():
        if info["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(hex)))


def work_in(ray: Any, detail: Mapping[str, Any], bundle: int = -1) -> Any:
    """Where a default task (1 CPU) runs inside the group, and how many GPUs one with a GPU sees."""
    from ray.util.placement_group import PlacementGroup, PlacementGroupID
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = PlacementGroup(PlacementGroupID.from_hex(detail["pg"]))
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)

    def hex_of_group() -> Any:
        found = ray.util.get_current_placement_group()
        return found and found.id.hex()

    task = ray.remote(hex_of_group).options(scheduling_strategy=strategy)
    gpus = ray.remote(lambda: len(ray.get_gpu_ids())).options(
        scheduling_strategy=strategy, num_gpus=2, num_cpus=0
    )
    return ray.get([task.remote(), gpus.remote()], timeout=WAIT_S)


@pytest.mark.ray
def test_work_runs_in_the_group_and_the_capacity_comes_back(
    local_ray: Any, live: Callable[..., Desk]
) -> None:
    desk = live()
    for k in (1, 2, 3):
        desk.placer.place("a", k, {"gpu": 8, "step_run": 1}, {})
        detail = desk.expect("placed", "a", k)
        assert len(detail["bundles"]) == 2
        assert work_in(local_ray, detail, bundle=1) == [detail["pg"], 2]
        desk.gone_after("a", k)


@pytest.mark.ray
def test_a_real_group_is_made_once_and_found_by_its_successor(
    live: Callable[..., Desk], local_ray: Any
) -> None:
    first = live()
    first.placer.place("a", 1, {"gpu": 2}, {})
    first.placer.place("a", 1, {"gpu": 2}, {})
    first.placer.place("orphan", 1, {"gpu": 2}, {})
    placed = {post[1]: post[3] for post in (first.next(), first.next())}
    first.placer.close()

    second = Desk(pool="pool 0")
    second.placer.place("a", 1, {"gpu": 2}, {})
    assert second.expect("placed", "a") == placed["a"]
    second.placer.reconcile({("a", 1)})
    second.placer.place("big", 1, {"gpu": 6}, {})
    second.expect("placed", "big")  # the orphan's GPUs are free
    third = Desk(pool="pool 0")  # another copy that knows nothing: a name that is taken is looked up
    third.placer.place("big", 1, {"gpu": 6}, {})
    assert third.expect("placed", "big")["name"] == "ray-pools/tests/pool%200/big/1"
    second.gone_after("a")
    second.gone_after("big")
    for desk in (second, third):
        desk.placer.close()
    from ray.util import placement_group_table

    states = {info["name"]: info["state"] for info in placement_group_table().values()}
    assert {state for name, state in states.items() if name.startswith(second.placer.prefix)} == {"REMOVED"}


@pytest.mark.ray
def test_labels_that_no_node_has_keep_a_group_waiting_until_its_time_is_over(
    live: Callable[..., Desk],
) -> None:
    labelled = live(labels={"market-type": "spot"}, provision_timeout_s=0.3)
    plain = live()
    labelled.placer.place("a", 1, {"gpu": 1}, {})
    plain.placer.place("b", 1, {"gpu": 8}, {})
    plain.expect("placed", "b")
    assert labelled.expect("unplaced", "a").startswith("not placed within 0.3 s")
    labelled.gone_after("a")
    plain.gone_after("b")


@pytest.mark.ray
def test_a_gang_and_what_ray_refuses(live: Callable[..., Desk], local_ray: Any) -> None:
    desk = live()
    desk.placer.place("a", 1, {"gpu": 5}, {"bundles": [{"gpu": 3}, {"gpu": 2}], "strategy": "STRICT_PACK"})
    detail = desk.expect("placed", "a")
    assert detail["strategy"] == "STRICT_PACK"
    assert detail["bundles"] == [{"CPU": 1.0, "GPU": 3.0}, {"CPU": 1.0, "GPU": 2.0}]
    assert work_in(local_ray, detail, bundle=0) == [detail["pg"], 2]
    desk.gone_after("a")
    wrong = live(labels={"market-type": "in(spot"})
    wrong.placer.place("b", 1, {"gpu": 1}, {})
    assert wrong.expect("unplaced", "b").startswith("not placed: ")
