"""`pools pool ...`: commands about one pool."""

from __future__ import annotations

import secrets
import time

import click

from ray_pools.cli.connection import cluster_options, connect, json_option
from ray_pools.cli.output import no_such_pool, print_json, progress
from ray_pools.cli.pool_config import COMMANDS
from ray_pools.counting import counted
from ray_pools.errors import PoolsError
from ray_pools.keys import operator_fields

_WAIT_S = 60.0
_LOOK_S = 0.3


@click.group()
def pool() -> None:
    """Pools: make, change, close and take away, one by one."""


for _command in COMMANDS:
    pool.add_command(_command)


@pool.command("declare-lost")
@click.argument("name", metavar="POOL")
@click.option("--yes", is_flag=True, help="Without being asked.")
@click.option("--operator", metavar="NAME", help="Who says so, for the log. Default: USER@HOST.")
@click.option(
    "--id", "command_id", metavar="ID", help="Its id: with the same id again nothing happens twice."
)
@cluster_options
@json_option
def declare_lost(
    name: str,
    yes: bool,
    operator: str | None,
    command_id: str | None,
    address: str | None,
    namespace: str,
    as_json: bool,
) -> None:
    """Say that the log of POOL is lost for good: the pool begins anew, with an empty log.

    All placement groups of its grants are removed, without grace, and what runs in them is killed. Then requests that
    it held count as preempted: they queue again if they have retries left. Those that it had taken and that no
    holder could use yet queue again with their old age. There is no way back. First try to put the log's newest
    whole copy back (docs/operations.md, "A log that lost something").
    """
    with connect(address, namespace) as client:
        found = client.status()["coordinator"]
        if name not in found["pools"] and name not in found["trouble"]:
            raise no_such_pool(name, found["pools"])
        held = len(client.list(pool=name, states=["allocated", "preempting"]))
        why = found["trouble"].get(name) or "as far as is known nothing is wrong with it"
        progress(f"pool {name!r}: {why}")
        if not yes:
            question = (
                f"pool {name!r} is held by {counted(held, 'request')}, and what runs there is killed."
                " Is its log lost for good?"
            )
            if not click.confirm(question, err=True):
                raise PoolsError("nothing has changed")
        op = {
            "op": "declare_lost",
            "pool": name,
            **operator_fields(),
            **({"operator": operator} if operator else {}),
            "id": command_id or secrets.token_hex(8),
        }
        said = client.coordinator(op)
        ends_at = time.monotonic() + _WAIT_S
        while name in (status := client.coordinator({"op": "status"}))["unheard"]:
            # by another pool, too: until all such are declared lost, it works in nothing
            if status.get("lost"):
                progress(f"pool {name!r} begins anew once this is solved, too: {status['lost']}")
                break
            if time.monotonic() >= ends_at:
                raise PoolsError(
                    f"pool {name!r} is declared lost (version {said['version']}), and its actor does not answer: if"
                    " its log can't be opened, move the file away; it begins anew as soon as it runs"
                )
            time.sleep(_LOOK_S)
    if as_json:
        print_json({"pool": name, **said})
    else:
        click.echo(f"pool {name!r} was declared lost, and begins anew (version {said['version']})")
