"""What the commands that change a running configuration share: what would change, what comes of it, and the change.

A change is planned against one version, and refused if another came between: then it is planned again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ray_pools.cli.connection import connect
from ray_pools.cli.output import causes_text, print_json, progress
from ray_pools.errors import BadInput, PoolsError, Refused

if TYPE_CHECKING:
    from ray_pools.client import Client

Changes = list[list[Any]]

dry_run_option = click.option("--dry-run", is_flag=True, help="Show what would come of it, and stop there.")

_TRIES = 5
_SHOWN = 20


class Plan(NamedTuple):
    """Changes for a version of the running configuration, and what comes of them at once (None: not to be seen)."""

    running: dict[str, Any]
    changes: Changes
    seen: dict[str, list[dict[str, Any]]] | None


@contextmanager
def operator(address: str | None, namespace: str) -> Iterator[Client]:
    """A client for a command that may make or end actors: these must not take the working directory's modules."""
    from ray_pools.actors import deploy

    with deploy.empty_directory(), connect(address, namespace) as client:
        yield client


def plan(client: Client, wanted: Callable[[dict[str, Any]], Changes]) -> Plan:
    """What `wanted` makes of the running configuration. A change that is not allowed raises here, before anything is
    touched: it is made to a copy of what runs.
    """
    from ray_pools.core.commands import changes as read
    from ray_pools.core.preview import preview

    running = client.config()
    changes = wanted(running)
    if not changes:
        return Plan(running, [], {})
    try:
        world = client.copy()
    except PoolsError as problem:
        progress(f"what comes of it can't be seen: {problem}")
        return Plan(running, changes, None)
    return Plan(running, changes, preview(world, read(changes)))


def carry_out(client: Client, made: Plan, wanted: Callable[[dict[str, Any]], Changes]) -> int:
    """Makes the changes, all of them or nothing; returns the version. Pools that are new get their actors first, and
    lose them again if the change is refused.
    """
    from ray_pools.actors import deploy

    running, changes = made.running, made.changes
    for _ in range(_TRIES):
        known = {pool["name"] for pool in running["pools"]}
        fresh = [
            change[1]["name"] for change in changes if change[0] == "pool" and change[1]["name"] not in known
        ]
        actors = deploy.add_pools(running, fresh)
        try:
            return client.change(changes, since=running["version"])
        except (Refused, BadInput) as problem:  # not where nobody knows whether it was made
            deploy.end_pools(running["namespace"], actors)
            if not (isinstance(problem, Refused) and problem.code == "changed_meanwhile"):
                raise
        running = client.config()
        changes = wanted(running)
        if not changes:
            return int(running["version"])
    raise Refused("changed_meanwhile", "others change the configuration all the time: try again")


def change_running(
    client: Client,
    wanted: Callable[[dict[str, Any]], Changes],
    *,
    dry_run: bool,
    as_json: bool,
    warnings: Sequence[str] = (),
) -> None:
    """The whole of it: the difference, what comes of it, and, unless `dry_run`, the change; told on stdout."""
    from ray_pools.config_difference import difference_words

    made = plan(client, wanted)
    lines = difference_words(made.running, made.changes)
    if not as_json:
        for line in [*lines, *preview_words(made.seen)]:
            click.echo(line)
    version = made.running["version"]
    if made.changes and not dry_run:
        version = carry_out(client, made, wanted)
    if as_json:
        print_json(
            {
                "namespace": made.running["namespace"],
                "changes": lines,
                "preview": made.seen,
                "warnings": list(warnings),
                "applied": bool(made.changes) and not dry_run,
                "version": version,
            }
        )
    elif not made.changes:
        click.echo(f"nothing to do: configuration {version} is this already")
    elif dry_run:
        click.echo("nothing was changed (--dry-run)")
    else:
        click.echo(f"applied: this is configuration {version}")


def preview_words(seen: Mapping[str, Sequence[Mapping[str, Any]]] | None) -> list[str]:
    """What comes of a change at once, a line per request."""
    if not seen:
        return []
    lines = [
        *(f"  {who(each)} would be granted in {each['pool']}" for each in seen["granted"]),
        *(f"  {who(each)} would be nominated in {each['pool']}" for each in seen["nominated"]),
        *(
            f"  {who(each)} would be preempted in {each['pool']}"
            + (f" for {each['for']}" if each["for"] else "")
            for each in seen["preempted"]
        ),
        *(f"  {who(each)} would be rejected ({causes_text(each['causes'])})" for each in seen["rejected"]),
        *(
            f"  {who(each)} would lose its nomination in {each['pool']}, and wait"
            for each in seen["unnominated"]
        ),
        *(f"  {who(each)} would wait in {', '.join(each['to'])}" for each in seen["moved"]),
    ]
    if not lines:
        return ["at once: no request is concerned"]
    more = [f"  and {len(lines) - _SHOWN} more (--json has all)"] if len(lines) > _SHOWN else []
    return ["at once:", *lines[:_SHOWN], *more]


def who(each: Mapping[str, Any]) -> str:
    return f"{each['id']} of {each['requester']}"
