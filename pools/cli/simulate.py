"""`pools simulate`: a job trace through the pools of one or more configurations, in virtual time."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ray_pools.cli.connection import json_option
from ray_pools.cli.output import amounts_text, print_json, print_table, progress
from ray_pools.cli.store_place import store_option
from ray_pools.cli.times import UNITS_S, seconds_in
from ray_pools.counting import counted
from ray_pools.errors import BadInput
from ray_pools.limits import SECONDS_MAX

if TYPE_CHECKING:
    from ray_pools.config import Config
    from ray_pools.simulate.play import Played
    from ray_pools.trace import TraceJob

REJECTIONS_SHOWN = 20
WIDTH = 80
"""Columns of these tables where stdout is no terminal: they have so many that one line of all is not to be read."""


class Seconds(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic in newer clicks only
    """Seconds, or a number with a unit: 90, 15m, 6h, 28d."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        seconds = seconds_in(str(value))
        if seconds is None or seconds > SECONDS_MAX:
            self.fail(
                f"{value!r}: seconds, or a number with s, m, h or d, at most {SECONDS_MAX} s", param, ctx
            )
        return seconds


@click.command()
@click.argument("config", type=click.Path())
@click.argument("trace", metavar="TRACE | --from-log [POOL...]", nargs=-1, type=click.Path())
@click.option(
    "--from-log",
    is_flag=True,
    help="Not a trace but the real logs of CONFIG's pools (or of those named) are played again, under CONFIG.",
)
@store_option
@click.option(
    "--against",
    "others",
    metavar="CONFIG2",
    multiple=True,
    type=click.Path(),
    help="Another configuration for the same trace, shown beside it. Can be given several times.",
)
@click.option(
    "--from", "from_s", type=Seconds(), help="Only jobs submitted at this time or later: 28d, 6h, 90."
)
@click.option("--to", "to_s", type=Seconds(), help="Only jobs submitted before this time.")
@click.option(
    "--checkpoint-every",
    "checkpoint_every_s",
    type=Seconds(),
    help="Running time between two checkpoints of a job. Default: none, so a preempted job begins anew. 0: it saves all"
    " its work when it is told to stop.",
)
@click.option(
    "--stop-after",
    "stop_s",
    type=Seconds(),
    help="How long a preempted job takes to stop, at most its pool's grace. Default: 0.",
)
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(),
    help="Write report.md, report.json, jobs-NAME.csv and plots there.",
)
@json_option
def simulate(
    config: str,
    trace: tuple[str, ...],
    from_log: bool,
    store: str | None,
    others: tuple[str, ...],
    from_s: float | None,
    to_s: float | None,
    checkpoint_every_s: float | None,
    stop_s: float | None,
    out: str | None,
    as_json: bool,
) -> None:
    """Play the jobs of TRACE through the pools of CONFIG in virtual time, and say who got what.

    It is the pools' own core that decides, without Ray: nothing is started. Each job asks for its GPUs as its
    requester, runs for its duration once granted, and begins anew, or from its last checkpoint, when it was preempted.
    TRACE is .csv or .csv.gz with submit_s, duration_s, gpus, requester (and mcpu, memory_mb, for pools that meter
    them), sorted by submit_s. The same input gives the same output, byte for byte.

    With --from-log, what would have been different in the logs under CONFIG: the same requests come at the same times
    and hold as long as they did.
    """
    if from_log:
        _no_others(others, from_s, to_s, checkpoint_every_s, stop_s, out)
        rerun(config, trace, store, as_json)
        return
    if len(trace) != 1:
        raise click.UsageError("one TRACE is needed, or --from-log")
    if store is not None:
        raise click.UsageError("--store goes with --from-log")
    _simulate(config, trace[0], others, (from_s, to_s), checkpoint_every_s, stop_s or 0.0, out, as_json)


def _no_others(others: tuple[str, ...], *given: object) -> None:
    if others or any(value is not None for value in given):
        raise click.UsageError("--from-log takes CONFIG, pools and --store: what jobs do is as in the log")


def _simulate(
    config: str,
    trace: str,
    others: tuple[str, ...],
    between: tuple[float | None, float | None],
    checkpoint_every_s: float | None,
    stop_s: float,
    out: str | None,
    as_json: bool,
) -> None:
    from ray_pools.simulate.play import play
    from ray_pools.simulate.report import comparison
    from ray_pools.trace import read_trace

    configs = load_configs((config, *others))
    jobs = window(read_trace(trace), *between, trace)
    played: dict[str, Played] = {}
    for name, (pools, policies) in configs.items():
        played[name] = play(
            pools,
            policies,
            jobs,
            checkpoint_every_s=math.inf if checkpoint_every_s is None else checkpoint_every_s,
            stop_s=stop_s,
        )
    said = comparison(jobs, played)
    if out is not None:
        from ray_pools.simulate.files import write_all

        for path in write_all(Path(out), said, played):
            progress(f"wrote {path}")
        if importlib.util.find_spec("matplotlib") is None:
            progress("no plots: matplotlib is not installed (pip install 'ray-pools[plot]')")
    if as_json:
        print_json(said)
    else:
        show(said)


