"""`pools dashboard`: the page that shows what the pools are at, and what they were at any moment."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ray_pools.cli.connection import cluster_options, connect, json_option
from ray_pools.cli.output import print_json, progress
from ray_pools.cli.store_place import check_there_are_logs, find_store, store_option
from ray_pools.errors import BadInput, PoolsError

if TYPE_CHECKING:
    from ray_pools.dashboard.feed import Feed
    from ray_pools.dashboard.history import History

DEFAULT_PORT = 8270


@click.command()
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Where to listen; by default only this machine."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="0: any that is free.",
)
@click.option(
    "--allow-host",
    "allowed",
    metavar="NAME",
    multiple=True,
    help="A name by which browsers may call this server; addresses and localhost always may.",
)
@store_option
@cluster_options
@json_option
def dashboard(
    host: str,
    port: int,
    allowed: tuple[str, ...],
    store: str | None,
    address: str | None,
    namespace: str,
    as_json: bool,
) -> None:
    """Show the pools on a web page, until Ctrl-C: who holds and borrows what, who waits and why, and the past.

    It only reads, and listens on this machine alone unless --host says otherwise: whoever reaches the port sees names
    and amounts. With --store it shows these logs, without a cluster.
    """
    from ray_pools.dashboard.feed import Feed
    from ray_pools.dashboard.history import History
    from ray_pools.dashboard.sources import LiveSource, LogSource

    if store is not None:
        place = find_store(store, None, None, namespace, ask=False)
        check_there_are_logs(place, store, None)
        History(place).close()  # what can't be read is said now
        _serve(lambda: Feed(LogSource(), lambda: History(place)), host, port, allowed, as_json)
        return
    with connect(address, namespace) as client:
        place = str(client.config()["store"])
        _serve(lambda: Feed(LiveSource(client), lambda: _history(place)), host, port, allowed, as_json)


def _history(place: str) -> History:
    from ray_pools.dashboard.history import History
    from ray_pools.store import NoLog

    try:
        return History(place)
    except NoLog:
        raise PoolsError(f"the logs are at {place}, which can't be read from this machine") from None


def _serve(
    make_feed: Callable[[], Feed], host: str, port: int, allowed: tuple[str, ...], as_json: bool
) -> None:
    """Until the process is told to end."""

    async def main() -> None:
        from aiohttp import web

        from ray_pools.dashboard.server import make_app

        runner = web.AppRunner(make_app(make_feed(), allowed), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            try:
                await site.start()
            except OSError as problem:
                expected = f"an address and a port that are free: {problem.strerror or problem}"
                raise BadInput("--host, --port", f"{host}:{port}", expected) from None
            _say(runner.addresses[0], as_json)
            if not ipaddress.ip_address(runner.addresses[0][0]).is_loopback:
                progress("whoever reaches this port sees the names of teams and requests, and what they hold")
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    asyncio.run(main())


def _say(bound: tuple[str, int], as_json: bool) -> None:
    host, port = bound[0], bound[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{shown}:{port}/"
    if as_json:
        print_json({"url": url})
    else:
        click.echo(f"the pools are shown at {url} (Ctrl-C ends it)")
