"""`pools would`: what would become of a request, without submitting it."""

from __future__ import annotations

import click

from ray_pools.cli.command_options import amount_options
from ray_pools.cli.connection import cluster_options, connect, json_option
from ray_pools.cli.output import print_json


@click.command()
@click.option("--requester", "-r", required=True, help="Who would ask: a name with a policy in some pool.")
@amount_options
@cluster_options
@json_option
def would(
    requester: str,
    gpus: int | None,
    cpus: str | None,
    memory: str | None,
    resource: dict[str, int],
    non_preemptible: bool,
    address: str | None,
    namespace: str,
    as_json: bool,
) -> None:
    """Say what would become of this request if it were submitted now: granted where, or waiting how long.

    Nothing is submitted. Who would be stopped for it is named. Waits are estimated from how long what runs is expected
    to run. Exit code 1 if it would be rejected.
    """
    with connect(address, namespace) as client:
        found = client.would(
            requester,
            gpus=gpus,
            cpus=cpus,
            memory=memory,
            pool_resources=resource or None,
            preemptible=not non_preemptible,
        )
        text = str(found)
        if found.answer == "rejected" and found.causes:
            from ray_pools.cli.explaining import not_admitted, not_admitted_text
            from ray_pools.client import Submission

            asked = Submission(
                requester, gpus=gpus, cpus=cpus, memory=memory, pool_resources=resource or None
            )
            said = not_admitted(client, requester, asked.amounts, not non_preemptible, found.causes)
            text = f"would be rejected: {not_admitted_text(said)}"
    if as_json:
        print_json(found._asdict())
    else:
        click.echo(f"{requester} {text}")
    if found.answer == "rejected":
        raise click.exceptions.Exit(1)
