"""What is seen of the cluster's nodes: those of each pool, and GPUs that somebody uses without a slot.

Faults it stands for: a grant's own GPUs, or a group that is just coming, called somebody's; a job that hides behind a
placement group; one that may use GPUs, since its grant only counts, called a thief; a table that can't be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray_pools.actors.cluster_watch import ClusterWatch, Group, NodeView, Outside, Use, nodes_of_pools
from ray_pools.core.feasible import NodeType

SPOT = {"spot": ({"kind": "spot"}, frozenset({"GPU"}))}
PREFIX = "ray-pools:ns:"


def node(free: float, groups: dict[str, float] | None = None, id: str = "n1", kind: str = "spot") -> NodeView:
    return NodeView(id, kind, {"kind": kind}, {"GPU": 4.0, "CPU": 8.0}, free, groups or {})


class PaperTables:
    """Ray's tables as a test has them."""

    def __init__(self) -> None:
        self.there: list[NodeView] = []
        self.groups: dict[str, Group] = {}
        self.of_actors: list[Use] = []
        self.of_workers: list[Use] = []
        self.asked: list[str] = []

    def nodes(self) -> list[NodeView]:
        return self.there

    def group(self, hex: str) -> Group | None:
        self.asked.append(hex)
        return self.groups.get(hex)

    def actors(self) -> list[Use]:
        self.asked.append("actors")
        return self.of_actors

    def workers(self, node: str) -> list[Use]:
        self.asked.append(f"workers of {node}")
        return [use for use in self.of_workers if use.node == node]

    def jobs(self) -> dict[str, str]:
        return {"01": "python train.py"}

    def starting(self) -> dict[str, int]:
        return {"spot": 1}

    def node_types(self) -> Sequence[NodeType]:
        return [NodeType("spot", {"GPU": 4.0}, {"kind": "spot"}, 2)]


def looks(
    tables: PaperTables, *nodes: NodeView, excused: frozenset[str] = frozenset()
) -> list[dict[str, Any]]:
    """What the second of two looks finds."""
    outside = Outside(tables, PREFIX)
    assert outside.look(nodes, SPOT, excused) == []
    return outside.look(nodes, SPOT, excused)


def test_grants_are_not_outside_and_cost_no_look_at_actors() -> None:
    tables = PaperTables()
    tables.groups = {"aa": Group(PREFIX + "spot:x:1", "00")}
    assert looks(tables, node(1.0, {"aa": 3.0})) == []
    assert tables.asked == ["aa"], "a group is asked for once"


def test_tasks_actors_and_groups_of_a_job_are_told_together() -> None:
    tables = PaperTables()
    tables.groups = {"aa": Group(PREFIX + "spot:x:1", "00"), "bb": Group("mine", "01")}
    tables.of_actors = [Use("n1", "01", "actor A", 1.0), Use("elsewhere", "01", "actor B", 1.0)]
    tables.of_workers = [Use("n2", "01", "a task", 2.0)]
    found = looks(
        tables,
        node(0.0, {"aa": 2.0, "bb": 1.0}),
        node(2.0, id="n2"),
        node(0.0, id="n3", kind="other"),  # of no pool: whoever uses it takes nothing from these
    )
    assert found == [
        {
            "job": "01",
            "entrypoint": "python train.py",
            "gpus": 4.0,
            "pools": ["spot"],
            "nodes": ["n1", "n2"],
            "what": ["a task", "actor A", "placement group mine"],
        }
    ]


def test_what_nobody_owns_up_to_is_told_too() -> None:
    (found,) = looks(PaperTables(), node(1.5, {"gone": 1.0}))
    assert (found["job"], found["gpus"], found["entrypoint"]) == ("?", 2.5, "")


def test_one_look_alone_is_none_for_groups_come_and_go_in_between() -> None:
    tables = PaperTables()
    tables.of_workers = [Use("n1", "01", "a task", 1.0)]
    outside = Outside(tables, PREFIX)
    assert outside.look([node(3.0)], SPOT, frozenset()) == []
    assert outside.look([node(4.0)], SPOT, frozenset()) == []
    assert outside.look([node(3.0)], SPOT, frozenset()) == []
    assert outside.look([node(3.0)], SPOT, frozenset())[0]["gpus"] == 1.0


def test_jobs_that_hold_a_grant_which_only_counts_are_left_out() -> None:
    tables = PaperTables()
    tables.of_workers = [Use("n1", "01", "a task", 1.0)]
    assert looks(tables, node(3.0), excused=frozenset({"01"})) == []


def test_nodes_of_pools_are_those_with_their_labels_and_resources() -> None:
    both = {**SPOT, "any": ({}, frozenset({"GPU"}))}
    head = NodeView("h", "head", {}, {"CPU": 4.0}, 0.0, {}, is_head=True)
    types = PaperTables().node_types()
    found = nodes_of_pools([node(4.0), head, node(4.0, kind="other")], {"spot": 1, "other": 2}, types, both)
    assert found == {"spot": {"ready": 1, "starting": 1}, "any": {"ready": 2, "starting": 1}}
    assert nodes_of_pools([], {"spot": 1}, [], SPOT) == {"spot": {"ready": 0, "starting": None}}
    assert nodes_of_pools([], {}, [], SPOT) == {"spot": {"ready": 0, "starting": 0}}


def test_a_look_that_fails_leaves_what_was_seen_and_says_why() -> None:
    tables = PaperTables()
    tables.there = [node(4.0)]
    watch = ClusterWatch(tables, PREFIX, lambda: SPOT, period_s=3600.0)
    watch.look()
    seen = watch.status()
    assert (seen["nodes"], seen["trouble"]) == ({"spot": {"ready": 1, "starting": 1}}, "")
    tables.nodes = None  # type: ignore[assignment, method-assign]
    watch.look()
    assert watch.status()["nodes"] == seen["nodes"]
    assert "TypeError" in watch.status()["trouble"]
    watch.close()
