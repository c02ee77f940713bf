"""`pools why` and `pools describe`: one request, or one pool, in full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ray_pools.cli.connection import cluster_options, connect, json_option
from ray_pools.cli.output import (
    amounts_text,
    asked_amounts,
    moment_text,
    pool_in,
    print_json,
    print_table,
)
from ray_pools.counting import counted
from ray_pools.errors import PoolsError, Refused

if TYPE_CHECKING:
    from ray_pools.client import Client

_QUEUE_SHOWN = 20


@click.command()
@click.argument("id", metavar="REQUEST")
@cluster_options
@json_option
def why(id: str, address: str | None, namespace: str, as_json: bool) -> None:
    """Say why a request waits, was rejected, or may lose what it holds: cause, numbers, place in the queue."""
    with connect(address, namespace) as client:
        said = explained(client, id)
    if as_json:
        print_json(said)
        return
    for line in why_lines(said):
        click.echo(line)


def explained(client: Client, id: str) -> dict[str, Any]:
    """The request, and what each of its pools says of it. Refused (`unknown_id`) for one that nobody knows."""
    from ray_pools.client import Explanation
    from ray_pools.core.quota import PAUSED

    view = client.get(id)
    if view is None:
        raise Refused(
            "unknown_id", f"there is no request {id!r} (any more: `pools log --request` has old ones)"
        )
    pools: dict[str, dict[str, Any]]
    if view["state"] == "rejected":
        pools = not_admitted(client, view["requester"], view["amounts"], view["preemptible"], view["causes"])
    else:
        pools = client.explain(id, estimate=view["state"] == "queued")
        for pool, each in pools.items():
            if each.get("cause") == PAUSED and (reason := _why_not_placed(client, pool, id)):
                each["reason"] = reason
                each["text"] = f"{each['text']} ({reason})"
    return {"request": dict(view), "pools": pools, "text": str(Explanation(view, pools))}


def not_admitted(
    client: Client,
    requester: str,
    amounts: Mapping[str, int],
    preemptible: bool,
    causes: Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    """Why each pool does not admit such a request, with the numbers of the configuration."""
    from ray_pools.core.explain import admission_text
    from ray_pools.core.records import positive

    config = client.config()
    capacity = {pool["name"]: pool["capacity"] for pool in config["pools"]}
    policies = {p["pool"]: p for p in config["policies"] if p["requester"] == requester}
    pools = {}
    for pool, cause in causes.items():
        policy = policies.get(pool)
        text = cause.replace("_", " ")
        if pool in capacity:
            as_policy = _policy(policy) if policy else None
            asked = positive(amounts.items())
            text = admission_text(cause, requester, pool, asked, preemptible, capacity[pool], as_policy)
        pools[pool] = {"pool": pool, "cause": cause, "text": text}
    return pools


def not_admitted_text(said: Mapping[str, Mapping[str, Any]]) -> str:
    """The same on one line."""
    return "; ".join(f"{pool}: {each['cause']}: {each['text']}" for pool, each in sorted(said.items()))


def _why_not_placed(client: Client, pool: str, id: str) -> str:
    """Out of the pool's log, which a machine that is not the head's need not have; then nothing more is said."""
    from ray_pools.log_history import why_not_placed

    try:
        return why_not_placed(str(client.config()["store"]), pool, id)
    except PoolsError:
        return ""


def _policy(wire: dict[str, Any]) -> Any:
    from ray_pools.core.config_rules import PolicyConfig

    return PolicyConfig.from_wire(wire)


def why_lines(said: dict[str, Any]) -> list[str]:
    """For a person: the request, then each pool's word."""
    from ray_pools.client.explanation import duration_text
    from ray_pools.client.views import FOR_NOBODY

    view = said["request"]
    state = "nominated" if view.get("nominated") else view["state"]
    asks = _shown(view["amounts"])
    attempt = f", attempt {view['k']}" if view["k"] > 1 else ""
    lines = [f"{view['id']} of {view['requester']} ({asks}) is {state}{attempt}"]
    if view.get("by"):
        lines.append(f"  an operator ended it: {view['by']}")
    for pool, each in sorted(said["pools"].items()):
        if each.get("unreachable"):
            lines.append(f"  {pool}: does not answer ({each['unreachable']})")
            continue
        place = f"{each['position']} of {each['waiting']} in the queue" if each.get("position") else ""
        cause = each.get("cause") or ""
        head = ", ".join(filter(None, [place, cause]))
        text = each.get("text") or "it has not heard of it yet"
        if each.get("estimate_s") is not None:
            text += f"; about {duration_text(each['estimate_s'])}"
        lines.append(f"  {pool}: {head}: {text}" if head else f"  {pool}: {text}")
    if not said["pools"]:
        lines.append(f"  {said['text']}")
    if view["state"] in ("preempting", "preempted"):
        nobody = FOR_NOBODY.get(view.get("for_nobody", ""))
        if nobody and said["pools"]:
            lines.append(f"  {nobody}")
        what = "its story" if nobody else "for whom, and why"
        lines.append(f"  {what}: pools history --request {view['id']}")
    elif view["state"] in ("expired", "cancelled"):
        lines.append(f"  its story: pools log --request {view['id']}")
    return lines


