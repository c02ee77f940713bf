"""Writes docs/itp.md: what the simulation says of the three configurations here for the ITP trace.

python examples/itp_1152/page.py itp2021.csv.gz > docs/itp.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from ray_pools.cli.simulate import load_configs
from ray_pools.simulate.advise import demands
from ray_pools.simulate.files import markdown
from ray_pools.simulate.play import play
from ray_pools.simulate.report import comparison
from ray_pools.trace import read_trace

HEAD = """\
# Three policies for ten teams

This page is generated: `python examples/itp_1152/page.py itp2021.csv.gz > docs/itp.md`. It shows what
[`pools simulate`](simulation.md) says of three configurations for one real trace: 60 days of Microsoft's ITP clusters
(2021; ten clusters read as ten teams; github.com/microsoft/elasticflow-traces, MIT), 69,351 jobs of 1 to 64 GPUs, here
on 1,152 GPUs, of which they would use {used:,.0f} on average if nobody waited.

- [hard_partitions](../examples/itp_1152/hard_partitions.yaml): each team has GPUs of its own (`limit` = `reserved`).
- [one_queue](../examples/itp_1152/one_queue.yaml): nothing is reserved; the oldest goes first, smaller ones may pass
  it for five minutes.
- [shares_with_borrowing](../examples/itp_1152/shares_with_borrowing.yaml): the same numbers as shares that are lent
  while they are idle. Preempted jobs have no checkpoints and begin anew.

"""

TAIL = """
## What it shows

- Hard partitions leave a third of the GPUs idle until the last job is done, while jobs of the same minute wait for
  days: a team's load comes in waves, and its own GPUs alone must take them. What is larger than a partition is
  rejected.
- One queue wastes least, and makes everybody wait for everybody: half of all jobs wait for most of a day, also those
  of a team that asks for less than its part.
- Shares with borrowing cost some points of utilisation against one queue. Who stays within its share does not wait,
  so that the median wait is the lowest; the mean is made by what the teams ask for beyond their shares. The work that
  preemption throws away is below one percent, without any checkpoint.
- Unmet share: GPU-hours of requests that stood in their share beyond the bound of [rules](rules.md) section 10.4.
"""


def main(trace: str) -> None:
    """Prints the page."""
    folder = Path(__file__).parent
    names = ("hard_partitions", "one_queue", "shares_with_borrowing")
    jobs = read_trace(trace)
    configs = load_configs([str(folder / f"{name}.yaml") for name in names])
    played = {name: play(*config, jobs) for name, config in configs.items()}
    used = sum(demand.mean for demand in demands(jobs).values())
    print(HEAD.format(used=used) + markdown(comparison(jobs, played)) + TAIL, end="")


if __name__ == "__main__":
    main(sys.argv[1])
