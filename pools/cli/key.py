"""`pools key`: keys of requesters and of operators."""

from __future__ import annotations

import sys

import click

from ray_pools.cli.connection import cluster_options, json_option
from ray_pools.cli.output import print_json
from ray_pools.cli.store_place import check_there_are_logs, config_option, find_store, store_option
from ray_pools.errors import BadInput

_USE = """put into the configuration, for a requester or for operators:
  requesters: {{NAME: {{key_sha256: {0}}}}}
  operators: {{key_sha256: {0}}}
who uses the key: RAY_POOLS_KEY (operators: RAY_POOLS_OPERATOR_KEY), or ..._FILE with the name of a file"""


@click.group()
def key() -> None:
    """Keys, so that not everybody submits as any requester or gives operators' commands.

    docs/protocol.md, "Who may do what", says what they protect from.
    """


@key.command()
@json_option
def new(as_json: bool) -> None:
    """Make a key, and print it with its hash. Only the hash goes into a configuration."""
    from ray_pools.core.access import key_hash
    from ray_pools.keys import new_key

    made = new_key()
    if as_json:
        print_json({"key": made, "key_sha256": key_hash(made)})
        return
    click.echo(f"key: {made}")
    click.echo(f"key_sha256: {key_hash(made)}")
    click.echo(_USE.format(key_hash(made)), err=True)


@key.command("hash")
@click.argument("file", metavar="FILE", type=click.Path(allow_dash=True))
@json_option
def hash_of(file: str, as_json: bool) -> None:
    """Print the hash of the key in FILE; - is standard input."""
    from ray_pools.core.access import key_hash
    from ray_pools.keys import check_key, key_in_file

    if file == "-":
        found = check_key("FILE", sys.stdin.read().strip())
    else:
        found = key_in_file(file, "FILE")
    if as_json:
        print_json({"key_sha256": key_hash(found)})
    else:
        click.echo(key_hash(found))


@key.command("reset-operators")
@store_option
@config_option
@click.option("--yes", is_flag=True, help="Needed: everybody can give operators' commands afterwards.")
@cluster_options
@json_option
def reset_operators(
    store: str | None, config: str | None, yes: bool, address: str | None, namespace: str, as_json: bool
) -> None:
    """The operators' key is lost: let operators' commands need none, until `pools up` sets another.

    For whoever can write the store: run it where the store is. A running coordinator is away for a second or two.
    """
    from ray_pools.key_reset import reset_operators as reset
    from ray_pools.keys import caller_name

    if not yes:
        raise BadInput("--yes", False, "said, for everybody can give operators' commands afterwards")
    place = find_store(store, config, address, namespace)
    check_there_are_logs(place, store, config)
    version = reset(place, caller_name())
    if as_json:
        print_json({"store": place, "version": version})
    else:
        click.echo(
            f"operators need no key (configuration {version} at {place}): `pools up CONFIG` sets another"
        )
