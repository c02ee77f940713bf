"""`pools status`: what is held, borrowed and waiting, per pool and requester."""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any

import click

from ray_pools.cli.connection import cluster_options, connect, json_option
from ray_pools.cli.output import amounts_text, print_json, print_table
from ray_pools.errors import BadInput


@click.command()
@click.option("--watch", is_flag=True, help="Again and again, until Ctrl-C; with --json an object per line.")
@click.option(
    "--every", metavar="SECONDS", type=float, default=2.0, show_default=True, help="With --watch: how often."
)
@cluster_options
@json_option
def status(watch: bool, every: float, address: str | None, namespace: str, as_json: bool) -> None:
    """What is held, borrowed and waiting, per pool and requester.

    booked is what is held or promised to a nominated request; borrowed is what goes beyond a requester's
    reserved amounts.
    """
    if not 0.1 <= every < float("inf"):
        raise BadInput("--every", every, "seconds, at least 0.1")
    with connect(address, namespace) as client:
        while True:
            found = client.status()
            if watch and as_json:
                click.echo(json.dumps({"namespace": namespace, **found}, ensure_ascii=False, default=str))
            elif as_json:
                print_json({"namespace": namespace, **found})
            else:
                if watch:
                    click.clear()  # nothing where stdout is no terminal
                    click.echo(datetime.now().strftime("%Y-%m-%d %H:%M:%S"))
                _show(namespace, found)
            if not watch:
                return
            time.sleep(every)


def _show(namespace: str, found: dict[str, Any]) -> None:
    coordinator, pools = found["coordinator"], found["pools"]
    silent = {name: said["unreachable"] for name, said in pools.items() if "unreachable" in said}
    known = {name: said for name, said in pools.items() if name not in silent}
    counts = ", ".join(f"{count} {state}" for state, count in sorted(coordinator["requests"].items()))
    click.echo(f"namespace {namespace!r}: {counts or 'no requests yet'}")
    if known:
        print_table(
            ("pool", "key", "#capacity", "#held", "#in share", "#borrowed", "#nominated", "#waiting"),
            [row for name, said in known.items() for row in pool_rows(name, said)],
        )
        print_table(
            ("pool", "requester", "#prio", "#grants", "#waiting", "booked", "reserved", "limit"),
            [row for name, said in known.items() for row in requester_rows(name, said)],
        )
    for name, said in known.items():
        if said.get("state", "open") != "open":
            click.echo(f"pool {name!r} is {said['state']}: it grants nothing new")
    for name, why in silent.items():
        click.echo(f"pool {name!r} does not answer: {why}")
    for name, why in coordinator.get("trouble", {}).items():
        click.echo(f"trouble with pool {name!r}: {why}")
    click.echo(prewarm_text(coordinator.get("prewarm")))
    if trouble := (coordinator.get("holders") or {}).get("trouble"):  # older coordinators have none
        click.echo(f"dead holders: found by their leases alone: {trouble}")


def pool_rows(name: str, said: dict[str, Any]) -> list[tuple[Any, ...]]:
    """One row per key that the pool meters; its name and its queue only in the first."""
    rows: list[tuple[Any, ...]] = []
    for key, capacity in said["capacity"].items():
        booked = sum(each["booked"].get(key, 0) for each in said["requesters"].values())
        borrowed = sum(each["borrowed"].get(key, 0) for each in said["requesters"].values())
        first = not rows
        rows.append(
            (
                name if first else "",
                key,
                capacity,
                said["held"].get(key, 0),
                booked - borrowed,
                borrowed,
                len(said["nominated"]) if first else "",
                said["waiting"] if first else "",
            )
        )
    return rows or [(name, "-", "", "", "", "", len(said["nominated"]), said["waiting"])]


def requester_rows(name: str, said: dict[str, Any]) -> list[tuple[Any, ...]]:
    """One row per requester with a policy or a request in the pool."""
    return [
        (
            name,
            requester,
            "" if each["priority"] is None else each["priority"],
            each["grants"],
            each["waiting"],
            amounts_text(each["booked"]),
            amounts_text(each["reserved"]),
            amounts_text(each["limit"], zeros=True),
        )
        for requester, each in said["requesters"].items()
    ]


def prewarm_text(prewarm: dict[str, Any] | None) -> str:
    """One line on what the autoscaler is asked for, use included."""
    if not prewarm:
        return "prewarming: off"
    if prewarm.get("error"):
        return f"prewarming: failing: {prewarm['error']}"
    wanted = ", ".join(f"{pool} {said['gpus']:g} GPUs" for pool, said in prewarm["wanted"].items())
    autoscaler = prewarm.get("autoscaler") or "none that answers"
    return f"prewarming: {wanted or 'nothing wanted'} (autoscaler: {autoscaler})"
