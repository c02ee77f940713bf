"""How a command finds the Ray cluster, without its user having to say which: options, local clusters, quietness.

In order: --address, RAY_ADDRESS, the local cluster that `pools up --local` started, any other Ray on this machine. A
local cluster has a note in its own directory (gone with it) of the namespaces whose pools run in it.

Ray decides about authentication when it is imported, so a local cluster's settings are put into the environment first.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ray_pools.errors import BadInput, PoolsError, Unreachable

if TYPE_CHECKING:
    from ray_pools.client import Client
    from ray_pools.local_cluster import LocalCluster

DEFAULT_NAMESPACE = "pools"
GIVE_UP_S = 15.0
"""A coordinator that restarts is back within two seconds or so."""

_NOTE = "pools-up.json"
Command = TypeVar("Command", bound=Callable[..., Any])


# --- options that commands share

address_option = click.option(
    "--address",
    envvar="RAY_ADDRESS",
    metavar="HOST:PORT",
    help="The Ray cluster. Default: RAY_ADDRESS, else the cluster on this machine.",
)
namespace_option = click.option(
    "--namespace",
    "-n",
    envvar="RAY_POOLS_NAMESPACE",
    default=DEFAULT_NAMESPACE,
    help=f"The namespace of the pools' configuration. Default: RAY_POOLS_NAMESPACE, else {DEFAULT_NAMESPACE}.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="JSON on stdout, and nothing else there.")


def cluster_options(command: Command) -> Command:
    """--address and --namespace."""
    return address_option(namespace_option(command))


# --- the namespaces of a local cluster


def noted_namespaces(cluster: LocalCluster) -> list[str]:
    """The namespaces whose pools were brought up in it."""
    try:
        noted = json.loads((cluster.directory / _NOTE).read_text())
        return [str(name) for name in noted["namespaces"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def was_started_by_up(cluster: LocalCluster) -> bool:
    """By `pools up --local`, not by a demo or a test."""
    return (cluster.directory / _NOTE).exists()


def note_namespaces(cluster: LocalCluster, namespaces: list[str]) -> None:
    """Keep them for later commands."""
    (cluster.directory / _NOTE).write_text(json.dumps({"namespaces": sorted(set(namespaces))}))


# --- finding and connecting


def find_local(namespace: str) -> LocalCluster | None:
    """The local cluster for a namespace: the one whose pools have it, else the only one that `up` started.

    Raises:
        BadInput: there are several, and nothing says which.
    """
    started = [cluster for cluster in _local_clusters() if was_started_by_up(cluster)]
    for_it = [cluster for cluster in started if namespace in noted_namespaces(cluster)]
    candidates = for_it or started
    if len(candidates) > 1:
        running = ", ".join(cluster.name for cluster in candidates)
        raise BadInput("address", None, f"one of the local clusters that run: {running}")
    return candidates[0] if candidates else None


def _local_clusters() -> list[LocalCluster]:
    """None where they can't be noted: a command inside a job needs no state directory."""
    from ray_pools.local_cluster import find_local_clusters

    try:
        return find_local_clusters()
    except (OSError, PoolsError):
        return []


def use_cluster(address: str | None, namespace: str) -> LocalCluster | None:
    """Choose the cluster and set the environment for it; the local cluster if it is one of ours."""
    if address is None:
        local = find_local(namespace)
    else:
        local = next((each for each in _local_clusters() if each.name == address), None)
    if local is not None:
        use_local(local)
    elif address is not None:
        os.environ["RAY_ADDRESS"] = address
    else:
        _leave_private_ones_alone()
    return local


def _leave_private_ones_alone() -> None:
    """Clusters of demos, replays and scenarios are theirs alone: Ray would take any that runs on this machine."""
    private = {cluster.address for cluster in _local_clusters() if not was_started_by_up(cluster)}
    if not private:
        return
    from ray_pools.client import clusters_here

    others = sorted(clusters_here() - private)
    if not others:
        raise Unreachable(
            "no Ray cluster runs on this machine but those of a demo, replay or scenario: start one with"
            " `pools up --local CONFIG`, or name one by --address"
        )
    if len(others) > 1:
        raise BadInput("address", None, f"one of the clusters that run here: {', '.join(others)}")
    os.environ["RAY_ADDRESS"] = others[0]


def use_local(cluster: LocalCluster) -> None:
    """This process belongs to it from now on."""
    env = cluster.driver_env()
    os.environ.update(env)
    if "RAY_AUTH_TOKEN_PATH" in env:
        os.environ.pop("RAY_AUTH_TOKEN", None)  # another cluster's, which Ray would prefer


def keep_ray_quiet() -> None:
    """What Ray says by itself must not come between a command and its user; errors are told by exceptions."""
    if _debugging():
        return
    warnings.simplefilter("ignore")
    os.environ.setdefault("RAY_LOG_TO_DRIVER", "0")
    for name in ("stdout", "stderr"):
        if not isinstance(getattr(sys, name), _WithoutRay):
            setattr(sys, name, _WithoutRay(getattr(sys, name)))


def keep_job_client_quiet() -> None:
    """Ray's job client tells of its WebSockets and uploads. To be called once it is imported, for it sets levels."""
    if not _debugging():
        for name in ("ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk"):
            logging.getLogger(name).setLevel(logging.WARNING)


def _debugging() -> bool:
    return bool(click.get_current_context().find_root().params.get("debug"))


class _WithoutRay:
    """A stream that drops what Ray's own threads print: its error listener writes to stdout, whatever it is told."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if threading.current_thread().name.startswith("ray_"):
            return len(text)
        return int(self._stream.write(text))


def connect_ray(address: str | None, runtime_env: dict[str, Any] | None = None) -> None:
    """Connect this process to Ray. Unreachable if nobody answers."""
    keep_ray_quiet()
    from ray_pools.client import connect_ray as connect_client_ray

    connect_client_ray(address, quiet=True, runtime_env=runtime_env)
    _end_on_sigterm()


def connect(
    address: str | None, namespace: str, give_up_s: float = GIVE_UP_S, key: str | None = None
) -> Client:
    """A client of the pools, for a command."""
    use_cluster(address, namespace)
    keep_ray_quiet()
    from ray_pools.client import connect as connect_client

    client = connect_client(None, namespace, quiet=True, give_up_s=give_up_s, key=key)
    _end_on_sigterm()
    return client


class Terminated(KeyboardInterrupt):
    """SIGTERM, as `timeout` sends it: ends a command like Ctrl-C, with exit code 143."""


def _end_on_sigterm() -> None:
    """In place of Ray's handler, which prints the stack of the process."""

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _raise_terminated)


def _raise_terminated(number: int, frame: object) -> None:
    raise Terminated


def let_it_end() -> None:
    """The command is over and the process ends: what its end still does is not cut short by a first signal, which would
    be a traceback out of an exit handler. A second one ends it at once.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    # else nothing was connected, or `pools run` has its own
    if signal.getsignal(signal.SIGTERM) is not _raise_terminated:
        return
    came: list[int] = []

    def end(number: int, frame: object) -> None:
        came.append(number)
        if len(came) > 1:
            os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