# --- describe


@click.command()
@click.argument("name", metavar="POOL|REQUEST")
@click.option("--kind", type=click.Choice(["pool", "request"]), help="Which, where both have the name.")
@cluster_options
@json_option
def describe(name: str, kind: str | None, address: str | None, namespace: str, as_json: bool) -> None:
    """Show one pool or one request in full.

    A pool: how it is configured, what each team has of it, who holds and who waits. A request: what it asked for, where
    it stands and why.
    """
    with connect(address, namespace) as client:
        if kind is None:
            pools = [pool["name"] for pool in client.config()["pools"]]
            kind = "pool" if name in pools else "request"
        said = pool_described(client, name) if kind == "pool" else explained(client, name)
    if as_json:
        print_json(said)
    elif kind == "pool":
        show_pool(said)
    else:
        _show_request(said)


def pool_described(client: Client, name: str) -> dict[str, Any]:
    """A pool's configuration, policies, status, and what holds there. BadInput for one that is not there."""
    config = client.config()
    found = pool_in(config, name)
    return {
        "config": {"state": "open", **found},
        "policies": [policy for policy in config["policies"] if policy["pool"] == name],
        "status": client.status()["pools"].get(name, {}),
        "holders": [dict(view) for view in client.list(pool=name, states=["allocated", "preempting"])],
    }


def show_pool(said: dict[str, Any]) -> None:
    from ray_pools.cli.status import pool_rows, requester_rows

    config, status = said["config"], said["status"]
    name, placement = config["name"], config["placement"]
    click.echo(f"pool {name} ({config['state']})")
    click.echo(f"queueing: {config['queueing']}, starvation after {config['starvation_after_s']:g} s")
    click.echo(f"preemption: grace {config['grace_s']:g} s, min runtime {config['min_runtime_s']:g} s")
    if placement is None:
        click.echo("placement: none, it only counts")
    else:
        labels = ", ".join(f"{key}={value}" for key, value in placement["labels"].items()) or "any node"
        node = f"; per node at most {amounts_text(placement['node'])}" if placement["node"] else ""
        click.echo(f"placement: {labels}{node}")
    if "unreachable" in status or not status:
        click.echo(f"it does not answer: {status.get('unreachable', 'it is not known yet')}")
        return
    print_table(
        ("pool", "key", "#capacity", "#held", "#in share", "#borrowed", "#nominated", "#waiting"),
        pool_rows(name, status),
    )
    print_table(
        ("requester", "#prio", "#grants", "#waiting", "booked", "reserved", "limit"),
        [row[1:] for row in requester_rows(name, status)],
    )
    if said["holders"]:
        rows = [
            (v["id"], v["requester"], v["state"], _shown(v["amounts"]), moment_text(v["told_at"]))
            for v in said["holders"]
        ]
        print_table(("holds", "requester", "state", "amounts", "since"), rows)
    if status["queue"]:
        queue = status["queue"][:_QUEUE_SHOWN]
        print_table(
            ("#", "waits", "requester", "asks for", "cause", "since"),
            [
                (
                    place,
                    each["id"],
                    each["requester"],
                    _shown(each["amounts"]),
                    each["cause"] or "being decided",
                    moment_text(each["submitted_at"]),
                )
                for place, each in enumerate(queue, 1)
            ],
        )
        if status["waiting"] > len(queue):
            click.echo(f"and {status['waiting'] - len(queue)} more wait")


def _show_request(said: dict[str, Any]) -> None:
    view = said["request"]
    for line in why_lines(said):
        click.echo(line)
    lease = f"{view['lease_s']:g} s" if view["lease_s"] else "none"
    kind = "preemptible" if view["preemptible"] else "never preempted"
    click.echo(f"{kind}, {counted(view['retries'], 'retry')} left, lease {lease}")
    click.echo(f"submitted {moment_text(view['submitted_at'])}, last news {moment_text(view['told_at'])}")
    group = view.get("placement", {}).get("pg")
    if group:
        click.echo(f"placement group {group}")


def _shown(amounts: dict[str, int]) -> str:
    return amounts_text(asked_amounts(amounts))
