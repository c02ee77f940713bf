"""`pools replay`: a job trace through live pools, then who got what, and what the log check says."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ray_pools.cli.connection import (
    address_option,
    connect_ray,
    find_local,
    json_option,
    keep_ray_quiet,
    use_cluster,
    use_local,
)
from ray_pools.cli.output import print_json, print_table, progress
from ray_pools.counting import counted
from ray_pools.errors import BadInput, PoolsError, Refused
from ray_pools.limits import RETRIES_MAX, SECONDS_MAX, TRACE_MAX_ROWS, check_integer

if TYPE_CHECKING:
    from ray_pools.client import Client
    from ray_pools.client.replay import Played, Progress
    from ray_pools.config import Config
    from ray_pools.log_check import LogReport
    from ray_pools.log_usage import TeamUsage
    from ray_pools.trace import TraceJob

SPEED_MAX = 1e6
PROBLEMS_SHOWN = 20
_PLAIN_EVERY_S = 5.0
_IDLE_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Plan:
    """What to play, all of it checked. `own_store`: a folder to remove when all went well; None: not ours."""

    config: Config
    jobs: Sequence[TraceJob]
    speed: float = 1.0
    retries: int = 3
    timeout_s: float | None = None
    own_store: Path | None = None


@dataclass
class Result:
    """What came of a replay; `teams` has a dict per requester, as --json shows it."""

    played: Played
    report: LogReport | None
    teams: dict[str, dict[str, Any]]
    unchecked: str = ""

    @property
    def ok(self) -> bool:
        """Every job came to its end, and the logs hold what they should."""
        checked = self.report is not None and self.report.ok
        return checked and not self.played.timed_out and not self.played.failures


@click.command()
@click.argument("config", type=click.Path())
@click.argument("trace", type=click.Path())
@click.option("--limit", type=int, metavar="N", help="Only the first N rows (behind --skip).")
@click.option("--skip", type=int, default=0, metavar="N", help="Leave the first N rows out.")
@click.option("--speed", type=float, default=1.0, show_default=True, help="How much faster than the trace.")
@click.option(
    "--retries",
    type=int,
    default=3,
    show_default=True,
    help="How often a preempted job queues again. It does what is left of its duration then.",
)
@click.option(
    "--timeout", "timeout_s", type=float, metavar="S", help="Cancel what is not over after S seconds."
)
@click.option(
    "--store", metavar="DIR", help="Where the logs go, and stay. Default: CONFIG's, else a temporary one."
)
@click.option(
    "--local/--no-local",
    default=None,
    help="A local cluster for this replay alone / never one. Default: one only where no cluster is found.",
)
@click.option(
    "--cluster",
    metavar="CLUSTER.YAML",
    type=click.Path(),
    help="Whose node types a local cluster has. Default: cluster.yaml beside CONFIG, else the shipped one.",
)
@address_option
@json_option
def replay(
    config: str,
    trace: str,
    limit: int | None,
    skip: int,
    speed: float,
    retries: int,
    timeout_s: float | None,
    store: str | None,
    local: bool | None,
    cluster: str | None,
    address: str | None,
    as_json: bool,
) -> None:
    """Play the jobs of TRACE through live pools of CONFIG, and check the logs.

    Each job asks for its GPUs as its requester, runs as Ray tasks inside its grant that sleep for its duration, and
    releases. TRACE is .csv or .csv.gz with submit_s, duration_s, gpus, requester, sorted by submit_s.

    Pools that this command brings up are taken down at the end, and a cluster that it starts is stopped. Exit code 1:
    a job failed, the timeout came, or the log check found problems.
    """
    given = click.get_current_context().get_parameter_source("address")
    if local and address is not None and given is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--local starts a cluster of its own: leave --address out")
    plan = _plan(config, trace, limit, skip, speed, retries, timeout_s, store)
    try:
        with _pools_for(plan, Path(config), local, cluster, address) as client:
            result = run(plan, client)
    except BaseException:
        _drop_store(plan)
        raise
    if as_json:
        print_json(_as_json(plan, result))
    else:
        _print(plan, result)
    if result.report is not None and result.report.ok:
        _drop_store(plan)
    elif plan.own_store is not None:
        progress(f"the logs stay in {plan.own_store}")
    if not result.ok:
        raise click.exceptions.Exit(1)


# --- before anything starts


def _plan(
    config: str,
    trace: str,
    limit: int | None,
    skip: int,
    speed: float,
    retries: int,
    timeout_s: float | None,
    store: str | None,
) -> Plan:
    """Reads and checks everything. BadInput for whatever is wrong; nothing is started then."""
    from ray_pools.config import STORE_ENV, load_config, store_address
    from ray_pools.trace import read_trace

    if limit is not None:
        check_integer("--limit", limit, 1, TRACE_MAX_ROWS)
    check_integer("--skip", skip, 0, TRACE_MAX_ROWS - (limit or 1))
    check_integer("--retries", retries, 0, RETRIES_MAX)
    if not 0 < speed <= SPEED_MAX:
        raise BadInput("--speed", speed, f"a number above 0, at most {SPEED_MAX:g}")
    if timeout_s is not None and not 0 < timeout_s <= SECONDS_MAX:
        raise BadInput("--timeout", timeout_s, f"seconds above 0, at most {SECONDS_MAX}")
    unset = "sqlite:///nowhere"
    wanted = load_config(config, {STORE_ENV: unset})
    rows = read_trace(trace, None if limit is None else limit + skip)
    if len(rows) <= skip:
        raise BadInput("--skip", skip, f"fewer than the {len(rows)} rows of {trace}")
    known = {policy.requester for policy in wanted.policies}
    for row in rows[skip:]:
        if row.requester not in known:
            expected = f"a requester with a policy in {config}: {', '.join(sorted(known)) or 'there is none'}"
            raise BadInput("requester", row.requester, expected, f"{trace}, row {row.id}")
    own: Path | None = None
    if store is not None:
        address = store_address(store, Path(), "--store")
        if not address.startswith("sqlite://"):
            raise BadInput("--store", store, "a folder: the actors and this command must both find it")
        wanted = wanted.model_copy(update={"store": address})
    elif wanted.store == unset:
        own = Path(tempfile.mkdtemp(prefix="pools-replay-"))
        wanted = wanted.model_copy(update={"store": f"sqlite://{own}"})
    return Plan(wanted, rows[skip:], speed, retries, timeout_s, own)


def _drop_store(plan: Plan) -> None:
    if plan.own_store is not None:
        shutil.rmtree(plan.own_store, ignore_errors=True)


# --- the pools


@contextlib.contextmanager
def _pools_for(
    plan: Plan, config_path: Path, local: bool | None, cluster_yaml: str | None, address: str | None
) -> Iterator[Client]:
    """A client of running pools. What is started here ends with the block."""
    with contextlib.ExitStack() as stack:
        namespace = plan.config.namespace
        if local or (local is None and address is None and find_local(namespace) is None):
            from ray_pools.local_cluster import LocalCluster

            started = LocalCluster.from_cluster_yaml(
                cluster_yaml,
                beside=config_path,
                idle_timeout_s=_IDLE_TIMEOUT_S,
                dashboard=False,
                on_event=progress,
            )
            use_local(stack.enter_context(started))
        else:
            use_cluster(address, namespace)
        _bring_up(plan.config, stack)
        from ray_pools.client import connect

        yield stack.enter_context(connect(None, namespace, quiet=True))


def _bring_up(config: Config, stack: contextlib.ExitStack) -> None:
    """Makes the pools, unless they run; running ones must have this very configuration."""
    from ray_pools.actors import deploy
    from ray_pools.client import disconnect_ray

    keep_ray_quiet()
    stack.enter_context(deploy.empty_directory())
    connect_ray(None)
    stack.callback(disconnect_ray)
    pools, policies = config.core_pools(), config.core_policies()
    if deploy.running_actors(config.namespace):
        _must_match(config)
        return
    from ray_pools.core.access import LIMITS

    options = {
        "prewarm_period_s": config.prewarm.period_s,
        "prewarm_linger_s": config.prewarm.linger_s,
        "clock": "wall",
    }
    stack.callback(_take_down, config.namespace)
    most = {name: most for name, (_, most) in LIMITS.items()}  # a trace asks for what it asks for
    deploy.up(
        pools,
        policies,
        namespace=config.namespace,
        store=config.store,
        options=options,
        access={"requesters": {}, "operators": {}, "limits": most},
        progress=progress,
    )


def _must_match(config: Config) -> None:
    """A replay changes nothing of pools that others use."""
    from ray_pools.client import connect
    from ray_pools.config_difference import difference

    with connect(None, config.namespace, quiet=True) as client:
        changes = difference(client.config(), config.core_pools(), config.core_policies())
    if changes:
        raise Refused(
            "config_differs",
            f"pools run in namespace {config.namespace!r} with another configuration: bring them to this one with"
            " `pools up`, or use another namespace",
        )


def _take_down(namespace: str) -> None:
    from ray_pools.actors import deploy

    try:
        deploy.down(namespace, force=True)
    except PoolsError as problem:
        progress(f"the pools were not taken down: {problem}")


# --- the replay


def run(
    plan: Plan, client: Client, on_progress: Callable[[Progress], object] = lambda progress: None
) -> Result:
    """Plays, then reads the logs. `on_progress` is called beside the progress line."""
    from ray_pools.client.replay import play

    began_s = time.time()
    with _progress_line() as tell:

        def both(seen: Progress) -> None:
            tell(seen.text())
            on_progress(seen)

        played = play(
            client,
            plan.jobs,
            speed=plan.speed,
            retries=plan.retries,
            timeout_s=plan.timeout_s,
            on_progress=both,
        )
    return _result(plan, client, played, began_s)


@contextlib.contextmanager
def _progress_line() -> Iterator[Callable[[str], None]]:
    """One line on a terminal's stderr that changes; else a line now and then."""
    from rich.console import Console

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    if console.is_terminal:
        with console.status("starting") as status:
            yield status.update
        return
    last: list[Any] = [-_PLAIN_EVERY_S, ""]

    def tell(text: str) -> None:
        now = time.monotonic()
        if text != last[1] and now - last[0] >= _PLAIN_EVERY_S:
            last[:] = [now, text]
            progress(text)

    yield tell


