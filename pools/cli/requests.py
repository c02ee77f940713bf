"""`pools submit`, `release`, `cancel` and `requests`: one request at a time, by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ray_pools.cli.command_options import amount_options, seconds
from ray_pools.cli.connection import cluster_options, connect, json_option
from ray_pools.cli.output import (
    Interrupted,
    amounts_text,
    asked_amounts,
    causes_text,
    moment_text,
    no_such_pool,
    print_json,
    print_table,
    progress,
    without_policy,
)
from ray_pools.cli.times import parse_since
from ray_pools.cli.tokens import token_of
from ray_pools.errors import PoolsError, Refused, SlotError, SlotRejected, WaitTimeout
from ray_pools.keys import key_in_file
from ray_pools.limits import LEASE_MIN_S

if TYPE_CHECKING:
    from ray_pools.client import Client, Ticket

FIRST_ANSWER_S = 2.0
"""So long `--no-wait` waits for what the pools make of a request that they can decide at once."""


@click.command()
@click.option("--requester", "-r", required=True, help="Who asks: a name with a policy in some pool.")
@amount_options
@click.option("--retries", type=int, default=0, show_default=True, help="Queue again after a preemption.")
@click.option("--id", "request_id", help="Its id: the same id with the same content is the same request.")
@click.option(
    "--lease",
    metavar="SECONDS",
    type=float,
    default=0.0,
    help=f"How long it lives without this command: {LEASE_MIN_S} s or more; 0: until it is given back or cancelled."
    " Default: 0.",
)
@click.option(
    "--placement", type=click.Choice(["none"]), help="none: only count it, without placement group."
)
@click.option(
    "--key-file",
    metavar="FILE",
    help="The requester's key, where it is protected by one. Default: RAY_POOLS_KEY or RAY_POOLS_KEY_FILE.",
)
@click.option("--wait/--no-wait", default=False, show_default=True, help="Wait until it can be used.")
@click.option("--timeout", metavar="SECONDS", type=float, help="With --wait: how long at most.")
@cluster_options
@json_option
def submit(
    requester: str,
    gpus: int | None,
    cpus: str | None,
    memory: str | None,
    resource: dict[str, int],
    non_preemptible: bool,
    retries: int,
    request_id: str | None,
    lease: float,
    placement: str | None,
    key_file: str | None,
    wait: bool,
    timeout: float | None,
    address: str | None,
    namespace: str,
    as_json: bool,
) -> None:
    """Ask for capacity, and print the request's id and state.

    The request belongs to nobody's process: it stays until `pools release ID` or `pools cancel ID`, which are
    operators' commands and need no token. Exit code 1 if it is rejected, or not usable within --timeout.
    """
    if timeout is not None and not wait:
        raise click.UsageError("--timeout goes with --wait")
    seconds("--timeout", timeout, 0.0)
    key = key_in_file(key_file, "--key-file") if key_file is not None else None
    with connect(address, namespace, key=key) as client:
        ticket = client.submit(
            requester,
            gpus=gpus,
            cpus=cpus,
            memory=memory,
            pool_resources=resource or None,
            preemptible=not non_preemptible,
            retries=retries,
            lease_s=lease,
            placement=placement,
            id=request_id,
            token=token_of(namespace, request_id) if request_id is not None else None,
        )
        if request_id is not None:  # an earlier run of this command may have submitted it, and is who is told
            client.follow(request_id)
        problem: PoolsError | None = None
        try:
            (_wait if wait else _first_answer)(ticket, timeout)
        except (SlotError, WaitTimeout) as error:
            problem = error
        except KeyboardInterrupt as interrupt:
            until = f" for {lease:g} s" if lease else ""
            note = f"request {ticket.id} waits on{until}: `pools cancel {ticket.id}` ends it"
            raise Interrupted(interrupt, note) from None
        view = dict(ticket.view)
        if isinstance(problem, SlotRejected) and view["causes"]:
            problem = Refused(
                "rejected", f"request {view['id']!r} is rejected: {_why_rejected(client, view)}"
            )
    if as_json:
        print_json(view)
    else:
        click.echo(f"{view['id']} {state_text(view, causes=False)}")
    if problem is not None:
        raise problem


def _why_rejected(client: Client, view: dict[str, Any]) -> str:
    """With the numbers, as `pools why` has them."""
    from ray_pools.cli.explaining import not_admitted, not_admitted_text

    said = not_admitted(client, view["requester"], view["amounts"], view["preemptible"], view["causes"])
    return not_admitted_text(said)


def _first_answer(ticket: Ticket, timeout_s: float | None) -> None:
    """What the pools can decide at once. A request that waits for longer is no error."""
    try:
        ticket.wait(FIRST_ANSWER_S)
    except WaitTimeout:
        return


def _wait(ticket: Ticket, timeout_s: float | None) -> None:
    """Until it is usable, with a line on why it is not on a terminal."""
    try:
        ticket.wait(timeout_s, progress=True)
    except WaitTimeout:
        raise WaitTimeout(
            f"request {ticket.id!r} is {ticket.state} after {timeout_s:g} s and waits on:"
            f" `pools cancel {ticket.id}` ends it"
        ) from None


def state_text(view: dict[str, Any], causes: bool = True) -> str:
    """`allocated in a100, placing`, `rejected (a100: too_large)`."""
    text = str(view["state"])
    if view["state"] in ("allocated", "preempting"):
        text += f" in {view['pool']}"
    elif view["state"] == "queued" and view.get("pools"):
        text += f" in {', '.join(view['pools'])}"
    if view["state"] == "allocated" and not view.get("ready"):
        text += ", placing"
    if causes and view.get("causes") and view["state"] == "rejected":
        text += f" ({causes_text(view['causes'])})"
    return text


@click.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@cluster_options
@json_option
def release(ids: tuple[str, ...], address: str | None, namespace: str, as_json: bool) -> None:
    """Give back what requests hold; one that waits is cancelled. Returns when nothing is held.

    An operator's command: it needs no token, and the log says who gave it.
    """
    with connect(address, namespace) as client:
        _each(ids, client.release, as_json)


@click.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@cluster_options
@json_option
def cancel(ids: tuple[str, ...], address: str | None, namespace: str, as_json: bool) -> None:
    """End requests, waiting or holding, with all attempts to come. Returns when nothing is held.

    An operator's command: it needs no token, and the log says who gave it.
    """
    with connect(address, namespace) as client:
        _each(ids, client.cancel, as_json)


def _each(ids: tuple[str, ...], end: Callable[[str], Any], as_json: bool) -> None:
    """One after the other; one that fails does not keep the others from their end."""
    views: list[dict[str, Any]] = []
    worst: PoolsError | None = None
    for id in ids:
        try:
            view = dict(end(id))
        except PoolsError as problem:
            views.append({"id": id, "error": str(problem)})
            if worst is not None:
                progress(f"pools: error: {worst}")
            worst = problem
            continue
        views.append(view)
        if not as_json:
            click.echo(f"{id} {state_text(view)}")
    if as_json:
        print_json(views)
    if worst is not None:
        raise worst


def check_has_policy(client: Client, requester: str) -> None:
    """Refused for a requester without a policy: what has nothing to show is most likely a wrong name."""
    if all(policy["requester"] != requester for policy in client.config()["policies"]):
        raise without_policy(requester)


@click.command()
@click.option("--requester", "-r", help="Only of this requester.")
@click.option("--pool", help="Only what this pool holds, or has waiting.")
@click.option("--state", "states", multiple=True, help="Only in this state; may be given several times.")
@click.option(
    "--since", metavar="TIME", help="Only what changed since: 10m, 2h, 3d (ago), or 2026-01-31T12:00."
)
@click.option("--limit", type=int, default=100, show_default=True, help="At most so many, the newest first.")
@cluster_options
@json_option
def requests(
    requester: str | None,
    pool: str | None,
    states: tuple[str, ...],
    since: str | None,
    limit: int,
    address: str | None,
    namespace: str,
    as_json: bool,
) -> None:
    """List requests, the newest first."""
    with connect(address, namespace) as client:
        since_s = None if since is None else parse_since(since, client.ping().get("now") or time.time())
        views = client.list(requester=requester, pool=pool, states=states, since=since_s, limit=limit)
        if pool is not None and not views:
            known = client.coordinator({"op": "status"})["pools"]
            if pool not in known:
                raise no_such_pool(pool, known, "--pool")
        if requester is not None and not views:
            check_has_policy(client, requester)
    if as_json:
        print_json([dict(view) for view in views])
        return
    print_table(
        ("id", "requester", "state", "asks for", "submitted"),
        [
            (
                view["id"],
                view["requester"],
                state_text(dict(view), causes=False),
                amounts_text(asked_amounts(view["amounts"])),
                moment_text(view["submitted_at"]),
            )
            for view in views
        ],
    )
