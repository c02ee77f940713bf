"""`pools events`: preemptions, expiries, rejections and starvation as they come, on stdout or to a webhook."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from ray_pools.cli.connection import cluster_options, json_option
from ray_pools.cli.output import progress
from ray_pools.cli.store_place import check_there_are_logs, config_option, find_store, store_option
from ray_pools.errors import BadInput

if TYPE_CHECKING:
    from ray_pools.notices import Notice

WEBHOOK_ENV = "RAY_POOLS_WEBHOOK"


@click.command()
@click.option(
    "--webhook",
    metavar="URL",
    envvar=WEBHOOK_ENV,
    help=f"Post them there. A secret in it is better given in {WEBHOOK_ENV}.",
)
@click.option("--slack", is_flag=True, help="As Slack takes them, instead of plain JSON.")
@click.option(
    "--kind", "kinds", multiple=True, help="preemption, expiry, rejection or starvation. Default: all."
)
@click.option(
    "--cursor", metavar="FILE", type=click.Path(), help="What was told already. Default: one per webhook."
)
@click.option("--from-start", is_flag=True, help="Where there is no cursor yet: from the start of the logs.")
@click.option("--once", is_flag=True, help="Only what there is now.")
@store_option
@config_option
@cluster_options
@json_option
def events(
    webhook: str | None,
    slack: bool,
    kinds: tuple[str, ...],
    cursor: str | None,
    from_start: bool,
    once: bool,
    store: str | None,
    config: str | None,
    address: str | None,
    namespace: str,
    as_json: bool,
) -> None:
    """Tell what somebody should know: on stdout, or by --webhook, until Ctrl-C.

    It reads the logs and asks nobody, so the pools never wait for it; it runs where the logs can be read. What
    the webhook does not take is tried again; what was told is remembered over restarts, and nothing is left out.
    """
    from ray_pools.notices import KINDS, follow
    from ray_pools.webhook import Webhook

    if slack and webhook is None:
        raise click.UsageError("--slack goes with --webhook")
    for kind in kinds:
        if kind not in KINDS:
            raise BadInput("--kind", kind, f"one of {', '.join(KINDS)}")
    stop = threading.Event()
    callback: Any = _printer(as_json)
    if webhook is not None:
        format = "slack" if slack else "json"
        callback = Webhook(webhook, format, namespace, stop=stop, tell=progress)
        cursor = cursor or str(_cursor_of(namespace, webhook))
    place = find_store(store, config, address, namespace)
    check_there_are_logs(place, store, config)
    told = follow(
        place, callback, cursor=cursor, kinds=kinds or KINDS, from_start=from_start, once=once, stop=stop
    )
    if webhook is not None:
        progress(f"{told} told")


def _printer(as_json: bool) -> Any:
    from ray_pools.log_view import time_text

    def show(notice: Notice) -> None:
        if as_json:
            click.echo(json.dumps(notice._asdict(), ensure_ascii=False))
        else:
            click.echo(f"{time_text(notice.at)}  {notice.kind}: {notice.text}")

    return show


def _cursor_of(namespace: str, webhook: str) -> Path:
    """In the user's state directory; the name does not show the address."""
    state = os.environ.get("XDG_STATE_HOME", "")
    root = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    name = hashlib.blake2b(webhook.encode(), digest_size=8).hexdigest()
    return root / "ray-pools" / "events" / quote(namespace, safe="") / f"{name}.json"
