"""`pools backup`, `pools restore`, `pools upgrade`, `pools doctor`: looking after pools that run for long."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from ray_pools import __version__
from ray_pools.cli.connection import cluster_options, connect_ray, json_option, use_cluster
from ray_pools.cli.output import print_json, progress
from ray_pools.cli.store_place import check_there_are_logs, config_option, find_store, store_option
from ray_pools.counting import counted
from ray_pools.errors import PoolsError, Unreachable

NO_CLUSTER = 3
SKEW_WARN_S = 2.0


# --- backup and restore


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path())
@store_option
@config_option
@cluster_options
@json_option
def backup(
    directory: str, store: str | None, config: str | None, address: str | None, namespace: str, as_json: bool
) -> None:
    """Copy the logs of the coordinator and of all pools into DIR, while they run, so that they belong together.

    DIR is empty or not there yet. The copies are checked, and DIR/manifest.json has their hashes.
    """
    from ray_pools.log_backup import backup as make_backup

    place = find_store(store, config, address, namespace)
    check_there_are_logs(place, store, config)
    made = make_backup(place, directory)
    if as_json:
        print_json({"store": place, **made._asdict()})
        return
    for log, said in made.logs.items():
        click.echo(
            f"{log}: {counted(said['rows'], 'row')}, epoch {said['epoch']}, {said['bytes']} bytes,"
            f" state {said['digest']}"
        )
    click.echo(f"{len(made.logs)} logs of {place} are in {made.directory}")


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False))
@click.option("--store", required=True, metavar="ADDRESS", help="Where the logs are to be: an empty store.")
@json_option
def restore(directory: str, store: str, as_json: bool) -> None:
    """Put the logs of a backup into an empty store; `pools up` with that store then goes on from them.

    Hashes and rules are checked first. The logs' epochs rise, so that whoever still runs from before is refused.
    """
    from pathlib import Path

    from ray_pools.config import store_address
    from ray_pools.log_backup import restore as put_back

    place = store_address(store, Path(), "--store")
    done = put_back(directory, place)
    if as_json:
        print_json({"store": place, **done._asdict()})
        return
    for log, said in done.logs.items():
        click.echo(f"{log}: {counted(said['rows'], 'row')}, goes on in epoch {said['epoch']}")
    click.echo(
        f"{len(done.logs)} logs of {done.made_at} are at {place}: `pools up CONFIG` with this store goes on"
    )


# --- upgrade


@click.command()
@click.option("--check", is_flag=True, help="Only say what would change.")
@cluster_options
@json_option
def upgrade(check: bool, address: str | None, namespace: str, as_json: bool) -> None:
    """Let coordinator and pools go on from their logs with the code of this environment; back works the same way.

    What is granted stays granted. Clients notice a delay of some seconds per actor, and no error.
    """
    use_cluster(address, namespace)
    from ray_pools import wire
    from ray_pools.actors import deploy
    from ray_pools.actors import upgrade as upgrading

    with deploy.empty_directory():
        connect_ray(None)
        if check:
            found = upgrading.look(namespace)
        else:
            changed = upgrading.upgrade(namespace, progress)
    if not check:
        if as_json:
            print_json({"namespace": namespace, "version": __version__, "actors": changed})
        else:
            click.echo(f"{len(changed)} actors in namespace {namespace!r} go on with version {__version__}")
        return
    if as_json:
        print_json(
            {"namespace": namespace, "version": __version__, "protocol": wire.PROTOCOL, "actors": found}
        )
        return
    for name, said in found.items():
        same = said["version"] == __version__
        note = "the same version: its code is loaded anew" if same else f"becomes {__version__}"
        protocol = (
            "" if said["protocol"] == wire.PROTOCOL else f", protocol {said['protocol']} -> {wire.PROTOCOL}"
        )
        click.echo(f"{name}: version {said['version']}, {note}{protocol}")


# --- doctor


class Findings:
    """What was looked at: (level, what, text). Levels: ok, warn, FAIL."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, str]] = []
        self.facts: dict[str, Any] = {}

    def add(self, level: str, what: str, text: str) -> None:
        self.lines.append((level, what, text))

    def ok_if(self, good: bool, what: str, text: str, otherwise: str = "FAIL") -> None:
        self.add("ok" if good else otherwise, what, text)

    @property
    def failed(self) -> bool:
        return any(level == "FAIL" for level, _, _ in self.lines)


@click.command()
@store_option
@config_option
@click.option("--no-sync", is_flag=True, help="Don't measure how long a sync takes.")
@cluster_options
@json_option
def doctor(
    store: str | None, config: str | None, no_sync: bool, address: str | None, namespace: str, as_json: bool
) -> None:
    """Look at everything that the pools stand on: Ray, the store and its disk, clocks, versions, nodes, actors.

    Exit code 1 if anything fails, 3 if there is no cluster; the store is looked at all the same.
    """
    from ray_pools.store_doctor import look_at_store

    if (
        config is not None
        and click.get_current_context().get_parameter_source("namespace") is ParameterSource.DEFAULT
    ):
        from ray_pools.config import load_config

        namespace = load_config(config).namespace
    found = Findings()
    reached = _look_at_cluster(found, address, namespace)
    running = found.facts.pop("store", None)
    given = find_store(store, config, None, namespace) if store or config else None
    place = given or running or find_store(None, None, None, namespace, ask=False)
    if given and running and given != running:
        found.add("warn", "store", f"{given} is not the one that the running coordinator uses: {running}")
    found.facts["store"] = look_at_store(place, found.add, measure=not no_sync)
    if as_json:
        checks = [{"level": level, "check": what, "text": text} for level, what, text in found.lines]
        print_json({"ok": not found.failed and reached, "cluster": reached, "checks": checks, **found.facts})
    else:
        for level, what, text in found.lines:
            click.echo(f"{level:<4}  {what}: {text}")
    if not reached:
        click.get_current_context().exit(NO_CLUSTER)
    if found.failed:
        click.get_current_context().exit(1)


