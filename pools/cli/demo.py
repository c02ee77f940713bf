"""`pools demo`: a local cluster, pools, a workload, told live; then everything is stopped.

The cluster has the node types of the shipped cluster.yaml, the pools and the workload are examples/demo.yaml and
examples/demo_workload.csv, of which the package carries copies. The log of the pools lies in the cluster's own
directory and goes with it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from ray_pools.cli.connection import keep_ray_quiet, note_namespaces, use_local
from ray_pools.cli.output import print_json
from ray_pools.errors import PoolsError

if TYPE_CHECKING:
    from rich.console import Console

    from ray_pools.config import Config
    from ray_pools.demo_story import Line
    from ray_pools.local_cluster import LocalCluster

DATA = Path(__file__).parent.parent / "data"
CONFIG, WORKLOAD = DATA / "demo.yaml", DATA / "demo_workload.csv"
MUST_HAPPEN = {"reclaims": "a reclaim", "fallbacks": "a fallback grant", "scale_ups": "a scale-up"}

STYLES = {
    "ask": "bold",
    "grant": "green",
    "fallback": "bold magenta",
    "reclaim": "bold yellow",
    "preempt": "bold yellow",
    "stop": "yellow",
    "save": "yellow",
    "queue": "cyan",
    "wait": "cyan",
    "work": "dim",
    "node": "bold blue",
}
TEAM_STYLES = ("magenta", "cyan", "yellow", "green", "blue")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON on stdout, the story on stderr.")
@click.option("--keep", is_flag=True, help="Leave cluster and pools running, to look around.")
def demo(as_json: bool, keep: bool) -> None:
    """See queueing, borrowing, reclaim, a fallback pool and scale-up on this machine, in about a minute.

    Starts an autoscaling Ray cluster of its own, plays a workload of three teams through two pools, and stops
    everything. Exit code 1 if not all of it was seen.
    """
    from rich.console import Console

    console = Console(stderr=as_json, highlight=False, markup=False, emoji=False)
    with _signals():
        summary, kept = _play(console, keep)
    missing = [what for key, what in MUST_HAPPEN.items() if not summary[key]]
    missing += [f"the end of {problem}" for problem in summary["problems"]]
    if as_json:
        print_json({**summary, "missing": missing})
    else:
        _print_summary(console, summary)
    if kept:
        console.print(kept, soft_wrap=True)
    if missing:
        raise PoolsError(f"the demo did not show {'; nor '.join(missing)}")
    if summary["log_check"] != "ok":
        raise PoolsError(f"log check: {summary['log_check']}")


_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def _signals() -> Iterator[None]:
    """Any signal to end is a Ctrl-C, and the first one counts: a second must not leave the half of it running."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in _ENDS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    with _handled(interrupt):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    before = {each: signal.signal(each, handler) for each in _ENDS}
    try:
        yield
    finally:
        for each, earlier in before.items():
            signal.signal(each, earlier)


def _play(console: Console, keep: bool) -> tuple[dict[str, Any], str]:
    """The whole run; the summary, and what to say of a cluster that was kept."""
    from ray_pools.local_cluster import LocalCluster
    from ray_pools.local_node_types import BUILT_IN

    teller = _Teller(console)
    teller.say("one Ray cluster, two pools, three teams; Ctrl-C stops everything")
    cluster = LocalCluster.from_cluster_yaml(
        BUILT_IN, idle_timeout_s=60.0, dashboard=keep, on_event=teller.say, ends_with_starter=True
    )
    is_kept = False
    try:
        cluster.start()
        summary = _run(cluster, teller)
        if keep:
            note_namespaces(cluster, [summary["namespace"]])
            cluster.keep()
            is_kept = True
    except KeyboardInterrupt:
        teller.say("interrupted: stopping everything")
        raise
    finally:
        with _handled(signal.SIG_IGN):
            _leave_ray()
            if not is_kept:
                cluster.stop()
    kept = ""
    if is_kept:
        kept = (
            f"The cluster runs on at {cluster.address}: `pools status -n {summary['namespace']}` shows its pools,"
            f" `pools down -n {summary['namespace']}` stops it."
        )
    return summary, kept


