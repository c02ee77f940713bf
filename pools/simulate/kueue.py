"""Kueue's public performance set-up as a configuration and a trace: for `pools simulate`, and live for `pools replay`.

    python -m ray_pools.simulate.kueue DIR [--cohorts N]

writes DIR/kueue.yaml and DIR/kueue.csv: five cohorts, each a pool of 120 units for six requesters with 20 reserved and
a limit of 120. Each requester brings 350 small jobs (1 unit, 200 ms, one every 100 ms), 100 medium ones (5 units, 500
ms, every 500 ms) and 50 large ones (20 units, 1 s, every 1.2 s): 15,000 jobs. Kueue gives them the priorities 50, 100
and 200. Here a priority belongs to a policy, not to a job: the column is in the trace, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

from ..cli.app import OneLineCommand
from ..core.config_rules import PolicyConfig, PoolConfig
from ..trace import TraceJob

COHORTS = 5
REQUESTERS = 6
CAPACITY = 120
RESERVED = 20


class Class(NamedTuple):
    """Jobs of one kind: how many a requester has, of which size, how long and how often."""

    jobs: int
    gpus: int
    duration_s: float
    every_s: float
    priority: int


CLASSES = (
    Class(350, 1, 0.2, 0.1, 50),
    Class(100, 5, 0.5, 0.5, 100),
    Class(50, 20, 1.0, 1.2, 200),
)


def configuration(cohorts: int = COHORTS) -> tuple[dict[str, PoolConfig], list[PolicyConfig]]:
    """Pools and policies."""
    names = [f"cohort{number}" for number in range(1, cohorts + 1)]
    pools = {name: PoolConfig(name, {"gpu": CAPACITY}, grace_s=1.0) for name in names}
    policies = [
        PolicyConfig(name, f"{name}-{number}", 0, {"gpu": RESERVED}, {"gpu": CAPACITY})
        for name in names
        for number in range(1, REQUESTERS + 1)
    ]
    return pools, policies


def trace(cohorts: int = COHORTS) -> list[TraceJob]:
    """All jobs, by submission."""
    rows = sorted(
        (round(n * kind.every_s, 6), cohort, number, kind.priority, kind)
        for cohort in range(1, cohorts + 1)
        for number in range(1, REQUESTERS + 1)
        for kind in CLASSES
        for n in range(kind.jobs)
    )
    return [
        TraceJob(str(row), at, kind.duration_s, kind.gpus, f"cohort{cohort}-{number}", priority)
        for row, (at, cohort, number, priority, kind) in enumerate(rows, 1)
    ]


def trace_text(jobs: Sequence[TraceJob]) -> str:
    """The trace as a file."""
    lines = ["submit_s,duration_s,gpus,requester,priority"]
    lines += [
        f"{job.submit_s:g},{job.duration_s:g},{job.gpus},{job.requester},{job.priority}" for job in jobs
    ]
    return "\n".join(lines) + "\n"


def config_text(cohorts: int = COHORTS) -> str:
    """The configuration as a file."""
    pools, policies = configuration(cohorts)
    lines = [
        "# Kueue's public performance set-up, made by python -m ray_pools.simulate.kueue",
        "namespace: kueue",
    ]
    lines += ["", "pools:"]
    lines += [
        f"  {name}: {{capacity: {{gpu: {CAPACITY}}}, grace_s: {pool.grace_s:g}, placement: none}}"
        for name, pool in pools.items()
    ]
    lines += ["", "policies:"]
    lines += [
        f"  - {{pool: {policy.pool}, requester: {policy.requester}, reserved: {{gpu: {RESERVED}}},"
        f" limit: {{gpu: {CAPACITY}}}}}"
        for policy in policies
    ]
    return "\n".join(lines) + "\n"


@click.command(cls=OneLineCommand)
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--cohorts", type=click.IntRange(1, 1000), default=COHORTS, show_default=True)
def main(folder: Path, cohorts: int) -> None:
    """Write kueue.yaml and kueue.csv into DIR."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kueue.yaml").write_text(config_text(cohorts), encoding="utf-8")
    (folder / "kueue.csv").write_text(trace_text(trace(cohorts)), encoding="utf-8")
    click.echo(f"wrote {folder / 'kueue.yaml'} and {folder / 'kueue.csv'}")


if __name__ == "__main__":
    main()
