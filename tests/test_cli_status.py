"""What `pools status` says of nodes (docs/prewarming.md, "Status"), in a terminal's width.

Fault it stands for: something that an operator must know of nodes, and that is nowhere to be seen.
"""

from __future__ import annotations

from typing import Any

import pytest

from ray_pools.cli.status import _show as show_status
from ray_pools.cli.status import node_rows, nodes_lines, prewarm_text


def test_what_is_said_of_nodes() -> None:
    wished = {"error": "", "wanted": {"a100": {"gpus": 8.0}}, "autoscaler": "v2"}
    said: dict[str, Any] = {
        "prewarm": {
            **wished,
            "through": "AutoscalingCoordinator",
            "cut": {"a100": {"bundles": 2, "gpus": 8.0, "why": "max_workers 2 of a100"}},
            "overwritten": 2,
            "overwritten_s_ago": 30.0,
            "overwritten_by": "CPU 7",
            "labels_ignored": ["b"],
            "others_cut": {"bundles": 3, "gpus": 0.0, "why": "max_workers of the cluster"},
        },
        "nodes": {
            "a100": {"wanted": 2, "starting": 1, "ready": 1},
            "b": {"wanted": None, "starting": None, "ready": 0},
        },
        "announced": [
            {
                "id": "w",
                "pool": "a100",
                "amounts": {"gpu": 4},
                "requester": "",
                "by": "al@h",
                "left_s": 600,
                "over": "",
            }
        ],
        "outside": {
            "jobs": [
                {"job": "02", "entrypoint": "python x.py", "gpus": 1.0, "pools": ["b"], "what": ["a task"]}
            ],
            "trouble": "",
        },
    }
    assert node_rows(said) == [
        ("a100", 2, 1, 1, "gpu 4", "8 GPUs: max_workers 2 of a100"),
        ("b", "?", "?", 0, "-", "-"),
    ]
    lines = nodes_lines(said)
    assert lines[0] == "prewarming: a100 8 GPUs (autoscaler: v2 through AutoscalingCoordinator)"
    assert "written over 2 times, last 30 s ago (there stood CPU 7)" in lines[1]
    assert "3 bundles: max_workers of the cluster" in lines[2]
    assert "v1 does not look at labels: nodes of other types may come up for b" in lines[3]
    assert lines[4] == "announced: w: gpu 4 of pool a100, announced by al@h for the next 10 min"
    assert lines[5] == "1 GPU of pool b is used without a slot, by job 02 (python x.py): a task"
    assert len(lines) == 6
    none = prewarm_text({**wished, "autoscaler": "none"})
    assert none == (
        "prewarming: this cluster has no autoscaler, so no node comes up by itself (wanted: a100 8 GPUs)"
    )
    # a coordinator of before says nothing of nodes
    assert (node_rows({}), nodes_lines({})) == ([], ["prewarming: off"])


def test_the_tables_of_status_fit_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 columns, with names and amounts as they are usual."""
    monkeypatch.setattr("ray_pools.cli.output.WIDTH_OF_FILES", 80)
    amounts = {"capacity": {"memory_mb": 1048576}, "held": {"memory_mb": 1048576}}
    each = {"booked": {"memory_mb": 1048576}, "borrowed": {"memory_mb": 524288}}
    pool = {
        **amounts,
        "nominated": ["x"],
        "waiting": 1000,
        "requesters": {
            "research": {
                **each,
                "priority": 10,
                "grants": 10,
                "waiting": 1000,
                "reserved": {"gpu": 16},
                "limit": {"gpu": 32},
            }
        },
    }
    cut = {"bundles": 2, "gpus": 8.0, "why": "max_workers 2 of gpu_ondemand"}
    nodes = {"wanted": 12, "starting": 10, "ready": 2}
    found = {
        "coordinator": {"requests": {}, "prewarm": {"error": "", "wanted": {}, "cut": {"reserved": cut}},
                        "nodes": {"reserved": nodes}},
        "pools": {"reserved": pool},
    }  # fmt: skip
    show_status("pools", found)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = [line for line in lines if "max_workers" in line]
    assert row.split()[:4] == ["reserved", "12", "10", "2"]