def _run(cluster: LocalCluster, teller: _Teller) -> dict[str, Any]:
    from ray_pools.config import STORE_ENV, load_config
    from ray_pools.trace import read_trace

    config = load_config(CONFIG, {**os.environ, STORE_ENV: str(cluster.directory / "log")})
    rows = read_trace(WORKLOAD)
    use_local(cluster)
    keep_ray_quiet()
    _bring_up(config, teller.say)
    teller.teams = sorted({row.requester for row in rows})
    _say_config(config, teller.say)

    from ray_pools.client.demo import run_demo

    started = time.monotonic()
    summary = dict(run_demo(config.namespace, config.store, [*config.pools], rows, teller.line))
    seconds = round(time.monotonic() - started, 1)
    log_check = _check_logs(config, summary.pop("digests"))
    return {"namespace": config.namespace, **summary, "seconds": seconds, "log_check": log_check}


def _bring_up(config: Config, say: Callable[[str], None]) -> None:
    from ray_pools.actors import deploy
    from ray_pools.client import connect_ray

    options = {
        "prewarm_period_s": config.prewarm.period_s,
        "prewarm_linger_s": config.prewarm.linger_s,
        "clock": "wall",
    }
    with deploy.empty_directory():
        ends = signal.getsignal(signal.SIGTERM)
        connect_ray(None, quiet=True)
        # Ray's own handler prints the stack, and aborts three seconds later whatever is being cleaned up
        signal.signal(signal.SIGTERM, ends)
        deploy.up(
            config.core_pools(),
            config.core_policies(),
            namespace=config.namespace,
            store=config.store,
            options=options,
            progress=say,
        )


def _say_config(config: Config, say: Callable[[str], None]) -> None:
    from ray_pools.demo_story import and_list

    for requester in dict.fromkeys(policy.requester for policy in config.policies):
        own = [policy for policy in config.policies if policy.requester == requester]
        shares = [f"{p.reserved['gpu']} GPUs of {p.pool}" for p in own if p.reserved.get("gpu")]
        owned = f"owns {and_list(shares)} and " if shares else "owns nothing and "
        say(f"team {requester} {owned}may borrow what is idle in {and_list([p.pool for p in own])}")


def _leave_ray() -> None:
    import sys

    if "ray" in sys.modules:
        from ray_pools.client import disconnect_ray

        disconnect_ray()


def _check_logs(config: Config, live: dict[str, dict[str, Any]]) -> str:
    """ "ok", or what is wrong with the logs."""
    from ray_pools.log_check import check_logs

    try:
        report = check_logs(config.store, [*config.pools], live)
    except PoolsError as problem:  # a log that can't be read is no reason to keep the summary back
        return str(problem)
    return "ok" if report.ok else "; ".join(str(problem) for problem in report.problems)


class _Teller:
    """Lines of the story on a terminal, with the seconds since the start."""

    def __init__(self, console: Console) -> None:
        self.console, self.teams = console, list[str]()
        self._started_at = time.time()

    def say(self, text: str) -> None:
        """Of no team."""
        self._print(time.time(), "", "", text)

    def line(self, line: Line) -> None:
        """Of the story."""
        self._print(line.at, line.kind, line.who, line.text)

    def _print(self, at: float, kind: str, who: str, text: str) -> None:
        from rich.text import Text

        shown = Text(f"{max(at - self._started_at, 0):5.1f} s  ", style="dim")
        if who:
            place = self.teams.index(who) if who in self.teams else 0
            width = max((len(team) for team in self.teams), default=0)
            shown.append(f"{who:{width}}  ", style=TEAM_STYLES[place % len(TEAM_STYLES)])
        shown.append(text, style=STYLES.get(kind, ""))
        self.console.print(shown, soft_wrap=True)


def _print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    columns = ("team", "asked", "in share", "borrowed", "fallback", "stopped", "wait", "max")
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column == "team" else "right", overflow="fold")
    for name, team in summary["teams"].items():
        keys = ("requests", "grants_in_share", "grants_borrowed", "grants_fallback", "preempted")
        waits = (f"{team[key]:.1f} s" for key in ("wait_mean_s", "wait_max_s"))
        table.add_row(name, *(str(team[key]) for key in keys), *waits)
    console.print()
    console.print(table)
    ups = summary["scale_ups"]
    nodes = ", ".join(f"{count} {kind}" for kind, count in ups.items()) or "none"
    console.print(
        f"\nreclaims: {summary['reclaims']}  fallback grants: {summary['fallbacks']}  "
        f"scale-ups: {sum(ups.values())} ({nodes})\nlog check: {summary['log_check']}",
        soft_wrap=True,
    )
