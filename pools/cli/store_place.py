"""How a command that reads logs finds them: --store, a configuration file, the running coordinator, the default."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ray_pools.errors import BadInput, Unreachable

store_option = click.option(
    "--store", metavar="ADDRESS", help="Where the logs are: sqlite:///DIRECTORY, or DIRECTORY."
)
config_option = click.option(
    "--config", metavar="FILE", type=click.Path(), help="The configuration file whose store is meant."
)


def find_store(
    store: str | None, config: str | None, address: str | None, namespace: str, *, ask: bool = True
) -> str:
    """The address of the store that is meant. The coordinator is asked where nothing else says it."""
    from ray_pools.config import STORE_ENV, default_store, load_config, store_address

    if store is not None and config is not None:
        raise click.UsageError("--store and --config don't go together")
    if store is not None:
        return store_address(store, Path(), "--store")
    if config is not None:
        return load_config(config).store
    running = running_store(address, namespace) if ask else None
    if running is not None:
        return running
    if os.environ.get(STORE_ENV):
        return store_address(os.environ[STORE_ENV], Path(), STORE_ENV)
    return default_store(namespace, os.environ)


def check_there_are_logs(place: str, store: str | None, config: str | None) -> None:
    """Raises one clear error if there are none where they are looked for.

    Raises:
        BadInput: not where --store or --config says.
        Unreachable: nothing said where, no coordinator that could say it was reached, and there are none by default.
    """
    from ray_pools.log_story import COORDINATOR
    from ray_pools.store import NoLog, open_reader

    try:
        open_reader(place, COORDINATOR).close()
    except NoLog:
        if store is not None or config is not None:
            flag, said = ("--store", store) if store is not None else ("--config", config)
            raise BadInput(flag, said, f"where logs are: there are none at {place}") from None
        raise Unreachable(
            f"no running coordinator says where its logs are, and there are none at {place}: name their place by"
            " --store or --config, or the cluster by --address"
        ) from None


def running_store(address: str | None, namespace: str) -> str | None:
    """The store of the coordinator that runs; None if none does. A cluster that was named must answer."""
    from ray_pools.cli.connection import connect

    try:
        with connect(address, namespace, give_up_s=5.0) as client:
            return client.config().get("store")
    except Unreachable:
        if address is not None:
            raise
        return None
