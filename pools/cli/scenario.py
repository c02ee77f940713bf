"""`pools scenario`: play scenario files on the core in memory (docs/rules.md section 11)."""

from __future__ import annotations

import sys

import click


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path())
@click.option("--trace", is_flag=True, help="One JSON line per step on stdout; the summary goes to stderr.")
@click.option("--select", metavar="PATTERN", multiple=True, help="Only scenarios of this name or pattern.")
def scenario(files: tuple[str, ...], trace: bool, select: tuple[str, ...]) -> None:
    """Play scenario files and say what did not hold: unit tests for a team's policies."""
    from ray_pools.core.system import make_world
    from ray_pools.scenario import run_files

    report = run_files(files, make_world, trace_out=sys.stdout if trace else None, select=select)
    for failure in report.failures:
        click.echo(failure.text(), err=trace)
    if report.ok:
        click.echo(f"{report.scenarios} scenarios, {report.steps} steps: all hold", err=trace)
    else:
        click.echo(
            f"{report.scenarios} scenarios, {report.steps} steps: {report.failed} scenarios failed,"
            f" {len(report.failures)} expectations did not hold",
            err=trace,
        )
        click.get_current_context().exit(1)