def _result(plan: Plan, client: Client, played: Played, began_s: float) -> Result:
    from ray_pools.log_check import check_logs
    from ray_pools.log_usage import team_usage

    pools = list(plan.config.pools)
    store = plan.config.store
    usage: dict[str, TeamUsage] = {}
    report, why = None, _other_store(client, store)
    if not why:
        live = {"coordinator": client.coordinator({"op": "digest"})}
        live.update({f"pool:{pool}": client.pool(pool, {"op": "digest"}) for pool in pools})
        report = check_logs(store, pools, live)
        usage = team_usage(store, pools, since_s=began_s)
    return Result(played, report, _teams(plan, played, usage), why)


def _other_store(client: Client, store: str) -> str:
    """Why the logs of these pools can't be read here; "" if they can."""
    from ray_pools.store import open_reader

    theirs = client.status()["coordinator"]["store"]
    try:
        reader = open_reader(store, "coordinator")
    except PoolsError as problem:
        return f"the pools' log is not here: {problem}"
    where = reader.where
    reader.close()
    return "" if where == theirs else f"the pools keep their log in {theirs}, CONFIG says {where}"


def _teams(plan: Plan, played: Played, usage: Mapping[str, TeamUsage]) -> dict[str, dict[str, Any]]:
    from ray_pools.log_usage import TeamUsage, quantile

    teams: dict[str, dict[str, Any]] = {}
    for requester in sorted({job.requester for job in plan.jobs}):
        used = usage.get(requester) or TeamUsage()
        outcomes = [
            played.outcomes.get(job.id, "unfinished") for job in plan.jobs if job.requester == requester
        ]
        waits = {
            name: wait and round(wait, 3)
            for name, wait in (("p50", quantile(used.waits_s, 0.5)), ("p95", quantile(used.waits_s, 0.95)))
        }
        teams[requester] = {
            "jobs": len(outcomes),
            "outcomes": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
            "gpu_s_in_share": round(used.in_share_s, 3),
            "gpu_s_borrowed": round(used.borrowed_s, 3),
            "gpu_s_by_pool": {pool: round(s, 3) for pool, s in sorted(used.by_pool_s.items())},
            "wait_s": waits,
            "wait_trace_s": {name: wait and round(wait * plan.speed) for name, wait in waits.items()},
            "preemptions_suffered": used.suffered,
            "preemptions_caused": used.caused,
        }
    return teams


