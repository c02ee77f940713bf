"""Plots of a simulation: utilisation by team over time, how long jobs waited, and when each job ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .play import Played
from .report import HOUR_S

JOBS_DRAWN = 3000
"""Lines of a timeline: more can't be told apart."""


def plot_all(folder: Path, said: Mapping[str, Any], played: Mapping[str, Played]) -> Iterator[Path]:
    """Writes the plots and yields their paths; none where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    from .files import file_name

    for name, report in said["configs"].items():
        path = folder / f"utilisation-{file_name(name)}.png"
        _utilisation(Figure(figsize=(10, 4), layout="constrained"), name, report).savefig(path, dpi=110)
        yield path
        path = folder / f"timeline-{file_name(name)}.png"
        _timeline(Figure(figsize=(10, 5), layout="constrained"), name, played[name]).savefig(path, dpi=110)
        yield path
    path = folder / "waits.png"
    _waits(Figure(figsize=(7, 4), layout="constrained"), played).savefig(path, dpi=110)
    yield path


def _utilisation(figure: Any, name: str, report: Mapping[str, Any]) -> Any:
    axes = figure.subplots()
    series = report["utilisation"]
    teams = series["gpus"]
    length = max((len(line) for line in teams.values()), default=0)
    hours = [(series["from_s"] + n * series["step_s"]) / HOUR_S for n in range(length)]
    if teams:
        axes.stackplot(hours, list(teams.values()), labels=list(teams), step="post")
        figure.legend(loc="outside lower center", ncols=10, fontsize="small")
    axes.axhline(report["capacity"], color="black", linewidth=0.8)
    axes.set(title=f"{name}: GPUs held, by team", xlabel="hours", ylabel="GPUs")
    return figure


def _waits(figure: Any, played: Mapping[str, Played]) -> Any:
    """The share of jobs that waited at most so long, until their first start."""
    axes = figure.subplots()
    for name, each in played.items():
        waits = sorted(job.first_at - job.trace.submit_s for job in each.jobs if job.first_at >= 0)
        if waits:
            shares = [(n + 1) / len(waits) for n in range(len(waits))]
            axes.plot([max(wait, 1.0) / HOUR_S for wait in waits], shares, label=name)
    axes.set(xscale="log", xlabel="hours of waiting", ylabel="jobs", title="Waits until the first start")
    axes.legend()
    return figure


def _timeline(figure: Any, name: str, played: Played) -> Any:
    """Jobs (every n-th of many) as lines from submission to end: pale while they wait for their first start."""
    axes = figure.subplots()
    teams = sorted({job.trace.requester for job in played.jobs})
    jobs = [job for job in played.jobs if job.ended_at >= 0]
    jobs.sort(key=lambda job: (teams.index(job.trace.requester), job.trace.submit_s))
    jobs = jobs[:: len(jobs) // JOBS_DRAWN + 1]
    height = range(len(jobs))
    axes.hlines(
        height,
        [job.trace.submit_s / HOUR_S for job in jobs],
        [job.first_at / HOUR_S for job in jobs],
        colors="lightgrey",
        linewidth=0.4,
    )
    axes.hlines(
        height,
        [job.first_at / HOUR_S for job in jobs],
        [job.ended_at / HOUR_S for job in jobs],
        colors=[f"C{teams.index(job.trace.requester) % 10}" for job in jobs],
        linewidth=0.4,
    )
    axes.set(title=f"{name}: jobs by team, grey while they wait", xlabel="hours", yticks=[])
    return figure
