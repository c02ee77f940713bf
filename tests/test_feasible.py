"""The cut of the wish for nodes to what the cluster's node types can provide.

Fault it stands for: one infeasible bundle, for which Ray's autoscaler brings up nothing for anybody. The judge is
Ray's own scheduler: what is left after the cut it can provide, whatever the types, nodes and wishes are.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_pools.core.bundles import Bundle
from ray_pools.core.feasible import Cluster, Node, NodeType, feasible, marked, marker, matches
from ray_pools.core.prewarm import Wish

A = NodeType("a", {"CPU": 8.0, "GPU": 4.0}, {"kind": "a"}, 2)
B = NodeType("b", {"CPU": 8.0, "GPU": 4.0}, {"kind": "b"}, 3)
HEAD = Node("head", {"CPU": 2.0}, {}, is_head=True)


def gpus(*counts: float) -> list[Bundle]:
    return [{"CPU": 1.0, "GPU": float(count)} for count in counts]


def wish(pool: str, *counts: float, **labels: str) -> Wish:
    return Wish(pool, gpus(*counts), labels or {"kind": pool})


@pytest.mark.parametrize(
    ("wishes", "cluster", "kept", "why"),
    [
        # beyond max_workers of a type: the rest stays, and so does the other pool's
        (
            [wish("a", 4, 4, 4, 2), wish("b", 4)],
            Cluster([A, B]),
            {"a": gpus(4, 4), "b": gpus(4)},
            {"a": (2, 6.0, "max_workers 2 of a")},
        ),
        # larger than any node, and a label that none has
        (
            [wish("a", 8, 1), wish("b", 1, kind="c")],
            Cluster([A, B]),
            {"a": gpus(1)},
            {
                "a": (1, 8.0, "no node type has CPU 1, GPU 8 and labels kind=a"),
                "b": (1, 1.0, "no node type has CPU 1, GPU 1 and labels kind=c"),
            },
        ),
        # fewer workers altogether: pools take turns, and none is left without
        (
            [wish("a", 4, 4), wish("b", 4, 4, 4)],
            Cluster([A, B], 3),
            {"a": gpus(4, 4), "b": gpus(4)},
            {"b": (2, 8.0, "max_workers of the cluster")},
        ),
        # others' nodes are workers, too; the head is none
        (
            [wish("a", 4, 4)],
            Cluster([A], 2, [HEAD, Node("cpu", {"CPU": 9.0}, {})]),
            {"a": gpus(4)},
            {"a": (1, 4.0, "max_workers of the cluster")},
        ),
        # nodes that are there count, also of no known type
        ([wish("a", 4, 4, 4)], Cluster([A], 2, [Node("a", A.resources, A.labels)]), {"a": gpus(4, 4)}, "a"),
        ([wish("a", 2, 2)], Cluster([], 0, [Node("", A.resources, A.labels)]), {"a": gpus(2, 2)}, {}),
    ],
)
def test_what_can_not_be_had_is_cut(
    wishes: list[Wish], cluster: Cluster, kept: dict[str, list[Bundle]], why: Any
) -> None:
    found = feasible(wishes, cluster)
    assert {each.pool: each.bundles for each in found.wishes} == kept
    if isinstance(why, str):
        assert list(found.cuts) == [why]
    else:
        assert {pool: tuple(cut) for pool, cut in found.cuts.items()} == why


def test_how_many_nodes_a_pool_wants() -> None:
    found = feasible([wish("a", 2, 2, 1), wish("b", 1, kind="in(a,b)"), wish("c", 1)], Cluster([A, B]))
    assert found.nodes == {"a": 2, "b": 1, "c": 0}


def test_without_growing_only_what_is_there_counts() -> None:
    found = feasible([wish("a", 4, 4)], Cluster([A], 5, [Node("a", A.resources, A.labels)]), grows=False)
    assert [each.bundles for each in found.wishes] == [gpus(4)]
    assert found.nodes == {"a": 1}


def test_selectors_are_rays() -> None:
    for said, label, match in (
        ("x", "x", True), ("x", "y", False), ("x", None, False), ("!x", None, True), ("!x", "x", False),
        ("in(x, y)", "y", True), ("!in(x,y)", "y", False), ("!in(x,y)", "z", True),
    ):  # fmt: skip
        assert matches({"k": said}, {} if label is None else {"k": label}) is match


def test_a_type_is_told_by_a_resource_of_its_own_where_labels_are_not_looked_at() -> None:
    own = A._replace(resources={**A.resources, "a_node": 1.0})
    assert marker({"kind": "a"}, [own, B]) == "a_node"
    assert marker({"kind": "b"}, [own, B]) is None
    assert marker({"kind": "a"}, [A]) == "" == marker({"kind": "c"}, [A, B])
    assert marked(wish("a", 2), [own, B]).bundles == [{"CPU": 1.0, "GPU": 2.0, "a_node": 0.001}]
    assert marked(wish("b", 2), [own, B]) == wish("b", 2)


# --- against Ray's own scheduler

KINDS = ("x", "y")
labels_of = st.sampled_from(KINDS).map(lambda kind: {"kind": kind})
resources = st.builds(
    lambda cpus, gpus: {"CPU": float(cpus), "GPU": float(gpus)}, st.integers(1, 16), st.integers(1, 8)
)
node_types = st.lists(st.tuples(resources, labels_of, st.integers(0, 4)), min_size=1, max_size=3).map(
    lambda found: [NodeType(f"t{i}", *each) for i, each in enumerate(found)]
)
wishes_of = st.lists(
    st.tuples(
        st.integers(1, 9),
        st.integers(1, 8),
        st.sampled_from([{}, {"kind": "x"}, {"kind": "y"}, {"kind": "!x"}]),
    ),
    min_size=1,
    max_size=3,
).map(
    lambda found: [
        Wish(f"p{i}", [{"CPU": 1.0, "GPU": float(size)}] * count, selector)
        for i, (size, count, selector) in enumerate(found)
    ]
)


def ray_can_provide(wishes: list[Wish], types: list[NodeType], most: int) -> bool:
    """Ray's autoscaler v2 on a cluster of a head alone."""
    from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig
    from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
    from ray.autoscaler.v2.utils import ResourceRequestUtil
    from ray.core.generated.autoscaler_pb2 import ClusterResourceConstraint
    from ray.core.generated.common_pb2 import LabelSelector, LabelSelectorConstraint, LabelSelectorOperator

    constraint = ClusterResourceConstraint()
    for each in wishes:
        selector = LabelSelector(
            label_constraints=[
                LabelSelectorConstraint(
                    label_key=key,
                    operator=LabelSelectorOperator.LABEL_OPERATOR_NOT_IN
                    if said.startswith("!")
                    else LabelSelectorOperator.LABEL_OPERATOR_IN,
                    label_values=[said.removeprefix("!")],
                )
                for key, said in each.selector.items()
            ]
        )
        for bundle in each.bundles:
            by_count = constraint.resource_requests.add(count=1)
            by_count.request.resources_bundle.update(bundle)
            if each.selector:
                by_count.request.label_selectors.append(selector)
    assert ResourceRequestUtil is not None
    configs = {
        kind.name: NodeTypeConfig(
            kind.name, 0, kind.most, resources=dict(kind.resources), labels=dict(kind.labels)
        )
        for kind in types
    }
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=configs,
        max_num_nodes=most,
        cluster_resource_constraints=[constraint],
    )
    reply = ResourceDemandScheduler(None).schedule(request)
    return not reply.infeasible_cluster_resource_constraints


@given(wishes_of, node_types, st.integers(1, 8))
def test_what_is_left_rays_own_scheduler_can_provide(
    wishes: list[Wish], types: list[NodeType], most: int
) -> None:
    found = feasible(wishes, Cluster(types, most))
    assert not found.wishes or ray_can_provide(found.wishes, types, most)
    for each in wishes:  # nothing is invented, and nothing is lost without a word
        kept = sum(len(left.bundles) for left in found.wishes if left.pool == each.pool)
        assert kept + (found.cuts[each.pool].bundles if each.pool in found.cuts else 0) == len(each.bundles)
