"""A pool's placement that fits no node, said before its grants wait for nodes in vain (docs/rules.md section 7).

Fault: a label that is misspelt, or a node that is larger than there are any, is found only when a grant was given back
after its time, and then the reason is in the log alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_pools.cli.explaining import explained, why_lines
from ray_pools.config import PlacementModel
from ray_pools.core import records as ev
from ray_pools.core.config_rules import PoolConfig
from ray_pools.core.feasible import Cluster, Node, NodeType
from ray_pools.core.unplaceable import unplaceable
from ray_pools.store import open_store

SPOT = NodeType("spot", {"CPU": 8.0, "GPU": 4.0}, {"kind": "spot"}, 3)
HEAD = Node("head", {"CPU": 2.0}, {"kind": "head"}, is_head=True)
CLUSTER = Cluster([SPOT], None, [HEAD])


@pytest.mark.parametrize(
    ("placement", "capacity", "why"),
    [
        ({}, {"gpu": 64}, ""),  # several nodes may have it
        ({"labels": {"kind": "spot"}, "node": {"gpu": 4}}, {"gpu": 8}, ""),
        ({"labels": {"kind": "!head"}}, {"gpu": 8}, ""),
        ({"labels": {"kind": "spto"}}, {"gpu": 8}, "no node has labels kind=spto, nor has any node type"),
        ({"node": {"gpu": 64}}, {"gpu": 64}, "placement.node says gpu 64, but the largest node has GPU 4"),
        (
            {"labels": {"kind": "head"}},
            {"gpu": 8},
            "no node with its labels has any GPU (its gpu), nor has any node type",
        ),
        ({"labels": {"kind": "head"}}, {"licence": 3}, ""),  # of what only counts nothing is placed
        ({"node": {"mcpu": 8000}}, {"mcpu": 8000}, ""),
        (
            {"node": {"mcpu": 9000}},
            {"mcpu": 9000},
            "placement.node says mcpu 9000, but the largest node has CPU 8",
        ),
    ],
)
def test_what_fits_no_node_is_said(placement: dict[str, Any], capacity: dict[str, int], why: str) -> None:
    pool = PoolConfig("p", capacity, placement=PlacementModel(**placement).model_dump())
    assert unplaceable(pool, CLUSTER) == why


def test_where_nothing_is_placed_or_known_nothing_is_said() -> None:
    assert unplaceable(PoolConfig("p", {"gpu": 1}), CLUSTER) == ""
    assert (
        unplaceable(PoolConfig("p", {"gpu": 1}, placement=PlacementModel().model_dump()), Cluster([])) == ""
    )


class _Client:
    """Of a request that was given back because it could not be placed."""

    def __init__(self, store: str) -> None:
        self.store = store

    def get(self, id: str) -> dict[str, Any]:
        return {"id": id, "requester": "team", "state": "queued", "k": 2, "amounts": {"gpu": 1}}

    def explain(self, id: str, estimate: bool) -> dict[str, dict[str, Any]]:
        return {"a": {"cause": "paused", "text": "a could not place it, and tries again in 5 s"}}

    def config(self) -> dict[str, Any]:
        return {"store": self.store}


def test_why_gives_the_reason_with_the_pause(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), "pool:a")
    store.open()
    reasons = (
        ("r", "not placed within 20 s: no node can hold it"),
        ("other", "not placed: its group was removed"),
    )
    rows = [(float(n), ev.pack(ev.Ending(id, 1, "returned", why))) for n, (id, why) in enumerate(reasons)]
    store.append(rows, 0)
    store.close()
    client: Any = _Client(str(tmp_path))
    assert (
        "  a: paused: a could not place it, and tries again in 5 s (not placed within 20 s: no node can hold it)"
        in why_lines(explained(client, "r"))
    )
    elsewhere: Any = _Client(str(tmp_path / "none"))  # the logs are on another machine
    assert "  a: paused: a could not place it, and tries again in 5 s" in why_lines(explained(elsewhere, "r"))
