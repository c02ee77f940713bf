"""`pools history`: what was decided, newest first, with the reasons."""

from __future__ import annotations

import time
from typing import Any

import click

from ray_pools.cli.connection import cluster_options, json_option
from ray_pools.cli.output import no_such_pool, print_json, without_policy
from ray_pools.cli.store_place import check_there_are_logs, config_option, find_store, store_option
from ray_pools.cli.times import parse_since


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
    check_there_are_logs(place, store, config)
    try:
        found = decisions(place, limit, pool=pool, request=request, requester=requester, since=since_s)
    except NoLog:
        if pool is None:
            raise
        from ray_pools.log_view import pools_in

        raise no_such_pool(pool, pools_in(place), "--pool") from None
    if not found:
        _check_known(place, request, requester)
    if as_json:
        print_json([decision.plain() for decision in found])
        return
    for decision in found:
        click.echo(str(decision))
    if not found:
        click.echo("nothing was decided")


def _check_known(place: str, request: str | None, requester: str | None) -> None:
    """Refused for a name that no log knows, which is no empty answer but most likely a wrong name."""
    from ray_pools.log_story import COORDINATOR
    from ray_pools.log_tale import tale
    from ray_pools.log_view import folded
    from ray_pools.store import open_reader

    if request is not None:
        tale(place, request)
    if requester is None:
        return
    reader = open_reader(place, COORDINATOR)
    try:
        state: Any = folded(reader, COORDINATOR)[0]
    finally:
        reader.close()
    if not state.policies.get(requester) and all(r.requester != requester for r in state.requests.values()):
        raise without_policy(requester)
