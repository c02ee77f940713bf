"""`pools scenario`: play scenario files on the core in memory, or on live actors (docs/rules.md section 11)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from ray_pools.cli.connection import address_option, connect_ray, keep_ray_quiet, use_local
from ray_pools.cli.output import progress
from ray_pools.counting import counted
from ray_pools.errors import BadInput

if TYPE_CHECKING:
    from ray_pools.scenario import WorldFactory


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path())
@click.option("--trace", is_flag=True, help="One JSON line per step on stdout; the summary goes to stderr.")
@click.option("--select", metavar="PATTERN", multiple=True, help="Only scenarios of this name or pattern.")
@click.option(
    "--live", is_flag=True, help="On real actors: in the cluster at --address, else in one of its own."
)
@address_option
def scenario(
    files: tuple[str, ...], trace: bool, select: tuple[str, ...], live: bool, address: str | None
) -> None:
    """Play scenario files and say what did not hold: unit tests for a team's policies.

    With --live the pools are real actors, whose clock the runner moves and whose processes `restart` kills.
    """
    from ray_pools.core.system import make_world
    from ray_pools.scenario import run_files

    trace_out = sys.stdout if trace else None
    if live:
        run_files(
            files, make_world, select=select
        )  # a file that can't be read is found before a cluster starts
        with _live_worlds(address) as make_live_world:
            report = run_files(files, make_live_world, trace_out=trace_out, select=select)
    else:
        report = run_files(files, make_world, trace_out=trace_out, select=select)
    if not report.scenarios:
        raise BadInput("--select", ", ".join(select), "the name of a scenario in these files, or a pattern")
    for failure in report.failures:
        click.echo(failure.text(), err=trace)
    if report.ok:
        click.echo(
            f"{counted(report.scenarios, 'scenario')}, {counted(report.steps, 'step')}: all hold", err=trace
        )
    else:
        click.echo(
            f"{counted(report.scenarios, 'scenario')}, {counted(report.steps, 'step')}: {report.failed} failed,"
            f" {counted(len(report.failures), 'expectation')} did not hold",
            err=trace,
        )
        click.get_current_context().exit(1)


@contextmanager
def _live_worlds(address: str | None) -> Iterator[WorldFactory]:
    """Worlds of live actors, in a cluster that is stopped at the end if it was started here."""
    from ray_pools.local_cluster import LocalCluster

    started = None
    if address is None:
        started = LocalCluster({}, dashboard=False, on_event=progress, ends_with_starter=True).start()
        use_local(started)
    try:
        keep_ray_quiet()
        from ray_pools.actors import deploy, live_world
        from ray_pools.client import disconnect_ray

        with deploy.empty_directory():
            connect_ray(address)
        yield live_world.make_world
        disconnect_ray()
    finally:
        if started is not None:
            started.stop()
