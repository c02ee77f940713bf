"""`pools history`: what was decided, newest first, with the reasons."""

from __future__ import annotations

import time

import click

from ray_pools.cli.connection import cluster_options, json_option
from ray_pools.cli.output import print_json
from ray_pools.cli.store_place import config_option, find_store, store_option
from ray_pools.cli.times import parse_since
from ray_pools.errors import PoolsError


@click.command()
@click.option("--pool", help="Only of this pool.")
@click.option("--request", metavar="ID", help="Only about this request, and what stopped it.")
@click.option("--requester", "-r", help="Only about requests of this requester.")
@click.option("--since", metavar="TIME", help="Only since then: 10m, 2h, 3d (ago), or 2026-01-31T12:00.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="At most so many.")
@store_option
@config_option
@cluster_options
@json_option
def history(
    pool: str | None,
    request: str | None,
    requester: str | None,
    since: str | None,
    limit: int,
    store: str | None,
    config: str | None,
    address: str | None,
    namespace: str,
    as_json: bool,
) -> None:
    """Show what was decided, newest first: grants, whom they stopped and why, ends, rejections, changes.

    Reads the logs, as `pools log` does: also while the pools run, and after they are gone.
    """
    from ray_pools.log_history import history as decisions
    from ray_pools.store import NoLog

    since_s = None if since is None else parse_since(since, time.time())
    place = find_store(store, config, address, namespace)
    try:
        found = decisions(place, limit, pool=pool, request=request, requester=requester, since=since_s)
    except NoLog:
        what = "there are no logs" if pool is None else f"there is no log of pool {pool!r}"
        raise PoolsError(f"{what} at {place}") from None
    if as_json:
        print_json([decision.plain() for decision in found])
        return
    for decision in found:
        click.echo(str(decision))
    if not found:
        click.echo("nothing was decided")
