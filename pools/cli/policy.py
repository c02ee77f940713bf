"""`pools policy ...`: which requester may use which pool, and how much of it is its own."""

from __future__ import annotations

from typing import Any

import click

from ray_pools.cli.changing import change_running, dry_run_option, operator
from ray_pools.cli.command_options import amounts_option
from ray_pools.cli.connection import cluster_options, connect, json_option
from ray_pools.cli.output import amounts_text, pool_in, print_json, print_table
from ray_pools.errors import Refused


@click.group()
def policy() -> None:
    """Who may use which pool: attach, detach, list."""


@policy.command()
@click.argument("requester")
@click.argument("pool")
@click.option("--priority", type=int, default=0, show_default=True, help="Higher goes first.")
@amounts_option("--reserved", "What the requester is sure of; may be given several times.")
@amounts_option("--limit", "The most that it may hold; may be given several times.")
@dry_run_option
@cluster_options
@json_option
def attach(
    requester: str,
    pool: str,
    priority: int,
    reserved: dict[str, int],
    limit: dict[str, int],
    dry_run: bool,
    address: str | None,
    namespace: str,
    as_json: bool,
) -> None:
    """Give REQUESTER a policy on POOL, in place of the one that it has there."""
    from ray_pools.core.config_rules import PolicyConfig

    wanted = PolicyConfig(pool, requester, priority, reserved, limit).to_wire()

    def changes(running: dict[str, Any]) -> list[list[Any]]:
        pool_in(running, pool)
        return [] if wanted in running["policies"] else [["policy", wanted]]

    with operator(address, namespace) as client:
        change_running(client, changes, dry_run=dry_run, as_json=as_json)


@policy.command()
@click.argument("requester")
@click.argument("pool")
@dry_run_option
@cluster_options
@json_option
def detach(
    requester: str, pool: str, dry_run: bool, address: str | None, namespace: str, as_json: bool
) -> None:
    """Take REQUESTER's policy on POOL away. What it holds there stays, and is borrowed from then on."""

    def changes(running: dict[str, Any]) -> list[list[Any]]:
        pool_in(running, pool)
        return [["unpolicy", requester, pool]]

    with operator(address, namespace) as client:
        change_running(client, changes, dry_run=dry_run, as_json=as_json)


@policy.command("list")
@click.option("--pool", help="Only on this pool.")
@click.option("--requester", "-r", help="Only of this requester.")
@cluster_options
@json_option
def list_policies(
    pool: str | None, requester: str | None, address: str | None, namespace: str, as_json: bool
) -> None:
    """List policies, by requester; each requester's in the order in which its pools are tried."""
    with connect(address, namespace) as client:
        running = client.config()
    if pool is not None:
        pool_in(running, pool, "--pool")
    if requester is not None and all(each["requester"] != requester for each in running["policies"]):
        raise Refused("no_policy", f"requester {requester!r} has no policy on any pool")
    policies = [
        each
        for each in running["policies"]
        if pool in (None, each["pool"]) and requester in (None, each["requester"])
    ]
    policies.sort(key=lambda each: (each["requester"], -each["priority"], each["pool"]))
    if as_json:
        print_json(policies)
        return
    print_table(
        ("requester", "pool", "#prio", "reserved", "limit"),
        [
            (
                each["requester"],
                each["pool"],
                each["priority"],
                amounts_text(each["reserved"]),
                amounts_text(each["limit"], zeros=True),
            )
            for each in policies
        ],
    )
