"""Shares out of a trace's demand (`pools advise`), and Kueue's performance set-up as a trace.

Faults it stands for: a mean over the wrong time, shares beyond what there is, a share that no job of its team fits in
although there was room, advice that can't be used as a configuration; a set-up that is not the public one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ray_pools.cli.app import pools as cli
from ray_pools.config import load_config
from ray_pools.simulate import advise, kueue
from ray_pools.simulate.play import play
from ray_pools.simulate.report import report_of
from ray_pools.trace import TraceJob, read_trace

# 100 s: a asks for 4 all along, b for 10 in the first half, c for 30 for 10 s in the middle
TRACE = [
    TraceJob("1", 0.0, 100.0, 4, "a"),
    TraceJob("2", 0.0, 50.0, 10, "b"),
    TraceJob("3", 45.0, 10.0, 30, "c"),
    TraceJob("4", 100.0, 1.0, 1, "b"),
]


def test_demand_is_what_would_run_if_nobody_waited() -> None:
    found = advise.demands(TRACE)
    assert found["a"] == advise.Demand(4.0, 4, 4, 4)
    assert found["b"] == advise.Demand(5.0, 10, 10, 10)
    assert found["c"] == advise.Demand(3.0, 30, 30, 30)


@pytest.mark.parametrize(
    ("gpus", "wanted"),
    [
        (64, {"a": 4, "b": 10, "c": 30}),  # there is room for everybody's largest job
        (17, {"a": 4, "b": 10, "c": 3}),
        (12, {"a": 4, "b": 5, "c": 3}),
        (6, {"a": 2, "b": 2, "c": 1}),  # half of everybody's mean, rounded down, and no room for a whole job
        (1, {"a": 0, "b": 0, "c": 0}),
    ],
)
def test_shares_follow_the_rule(gpus: int, wanted: dict[str, int]) -> None:
    found = advise.shares(advise.demands(TRACE), gpus)
    assert sum(found.values()) <= gpus
    assert found == wanted


def test_the_command_shows_the_trade_and_its_configuration_is_one(tmp_path: Path) -> None:
    trace = tmp_path / "jobs.csv"
    rows = [f"{job.submit_s},{job.duration_s},{job.gpus},{job.requester}" for job in TRACE]
    rows = [row.replace(",a", ",'yes: #1") for row in rows]
    trace.write_text("submit_s,duration_s,gpus,requester\n" + "\n".join(rows) + "\n")

    def invoke(*more: str) -> str:
        result = CliRunner().invoke(cli, ["advise", str(trace), "--gpus", "17", *more])
        assert result.exit_code == 0, result.output
        return result.output

    said = json.loads(invoke("--json"))
    assert list(said["configs"]) == ["advised shares", "hard partitions", "one queue"]
    assert said["configs"]["hard partitions"]["total"]["rejected"] == 1
    assert {team: each["reserved"] for team, each in said["teams"].items()} == {
        "'yes: #1": 4,
        "b": 10,
        "c": 3,
    }
    text = invoke()
    assert "17 GPUs, 0 of them unreserved" in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    config = tmp_path / "advised.yaml"
    config.write_text(invoke("--yaml"))
    assert config.read_text().startswith("# placement: none makes a pool that only counts")
    assert {p.requester: p.reserved for p in load_config(config).policies} == {
        "'yes: #1": {"gpu": 4},
        "b": {"gpu": 10},
        "c": {"gpu": 3},
    }
    result = CliRunner().invoke(cli, ["advise", str(trace), "--gpus", "0"])
    assert result.exit_code == 2
    assert "--gpus = 0: an integer from 1" in result.output


def test_kueues_set_up(tmp_path: Path) -> None:
    """Five cohorts of 120 units and 3,000 jobs, of which each requester has 350, 100 and 50."""
    result = CliRunner().invoke(kueue.main, [str(tmp_path)])
    assert result.exit_code == 0, result.output
    config, trace = load_config(tmp_path / "kueue.yaml"), read_trace(tmp_path / "kueue.csv")
    assert [pool.capacity for pool in config.pools.values()] == [{"gpu": 120}] * 5
    assert len(config.policies) == 30
    assert {(p.reserved["gpu"], p.limit["gpu"]) for p in config.policies} == {(20, 120)}
    assert len(trace) == 15_000
    mine = [job for job in trace if job.requester == "cohort2-3"]
    for count, gpus, duration_s, priority, last_s in (
        (350, 1, 0.2, 50, 34.9),
        (100, 5, 0.5, 100, 49.5),
        (50, 20, 1.0, 200, 58.8),
    ):
        found = [job for job in mine if job.gpus == gpus]
        assert len(found) == count
        assert {(job.duration_s, job.priority) for job in found} == {(duration_s, priority)}
        assert found[-1].submit_s == last_s


def test_kueues_set_up_in_virtual_time() -> None:
    pools, policies = kueue.configuration(1)
    total = report_of(play(pools, policies, kueue.trace(1)))["total"]
    assert (total["jobs"], total["done"], total["unmet_share_gpu_h"]) == (3000, 3000, 0.0)
    assert total["utilisation"] > 0.5