def _look_at_cluster(found: Findings, address: str | None, namespace: str) -> bool:
    """Ray, nodes, actors and what the coordinator says. False where there is no cluster."""
    try:
        use_cluster(address, namespace)
        connect_ray(None)
    except Unreachable as problem:
        found.add("FAIL", "ray", str(problem))
        return False
    from ray_pools.actors import doctor as looks

    facts = looks.ray_facts()
    found.facts["ray"] = facts
    found.add("ok", "ray", f"version {facts['version']}")
    known = facts["autoscaler"] in ("v1", "v2")
    found.ok_if(known, "autoscaler", facts["autoscaler"], "warn")
    nodes = looks.nodes()
    found.facts["nodes"] = nodes
    for node in nodes:
        _look_at_node(found, node, facts["version"])
    actors = looks.actors(namespace)
    found.facts["actors"] = actors
    if "coordinator" not in actors:
        found.add("FAIL", "coordinator", f"no pools run in namespace {namespace!r}")
    for name, said in actors.items():
        _look_at_actor(found, name, said)
    if "unreachable" not in actors.get("coordinator", {"unreachable": ""}):
        _look_at_status(found, namespace)
    return True


def _look_at_node(found: Findings, node: dict[str, Any], ray_version: str) -> None:
    from ray_pools.core.holders import short_node

    what = f"node {node['address']} {short_node(node['node'])}" + (" (head)" if node["head"] else "")
    if "problem" in node:
        found.add("FAIL", what, f"ray_pools can't be used there: {node['problem']}")
    elif node["version"] != __version__ or node["ray"] != ray_version:
        text = f"ray-pools {node['version']} with Ray {node['ray']}, but {__version__} with Ray {ray_version} here"
        found.add("FAIL", what, text)
    else:
        found.add("ok", what, f"ray-pools {node['version']}, Python {node['python']}")


def _look_at_actor(found: Findings, name: str, said: dict[str, Any]) -> None:
    from ray_pools import wire

    if "unreachable" in said:
        found.add("FAIL", name, f"does not answer: {said['unreachable']}")
        return
    where = (
        f"version {said['version']}, protocol {said['protocol']}, epoch {said['epoch']}, {said['seq']} rows"
    )
    if said["protocol"] != wire.PROTOCOL:
        found.add("FAIL", name, f"{where}; this driver speaks protocol {wire.PROTOCOL}")
    else:
        same = said["version"] == __version__
        found.ok_if(
            same, name, where + ("" if same else f"; this driver has {__version__}: `pools upgrade`"), "warn"
        )
    if said["skew_s"] is not None:
        late = f"{said['skew_s']:+.3f} s against the wall clock here"
        found.ok_if(abs(said["skew_s"]) <= SKEW_WARN_S, f"clock of {name}", late, "warn")


def _look_at_status(found: Findings, namespace: str) -> None:
    from ray_pools.client import connect as connect_client

    try:
        with connect_client(None, namespace, quiet=True, give_up_s=5.0) as client:
            status, config = client.coordinator({"op": "status"}), client.config()
    except PoolsError as problem:
        found.add("FAIL", "coordinator", str(problem))
        return
    found.facts["store"] = config.get("store")
    for pool in status["silent"]:
        found.add("FAIL", f"pool {pool}", "is silent: the coordinator does not reach it")
    for pool, why in status["trouble"].items():
        found.add("warn", f"pool {pool}", f"does not have the coordinator's news: {why}")
    missing = [pool for pool in status["pools"] if f"pool:{pool}" not in found.facts["actors"]]
    for pool in missing:
        found.add("FAIL", f"pool {pool}", "is configured, but its actor does not run: `pools up CONFIG`")
    if not (status["silent"] or status["trouble"] or missing):
        found.add("ok", "links", f"the coordinator reaches {counted(len(status['pools']), 'pool')}")
    prewarm = status.get("prewarm") or {}
    if prewarm.get("error"):
        found.add("warn", "prewarming", str(prewarm["error"]))
    _look_at_placement(found, config)
    from ray_pools.cli.status import cut_text, outside_text

    for pool, cut in (prewarm.get("cut") or {}).items():
        found.add("warn", f"nodes of pool {pool}", f"can never all come up: {cut_text(cut)}")
    if prewarm.get("overwritten"):
        text = f"somebody else wrote over the wish for nodes {counted(prewarm['overwritten'], 'time')}"
        found.add("warn", "prewarming", f"{text} (last {prewarm['overwritten_by']}); it was put right")
    for each in (status.get("outside") or {}).get("jobs") or ():
        found.add("warn", "GPUs outside of the pools", outside_text(each))


def _look_at_placement(found: Findings, config: dict[str, Any]) -> None:
    from ray_pools.actors.doctor import misplaced
    from ray_pools.core.config_rules import PoolConfig

    for pool, why in misplaced(PoolConfig.from_wire(wire) for wire in config["pools"]).items():
        found.add("warn", f"placement of pool {pool}", f"what it grants can't be placed: {why}")
