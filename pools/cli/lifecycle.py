"""`pools up` and `pools down`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ray_pools.cli.connection import (
    address_option,
    cluster_options,
    connect_ray,
    find_local,
    json_option,
    note_namespaces,
    noted_namespaces,
    use_cluster,
    use_local,
    was_started_by_up,
)
from ray_pools.cli.output import print_json, progress
from ray_pools.counting import counted
from ray_pools.errors import PoolsError, Unreachable

if TYPE_CHECKING:
    from ray_pools.config import Config
    from ray_pools.local_cluster import LocalCluster


@click.command()
@click.argument("config", type=click.Path())
@click.option("--local", is_flag=True, help="Start an autoscaling Ray cluster on this machine if none runs.")
@click.option(
    "--cluster",
    metavar="CLUSTER.YAML",
    type=click.Path(),
    help="With --local: whose node types it has. Default: cluster.yaml beside CONFIG, else the shipped one.",
)
@address_option
@json_option
def up(config: str, local: bool, cluster: str | None, address: str | None, as_json: bool) -> None:
    """Bring the pools of CONFIG up in a Ray cluster, or bring running ones to what CONFIG says.

    Safe to repeat. All of CONFIG is applied, or nothing.
    """
    from ray_pools.config import load_with_warnings

    wanted, warnings = load_with_warnings(config)  # before any cluster is touched
    for warning in warnings:
        progress(f"warning: {warning}")
    started: LocalCluster | None = None
    given = click.get_current_context().get_parameter_source("address")
    if local and given is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--local starts a cluster of its own: leave --address out")
    if cluster is not None and not local:
        raise click.UsageError("--cluster goes with --local")
    if local:
        found = find_local(wanted.namespace)
        if found is None:
            found = started = _start_local(cluster, Path(config))
        elif cluster is not None:
            progress(f"a local cluster runs at {found.address}: its node types stay, {cluster} is not read")
        use_local(found)
    else:
        found = use_cluster(address, wanted.namespace)
    try:
        done = _bring_up(wanted)
    except BaseException:  # Ctrl-C too: a cluster that nobody would know of
        if started is not None:
            started.stop()
        raise
    if found is not None and (local or was_started_by_up(found)):
        note_namespaces(found, [*noted_namespaces(found), wanted.namespace])
    _tell_up(wanted, done, found, as_json)


def _start_local(cluster: str | None, config: Path) -> LocalCluster:
    from ray_pools.local_cluster import LocalCluster

    return LocalCluster.from_cluster_yaml(cluster, beside=config.parent, on_event=progress).start()


def _bring_up(config: Config) -> dict[str, Any]:
    from ray_pools.actors import deploy
    from ray_pools.actors.doctor import placement_warnings

    options = {**config.timing_options(), "clock": "wall"}
    with deploy.empty_directory():
        connect_ray(None)
        for warning in placement_warnings(config.core_pools().values()):
            progress(f"warning: {warning}")
        return deploy.up(
            config.core_pools(),
            config.core_policies(),
            namespace=config.namespace,
            store=config.store,
            options=options,
            access=config.access(),
            progress=progress,
        )


def _tell_up(config: Config, done: dict[str, Any], local: LocalCluster | None, as_json: bool) -> None:
    env = local.driver_env() if local is not None else {}
    from ray_pools.store.redis_wire import masked

    address, store = done.pop("address"), masked(config.store)
    dashboard = local.dashboard_address if local is not None else None
    if as_json:
        print_json(
            {
                "namespace": config.namespace,
                "store": store,
                "address": address,
                "dashboard": dashboard,
                "env": env,
                **done,
            }
        )
        return
    what = counted(done["changes"], "change") if done["changes"] else "nothing to change"
    click.echo(f"up in namespace {config.namespace!r} at {address}: {', '.join(done['pools'])} ({what})")
    click.echo(f"logs: {store}")
    if env:
        click.echo("drivers need:")
        click.echo("export " + " ".join(f"{name}={value}" for name, value in sorted(env.items())))
    if dashboard:
        click.echo(f"jobs: ray job submit --address {dashboard} --working-dir . -- python driver.py")
    if local is not None:
        click.echo(f"the local cluster runs on until `pools down{_with_namespace(config.namespace)}`")


def _with_namespace(namespace: str) -> str:
    return "" if namespace == "pools" else f" -n {namespace}"


@click.command()
@click.option(
    "--force",
    is_flag=True,
    help="Although grants are held: their placement groups are removed, and what runs in them is killed. `up` queues"
    " again what has retries left.",
)
@click.option("--local", is_flag=True, help="Stop the local cluster too, whatever else runs in it.")
@cluster_options
def down(force: bool, local: bool, address: str | None, namespace: str) -> None:
    """Take the pools of a namespace down. Their logs stay, and `pools up` goes on from them.

    A local cluster that `pools up --local` started is stopped with the last pools in it.
    """
    cluster = use_cluster(address, namespace)
    if local and cluster is None:
        raise Unreachable("no local cluster is running")
    try:
        _take_down(namespace, force)
    except PoolsError as problem:
        # a cluster without pools in it is stopped by --local all the same
        if not (local and isinstance(problem, Unreachable)):
            raise
        progress(str(problem))
    if cluster is None or not was_started_by_up(cluster):
        return
    others = [name for name in noted_namespaces(cluster) if name != namespace]
    note_namespaces(cluster, others)
    if others and not local:
        progress(f"the local cluster runs on for {', '.join(others)}")
        return
    cluster.stop()
    click.echo("the local cluster is stopped")


def _take_down(namespace: str, force: bool) -> None:
    from ray_pools.actors import deploy

    with deploy.empty_directory():
        connect_ray(None)
        stopped = deploy.down(namespace, force=force, progress=progress)
    click.echo(f"down in namespace {namespace!r}: {counted(len(stopped), 'actor')} stopped")
