"""`pools pool create | update | delete | list | describe | cordon | uncordon`: pools without a configuration file."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ray_pools.cli.changing import (
    Changes,
    carry_out,
    change_running,
    dry_run_option,
    operator,
    plan,
    preview_words,
)
from ray_pools.cli.command_options import amounts_option, seconds
from ray_pools.cli.connection import cluster_options, connect, json_option
from ray_pools.cli.explaining import pool_described, show_pool
from ray_pools.cli.output import amounts_text, pool_in, print_json, print_table, progress
from ray_pools.counting import counted
from ray_pools.errors import BadInput, PoolsError, Refused, WaitTimeout
from ray_pools.keys import operator_fields

if TYPE_CHECKING:
    from ray_pools.client import Client

Command = TypeVar("Command", bound=Callable[..., Any])
_LOOK_S = 0.5
_OPTIONS = ("queueing", "starvation_after_s", "grace_s", "min_runtime_s")


def _capacity(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, int | None]:
    """KEY=N, or KEY=none for a key that is metered no more."""
    found: dict[str, int | None] = {}
    for text in given:
        key, equals, amount = text.partition("=")
        if not key or not equals or not (amount == "none" or amount.isdecimal()) or key in found:
            raise BadInput(
                "--capacity", text, "KEY=N, or KEY=none for a key that is not metered; each key once"
            )
        found[key] = None if amount == "none" else int(amount)
    return found


def _labels(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals or key in found:
            raise BadInput("--label", text, "KEY=VALUE, each key once")
        found[key] = value
    return found


def _pool_options(command: Command) -> Command:
    """What a pool is made of; what is not given is as by default, or stays."""
    for option in reversed(
        (
            click.option(
                "--capacity",
                metavar="KEY=N",
                multiple=True,
                callback=_capacity,
                help="A total, such as gpu=8; may be given several times.",
            ),
            click.option("--queueing", type=click.Choice(["backfill", "strict"])),
            click.option("--starvation-after-s", metavar="SECONDS", type=float),
            click.option("--grace-s", metavar="SECONDS", type=float),
            click.option("--min-runtime-s", metavar="SECONDS", type=float),
            click.option(
                "--label",
                "labels",
                metavar="KEY=VALUE",
                multiple=True,
                callback=_labels,
                help="What its nodes must carry; may be given several times.",
            ),
            amounts_option("--node", "The most that one node has; larger requests are split."),
            click.option("--count-only", is_flag=True, help="No placement groups: grants only count."),
        )
    ):
        command = option(command)
    return command


def _with_options(wire: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The pool with the options that were given."""
    from ray_pools.config import PlacementModel

    capacity = {**wire["capacity"], **given["capacity"]}
    made = {**wire, "capacity": {key: total for key, total in capacity.items() if total is not None}}
    made.update({name: given[name] for name in _OPTIONS if given[name] is not None})
    if given["count_only"]:
        if given["labels"] or given["node"]:
            raise click.UsageError("--count-only goes without --label and --node")
        made["placement"] = None
    elif given["labels"] or given["node"]:
        placement = made["placement"] or PlacementModel().model_dump()
        made["placement"] = {
            **placement,
            "labels": given["labels"] or placement["labels"],
            "node": given["node"] or placement["node"],
        }
    return made


@click.command()
@click.argument("name", metavar="POOL")
@_pool_options
@dry_run_option
@cluster_options
@json_option
def create(
    name: str, dry_run: bool, address: str | None, namespace: str, as_json: bool, **given: Any
) -> None:
    """Make a pool. Nobody may use it before `pools policy attach`."""
    from ray_pools.config import PoolModel
    from ray_pools.core.config_rules import PoolConfig

    if not given["capacity"]:
        raise click.UsageError("a pool needs --capacity KEY=N")
    fresh = PoolModel(capacity={}).core(name).to_wire()
    wanted = PoolConfig.from_wire(_with_options(fresh, given)).to_wire()

    def changes(running: dict[str, Any]) -> Changes:
        if any(pool["name"] == name for pool in running["pools"]):
            raise Refused("pool_exists", f"there is a pool {name!r}: change it by `pools pool update {name}`")
        return [["pool", wanted, uuid.uuid4().hex]]

    with operator(address, namespace) as client:
        change_running(client, changes, dry_run=dry_run, as_json=as_json)


@click.command()
@click.argument("name", metavar="POOL")
@_pool_options
@dry_run_option
@cluster_options
@json_option
def update(
    name: str, dry_run: bool, address: str | None, namespace: str, as_json: bool, **given: Any
) -> None:
    """Change a pool; what is not named stays. A smaller capacity stops no one (see cordon)."""
    from ray_pools.core.config_rules import PoolConfig

    def changes(running: dict[str, Any]) -> Changes:
        before = pool_in(running, name)
        wanted = PoolConfig.from_wire(_with_options(before, given)).to_wire()
        return [] if wanted == before else [["pool", wanted, running["uids"][name]]]

    with operator(address, namespace) as client:
        change_running(client, changes, dry_run=dry_run, as_json=as_json)


@click.command("list")
@cluster_options
@json_option
def list_pools(address: str | None, namespace: str, as_json: bool) -> None:
    """List pools."""
    with connect(address, namespace) as client:
        running = client.config()
    pools = [{"state": "open", **pool} for pool in running["pools"]]
    if as_json:
        print_json(pools)
        return
    of = {pool["name"]: 0 for pool in pools}
    for policy in running["policies"]:
        of[policy["pool"]] += 1
    print_table(
        ("pool", "state", "capacity", "queueing", "#policies"),
        [
            (
                pool["name"],
                pool["state"],
                amounts_text(pool["capacity"], zeros=True),
                pool["queueing"],
                of[pool["name"]],
            )
            for pool in pools
        ],
    )


