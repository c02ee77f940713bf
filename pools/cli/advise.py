"""`pools advise`: shares out of a trace's demand, and what they would cost and give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ray_pools.cli.connection import json_option
from ray_pools.cli.output import print_json, print_table
from ray_pools.cli.simulate import WIDTH, Seconds, number_text, span_text, window
from ray_pools.counting import counted
from ray_pools.limits import AMOUNT_MAX, check_integer


@click.command()
@click.argument("trace", type=click.Path())
@click.option("--gpus", type=int, required=True, metavar="N", help="How many GPUs there are to share.")
@click.option("--from", "from_s", type=Seconds(), help="Only jobs submitted at this time or later: 28d, 6h.")
@click.option("--to", "to_s", type=Seconds(), help="Only jobs submitted before this time.")
@click.option("--yaml", "as_yaml", is_flag=True, help="Only the configuration, to go on with.")
@json_option
def advise(
    trace: str, gpus: int, from_s: float | None, to_s: float | None, as_yaml: bool, as_json: bool
) -> None:
    """Advise reserved shares for the teams of TRACE, each about its mean demand, and show what they trade.

    A simulation puts the advised shares beside hard partitions of the same size and one queue for all. Nothing is
    changed. How shares are worked out: docs/simulation.md.
    """
    from ray_pools.simulate.advise import advise as advised
    from ray_pools.simulate.advise import config_text
    from ray_pools.trace import read_trace

    check_integer("--gpus", gpus, 1, AMOUNT_MAX)
    said = advised(window(read_trace(trace), from_s, to_s, trace), gpus)
    if as_yaml:
        click.echo(config_text(said), nl=False)
    elif as_json:
        print_json(said)
    else:
        _show(said)


def _show(said: Mapping[str, Any]) -> None:
    reports = list(said["configs"].values())
    rows = [
        [
            team,
            each["reserved"],
            f"{each['mean']:.1f}",
            each["p95"],
            each["most"],
            each["largest_job"],
            *(span_text(report["teams"][team]["wait_s"]["mean"]) for report in reports),
        ]
        for team, each in said["teams"].items()
    ]
    columns = ("team", "#reserve", "#mean demand", "#p95", "#most", "#largest job")
    waits = [f"#wait, {name}" for name in said["configs"]]
    title = f"{counted(said['gpus'], 'GPU')}, {said['unreserved']} of them unreserved"
    print_table((*columns, *waits), rows, title, WIDTH)
    click.echo()
    totals = [
        [
            name,
            f"{total['utilisation']:.3f}",
            f"{total['goodput']:.3f}",
            span_text(total["wait_s"]["mean"]),
            span_text(total["wait_s"]["p50"]),
            number_text(total["bounded_slowdown"]["p50"]),
            total["preemptions_suffered"],
            f"{total['lost_gpu_h']:,.0f}",
            f"{total['rejected_gpu_h']:,.0f}",
        ]
        for name, total in ((name, report["total"]) for name, report in said["configs"].items())
    ]
    more = ("#wait mean", "#wait p50", "#slowdown p50", "#preempted", "#lost GPU-h", "#rejected GPU-h")
    print_table(("with", "#utilisation", "#goodput", *more), totals, "", WIDTH)
    click.echo("\nNothing was changed. `--yaml` prints the shares as a configuration.")
