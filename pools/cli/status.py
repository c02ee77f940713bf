"""`pools status`: what is held, borrowed and waiting, per pool and requester."""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import datetime
from typing import Any

import click

from ray_pools.cli.connection import cluster_options, connect, json_option
from ray_pools.cli.output import amounts_text, print_json, print_table
from ray_pools.cli.prewarm import announcement_text
from ray_pools.errors import BadInput


@click.command()
@click.option("--watch", is_flag=True, help="Again and again, until Ctrl-C; with --json an object per line.")
@click.option(
    "--every", metavar="SECONDS", type=float, default=2.0, show_default=True, help="With --watch: how often."
)
@cluster_options
@json_option
def status(watch: bool, every: float, address: str | None, namespace: str, as_json: bool) -> None:
    """What is held, borrowed and waiting, per pool and requester; and its nodes.

    booked is what is held or promised to a nominated request; borrowed is what goes beyond a requester's
    reserved amounts. Nodes are wanted (asked of Ray's autoscaler, use included), starting, or ready.
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
    if rows := node_rows(coordinator):
        print_table(("pool", "#nodes wanted", "#starting", "#ready", "announced", "cut from the wish"), rows)
    for line in nodes_lines(coordinator):
        click.echo(line)
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


def node_rows(coordinator: dict[str, Any]) -> list[tuple[Any, ...]]:
    """One row per pool that has nodes. Older coordinators say nothing of these."""
    cuts = (coordinator.get("prewarm") or {}).get("cut") or {}
    announced: dict[str, Counter[str]] = {}
    for each in coordinator.get("announced") or ():
        announced.setdefault(each["pool"], Counter()).update(each["amounts"])
    return [
        (
            pool,
            *("?" if said.get(name) is None else said[name] for name in ("wanted", "starting", "ready")),
            amounts_text(announced.get(pool, {})),
            cut_text(cuts[pool]) if pool in cuts else "-",
        )
        for pool, said in (coordinator.get("nodes") or {}).items()
    ]


def cut_text(cut: dict[str, Any]) -> str:
    """`8 GPUs: max_workers 2 of a100`."""
    what = f"{cut['gpus']:g} GPUs" if cut["gpus"] else f"{cut['bundles']} bundles"
    return f"{what}: {cut['why']}"


def nodes_lines(coordinator: dict[str, Any]) -> list[str]:
    """What there is to say of nodes besides."""
    from ray_pools.client.explanation import duration_text

    prewarm = coordinator.get("prewarm") or {}
    lines = [prewarm_text(coordinator.get("prewarm"))]
    if prewarm.get("overwritten"):
        ago = duration_text(prewarm["overwritten_s_ago"])
        lines.append(
            f"the wish for nodes was written over {prewarm['overwritten']} times, last {ago} ago (there stood"
            f" {prewarm['overwritten_by']}), and put right: who else calls request_resources?"
        )
    if others := prewarm.get("others_cut"):
        lines.append(
            f"others ask for nodes that can't be had beside the pools', and were cut: {cut_text(others)}"
        )
    if blind := prewarm.get("labels_ignored"):
        lines.append(
            f"autoscaler v1 does not look at labels: nodes of other types may come up for {', '.join(blind)};"
            " give each node type a resource of its own"
        )
    lines += [f"announced: {announcement_text(each)}" for each in coordinator.get("announced") or ()]
    outside = coordinator.get("outside") or {}
    lines += [outside_text(each) for each in outside.get("jobs") or ()]
    if outside.get("trouble"):
        lines.append(f"nodes can't be looked at: {outside['trouble']}")
    return lines


def outside_text(each: dict[str, Any]) -> str:
    """`2 GPUs of pool spot are used without a slot, by job 03000000 (python train.py): actor Trainer`."""
    who = "nobody knows which job" if each["job"] == "?" else f"job {each['job']}"
    entrypoint = f" ({each['entrypoint'][:80]})" if each["entrypoint"] else ""
    verb = "is" if each["gpus"] == 1 else "are"
    return (
        f"{each['gpus']:g} GPU{'' if each['gpus'] == 1 else 's'} of pool {', '.join(each['pools'])} {verb} used"
        f" without a slot, by {who}{entrypoint}: {', '.join(each['what'])}"
    )


def prewarm_text(prewarm: dict[str, Any] | None) -> str:
    """One line on what the autoscaler is asked for, use included."""
    if not prewarm:
        return "prewarming: off"
    if prewarm.get("error"):
        return f"prewarming: failing: {prewarm['error']}"
    wanted = ", ".join(f"{pool} {said['gpus']:g} GPUs" for pool, said in prewarm["wanted"].items())
    if prewarm.get("autoscaler") == "none":
        said = f"wanted: {wanted}" if wanted else "nothing wanted"
        return f"prewarming: this cluster has no autoscaler, so no node comes up by itself ({said})"
    autoscaler = prewarm.get("autoscaler") or "none that answers"
    through = " through AutoscalingCoordinator" if prewarm.get("through") == "AutoscalingCoordinator" else ""
    return f"prewarming: {wanted or 'nothing wanted'} (autoscaler: {autoscaler}{through})"