# --- what is shown


def _as_json(plan: Plan, result: Result) -> dict[str, Any]:
    report = result.report
    check: dict[str, Any] = {"ok": None, "why": result.unchecked}
    if report is not None:
        check = {
            "ok": report.ok,
            "problems": [problem._asdict() for problem in report.problems],
            "events": report.events,
            "digests": report.digests,
        }
    return {
        "jobs": len(plan.jobs),
        "speed": plan.speed,
        "seconds": round(result.played.seconds, 3),
        "nodes_max": result.played.nodes_max,
        "timed_out": result.played.timed_out,
        "failures": result.played.failures,
        "teams": result.teams,
        "log_check": check,
    }


def _print(plan: Plan, result: Result) -> None:
    played = result.played
    columns = ("team", "#jobs", "#done", "#in share", "#borrowed", "#wait p50", "#wait p95", "#preempted")
    rows = []
    for name, team in result.teams.items():
        cells = [name, team["jobs"], team["outcomes"].get("done", 0)]
        cells += [f"{team[f'gpu_s_{part}']:.0f}" for part in ("in_share", "borrowed")]
        cells += [_wait(team, "p50"), _wait(team, "p95")]
        rows.append([*cells, f"{team['preemptions_suffered']} / {team['preemptions_caused']}"])
    print_table(columns, rows)
    click.echo(
        "\nIn share and borrowed: GPU-seconds. Waits: until the first grant is usable (in the trace's time). Preempted:"
        " its jobs / others for its jobs."
    )
    others = [f", {n} {outcome}" for outcome, n in sorted(_totals(result).items()) if outcome != "done"]
    click.echo(
        f"{counted(len(plan.jobs), 'job')} of {counted(len(rows), 'team')} at {plan.speed:g} times the trace's speed:"
        f" {_totals(result).get('done', 0)} done{''.join(others)}; {played.seconds:.0f} s,"
        f" up to {counted(played.nodes_max, 'node')}"
    )
    for row, why in list(played.failures.items())[:PROBLEMS_SHOWN]:
        click.echo(f"row {row} failed: {why}")
    if played.timed_out:
        click.echo(f"the timeout of {plan.timeout_s:g} s came: what was not over is cancelled")
    if result.report is None:
        click.echo(f"log check: not made: {result.unchecked}")
        return
    click.echo(result.report.text())
    for problem in result.report.problems[:PROBLEMS_SHOWN]:
        click.echo(f"  {problem}")
    if len(result.report.problems) > PROBLEMS_SHOWN:
        click.echo(f"  and {len(result.report.problems) - PROBLEMS_SHOWN} more")


def _wait(team: Mapping[str, Any], name: str) -> str:
    wait = team["wait_s"][name]
    return "-" if wait is None else f"{wait:.1f}s ({_span(team['wait_trace_s'][name])})"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 7200 else f"{seconds / 3600:.0f}h"


def _totals(result: Result) -> dict[str, int]:
    totals: dict[str, int] = {}
    for team in result.teams.values():
        for outcome, count in team["outcomes"].items():
            totals[outcome] = totals.get(outcome, 0) + count
    return totals