def load_configs(paths: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Each file's name without its ending, or the path where two have the same; its pools and policies."""
    from ray_pools.config import STORE_ENV, load_config

    stems = [Path(path).stem for path in paths]
    configs: dict[str, tuple[Any, Any]] = {}
    for path, stem in zip(paths, stems, strict=True):
        name = stem if stems.count(stem) == 1 else path
        if name in configs:
            raise BadInput("--against", path, "each configuration once")
        found: Config = load_config(path, {STORE_ENV: "sqlite:///nowhere"})
        configs[name] = found.core_pools(), found.core_policies()
        if not found.pools:
            raise BadInput("pools", "none", "at least one pool", path)
    return configs


def window(jobs: list[TraceJob], from_s: float | None, to_s: float | None, trace: str) -> list[TraceJob]:
    """The jobs that were submitted in this window. BadInput if there are none."""
    if from_s is None and to_s is None:
        return jobs
    low, high = from_s or 0.0, math.inf if to_s is None else to_s
    found = [job for job in jobs if low <= job.submit_s < high]
    if not found:
        expected = (
            f"a window with jobs: those of {trace} are from {as_typed(jobs[0].submit_s)} to"
            f" {as_typed(jobs[-1].submit_s)}"
        )
        until = "the end" if high == math.inf else as_typed(high)
        raise BadInput("--from/--to", f"{as_typed(low)} to {until}", expected)
    return found


def as_typed(seconds: float) -> str:
    """`90d`, `6h`, `15m` or `90s`: as `Seconds` takes it, in the largest unit that says it whole."""
    for unit in ("d", "h", "m"):
        if seconds and seconds % UNITS_S[unit] == 0:
            return f"{seconds / UNITS_S[unit]:.0f}{unit}"
    return f"{seconds:.0f}s"


# --- a log again

CHANGES_SHOWN = 20


def rerun(config_path: str, named: Sequence[str], store: str | None, as_json: bool) -> None:
    """Plays the logs again under the configuration, and says what would have been different."""
    from ray_pools.config import load_config, store_address
    from ray_pools.simulate.differences import differences
    from ray_pools.simulate.history import read_history
    from ray_pools.simulate.rerun import Rerun
    from ray_pools.store import NoLog

    config = load_config(config_path)
    for name in named:
        if name not in config.pools:
            raise BadInput("POOL", name, f"a pool of {config_path}: {', '.join(config.pools)}")
    address = config.store if store is None else store_address(store, Path(), "--store")
    try:
        history = read_history(address, named or list(config.pools))
    except NoLog as problem:
        field, given = ("--store", store) if store is not None else ("CONFIG", config_path)
        raise BadInput(
            field, given, f"with the logs of its pools: there is none at {problem.where}"
        ) from None
    if not history.requests:
        raise BadInput("--from-log", address, "logs with at least one request")
    said = differences(Rerun(config.core_pools(), config.core_policies(), history).run())
    if as_json:
        print_json(said)
    else:
        _show_rerun(said)


def _show_rerun(said: Mapping[str, Any]) -> None:
    rows = []
    for team, sums in [*said["teams"].items(), ("all", said["total"])]:
        was, now = sums["was"], sums["now"]
        rows.append(
            [
                team,
                sums["requests"],
                was["granted"],
                now["granted"],
                *(
                    f"{span_text(was['wait_s'][name])} / {span_text(now['wait_s'][name])}"
                    for name in ("mean", "p50", "p95", "max")
                ),
                f"{was['preempted']} / {now['preempted']}",
                f"{was['rejected']} / {now['rejected']}",
            ]
        )
    columns = ("team", "#requests", "#granted", "#now", "#wait mean", "#p50", "#p95", "#max")
    title = "in the log / under this configuration"
    print_table((*columns, "#preempted", "#rejected"), rows, title, WIDTH)
    decisions = said["decisions"]
    if decisions["identical"]:
        click.echo(f"\nthe same {decisions['in_log']} decisions, in the same order")
    else:
        click.echo(
            f"\n{decisions['in_log']} decisions in the log, {decisions['simulated']} now;"
            f" the first {decisions['the_same_up_to']} are the same"
        )
    if said["assumed_run_times"]:
        click.echo(
            f"{counted(said['assumed_run_times'], 'request')} never ran to the end in the log: the team's median is"
            " taken for it"
        )
    if said["configured_in_log"] > 1:
        click.echo(
            f"the log has {said['configured_in_log']} configurations, one after the other: here it is one all along"
        )
    for change in said["changed"][:CHANGES_SHOWN]:
        was, now = change["was"], change["now"]
        click.echo(
            f"{change['id']} ({change['requester']}, {amounts_text(change['amounts'])}): in the log {_went(was)};"
            f" now {_went(now)}"
        )
    if len(said["changed"]) > CHANGES_SHOWN:
        click.echo(f"and {len(said['changed']) - CHANGES_SHOWN} more (all with --json)")


def _went(side: Mapping[str, Any]) -> str:
    where = f" in {side['pool']}" if side["pool"] else ""
    waited = "never granted" if side["wait_s"] is None else f"waited {span_text(side['wait_s'])}"
    times = "once" if side["preempted"] == 1 else f"{side['preempted']} times"
    stopped = f", was preempted {times}" if side["preempted"] else ""
    return f"{waited}{stopped}, {side['state']}{where}"


# --- what is shown


def show(said: Mapping[str, Any]) -> None:
    """All configurations beside each other, then each one's teams."""
    configs: Mapping[str, Any] = said["configs"]
    common = said["admitted_by_all"]
    rows = []
    for name, report in configs.items():
        total = report["total"]
        waits = common["wait_s"][name]
        rows.append(
            [
                name,
                f"{total['utilisation']:.3f}",
                f"{total['goodput']:.3f}",
                span_text(waits["mean"]),
                span_text(waits["p50"]),
                span_text(waits["p95"]),
                number_text(total["bounded_slowdown"]["p50"]),
                total["preemptions_suffered"],
                f"{total['lost_gpu_h']:,.0f}",
                f"{total['rejected_gpu_h']:,.0f}",
                f"{total['unmet_share_gpu_h']:g}",
            ]
        )
    columns = ("configuration", "#utilisation", "#goodput", "#wait mean", "#wait p50", "#wait p95")
    more = ("#slowdown p50", "#preempted", "#lost GPU-h", "#rejected GPU-h", "#unmet share")
    print_table((*columns, *more), rows, "", WIDTH)
    trace = said["trace"]
    click.echo(
        f"\n{counted(trace['jobs'], 'job')}; waits of the {common['jobs']} that every configuration admits, until they"
        " first start"
    )
    for name, report in configs.items():
        click.echo()
        _show_teams(name, report)
    for name, report in configs.items():
        for line in rejection_lines(report["rejected_causes"]):
            click.echo(f"{name}: {line}")
        if report["total"]["unfinished"]:
            click.echo(f"{name}: {counted(report['total']['unfinished'], 'job')} never came to an end")


def _show_teams(name: str, report: Mapping[str, Any]) -> None:
    columns = (
        "team",
        "#jobs",
        "#rejected",
        "#in share",
        "#borrowed",
        "#lost",
        "#wait mean",
        "#p50",
        "#p95",
        "#max",
    )
    rows = []
    for team, said in [*report["teams"].items(), ("all", report["total"])]:
        waits = said["wait_s"]
        rows.append(
            [
                team,
                said["jobs"],
                said["rejected"],
                *(f"{said[f'{part}_gpu_h']:,.0f}" for part in ("in_share", "borrowed", "lost")),
                *(span_text(waits[part]) for part in ("mean", "p50", "p95", "max")),
                number_text(said["bounded_slowdown"]["p50"]),
                said["preemptions_suffered"],
                said["preemptions_caused"],
            ]
        )
    title = f"{name}: {counted(report['capacity'], 'GPU')} (in share, borrowed, lost: GPU-hours)"
    print_table((*columns, "#slowdown p50", "#preempted", "#preempted others"), rows, title, WIDTH)


def rejection_lines(rejected: Sequence[Mapping[str, Any]]) -> list[str]:
    """Who was refused, and why."""
    lines = [
        f"rejected: {counted(each['jobs'], 'job')} of {each['team']} (up to {counted(each['gpus_max'], 'GPU')}):"
        f" {each['causes']}"
        for each in rejected[:REJECTIONS_SHOWN]
    ]
    if len(rejected) > REJECTIONS_SHOWN:
        lines.append(f"and jobs of {len(rejected) - REJECTIONS_SHOWN} more")
    return lines


def span_text(seconds: float | None) -> str:
    """As `duration_text`, or a dash."""
    from ray_pools.client.explanation import duration_text

    return "-" if seconds is None else duration_text(seconds)


def number_text(value: float | None) -> str:
    """One decimal, or a dash."""
    return "-" if value is None else f"{value:,.1f}"
