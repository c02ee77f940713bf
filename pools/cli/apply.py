"""`pools apply` and `pools export`: a configuration as a file, brought to running pools and taken from them."""

from __future__ import annotations

import os
from typing import Any

import click

from ray_pools.cli.changing import change_running, dry_run_option, operator
from ray_pools.cli.connection import address_option, cluster_options, connect, json_option
from ray_pools.cli.output import print_json, progress
from ray_pools.errors import BadInput


@click.command()
@click.argument("config", type=click.Path())
@dry_run_option
@address_option
@json_option
def apply(config: str, dry_run: bool, address: str | None, as_json: bool) -> None:
    """Bring running pools to what CONFIG says, all of it or nothing.

    Shows first what changes, and which requests would be granted, rejected or preempted by it at once. A second time
    there is nothing to do. Pools that run and are not in CONFIG are not taken away: that is `pools pool delete`.
    """
    from ray_pools.config import default_store, load_with_warnings
    from ray_pools.config_difference import access_difference, difference, store_note, timings_difference

    wanted, warnings = load_with_warnings(config)  # before any cluster is touched
    for warning in warnings:
        progress(f"warning: {warning}")

    def changes(running: dict[str, Any]) -> list[list[Any]]:
        return [
            *difference(running, wanted.core_pools(), wanted.core_policies()),
            *access_difference(running, wanted.access()),
            *timings_difference(running, wanted.timing_options()),
        ]

    with operator(address, wanted.namespace) as client:
        other = store_note(client.config(), wanted.store)
        if other and wanted.store != default_store(wanted.namespace, os.environ):  # which no file asks for
            progress(f"warning: {other}")
            warnings.append(other)
        from ray_pools.actors.doctor import placement_warnings

        for warning in placement_warnings(wanted.core_pools().values()):
            progress(f"warning: {warning}")
            warnings.append(warning)
        change_running(client, changes, dry_run=dry_run, as_json=as_json, warnings=warnings)


@click.command()
@click.option("--output", "-o", metavar="FILE", help="Write it there instead of to stdout.")
@cluster_options
@json_option
def export(output: str | None, address: str | None, namespace: str, as_json: bool) -> None:
    """Print the configuration that runs as a file that `pools apply` takes, and that changes nothing."""
    from ray_pools.config_export import export_text

    with connect(address, namespace) as client:
        running = client.config()
    if as_json:
        print_json({name: value for name, value in running.items() if name != "options"})
        return
    text = export_text(running, os.environ)
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        with open(output, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as problem:
        raise BadInput("--output", output, f"a file that can be written: {problem.strerror}") from None
    progress(f"configuration {running['version']} is in {output}")