@click.command()
@click.argument("name", metavar="POOL")
@cluster_options
@json_option
def describe(name: str, address: str | None, namespace: str, as_json: bool) -> None:
    """Show a pool in full, as `pools describe POOL`."""
    with connect(address, namespace) as client:
        said = pool_described(client, name)
    if as_json:
        print_json(said)
    else:
        show_pool(said)


# --- closing, and opening again


def _set_state(name: str, state: str) -> Callable[[dict[str, Any]], Changes]:
    def changes(running: dict[str, Any]) -> Changes:
        before = pool_in(running, name)
        if before.get("state", "open") == state:
            return []
        return [["pool", {**before, "state": state}, running["uids"][name]]]

    return changes


@click.command()
@click.argument("name", metavar="POOL")
@dry_run_option
@cluster_options
@json_option
def cordon(name: str, dry_run: bool, address: str | None, namespace: str, as_json: bool) -> None:
    """Let POOL grant nothing new. What it has granted runs on, and what waits keeps its place."""
    with operator(address, namespace) as client:
        change_running(client, _set_state(name, "cordoned"), dry_run=dry_run, as_json=as_json)


@click.command()
@click.argument("name", metavar="POOL")
@dry_run_option
@cluster_options
@json_option
def uncordon(name: str, dry_run: bool, address: str | None, namespace: str, as_json: bool) -> None:
    """Open POOL again after `cordon`, or after a `delete` that was not finished."""
    with operator(address, namespace) as client:
        change_running(client, _set_state(name, "open"), dry_run=dry_run, as_json=as_json)


@click.command()
@click.argument("name", metavar="POOL")
@click.option(
    "--force", is_flag=True, help="Call back what it has granted, with its grace, instead of waiting for it."
)
@click.option("--yes", is_flag=True, help="Without being asked.")
@click.option("--no-wait", is_flag=True, help="Stop admitting, and don't wait until it is empty.")
@click.option("--timeout", metavar="SECONDS", type=float, help="How long to wait until it is empty.")
@dry_run_option
@cluster_options
@json_option
def delete(
    name: str,
    force: bool,
    yes: bool,
    no_wait: bool,
    timeout: float | None,
    dry_run: bool,
    address: str | None,
    namespace: str,
    as_json: bool,
) -> None:
    """Take POOL away, with its policies.

    First it drains: it grants and admits nothing more, and what waits there falls back to its other pools, or is
    rejected. Once nothing is held it is gone. Interrupted, it goes on draining; the same command finishes it, and
    `pools pool uncordon` takes it back. Its log stays.
    """
    seconds("--timeout", timeout, 0.0)
    with operator(address, namespace) as client:
        made = plan(client, _set_state(name, "draining"))
        held = len(_holding(client, name))
        if not as_json:
            for line in preview_words(made.seen):
                click.echo(line)
        if dry_run:
            _tell_delete(name, {"held": held, "preview": made.seen, "deleted": False}, as_json)
            return
        what = "is called back" if force else "runs on until it ends"
        question = f"pool {name!r} goes, with its policies; what it has granted ({held}) {what}. Go on?"
        if not yes and not click.confirm(question, err=True):
            raise PoolsError("nothing has changed")
        if made.changes:
            carry_out(client, made, _set_state(name, "draining"))
        if force:
            _evict(client, name)
        version = _take_away(client, name, force, 0.0 if no_wait else timeout)
        if version is None and no_wait:
            _tell_delete(name, {"held": len(_holding(client, name)), "deleted": False}, as_json)
            return
        if version is None:
            raise WaitTimeout(f"pool {name!r} drains on; the same command goes on, and finishes it")
        from ray_pools.actors import deploy

        deploy.end_pools(namespace, [name])
    _tell_delete(name, {"held": 0, "deleted": True, "version": version}, as_json)


def _tell_delete(name: str, said: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json({"pool": name, **said})
    elif said["deleted"]:
        click.echo(f"pool {name!r} is deleted (configuration {said['version']}); its log stays")
    elif "preview" in said:
        click.echo(f"held in it: {counted(said['held'], 'request')}; nothing was changed (--dry-run)")
    else:
        still = f"{counted(said['held'], 'request')} still {'holds' if said['held'] == 1 else 'hold'} in it"
        click.echo(f"pool {name!r} drains: {still}. The same command finishes it")


def _holding(client: Client, name: str) -> list[Any]:
    return [v for v in client.list(pool=name, states=["allocated", "preempting"]) if v["pool"] == name]


def _evict(client: Client, name: str) -> None:
    client.coordinator({"op": "evict", "pool": name, **operator_fields()})


def _take_away(client: Client, name: str, force: bool, timeout_s: float | None) -> int | None:
    """Once nothing waits or holds there: the version that is without it. None: not within the time."""
    ends_at = None if timeout_s is None else time.monotonic() + timeout_s
    told = ""
    while True:
        try:
            return client.change([["unpool", name]])
        except Refused as problem:
            if problem.code != "in_use":
                raise
            if str(problem) != told:
                told = str(problem)
                progress(f"it drains: {told}")
        if force:  # what it granted before it heard that it drains
            _evict(client, name)
        if ends_at is not None and time.monotonic() >= ends_at:
            return None
        time.sleep(_LOOK_S)


COMMANDS = (create, update, delete, list_pools, describe, cordon, uncordon)
