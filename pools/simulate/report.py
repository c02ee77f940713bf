"""What a simulation says: per team and in all, as plain values with the names that docs/simulation.md explains."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..log_usage import ordered_quantile
from ..trace import TraceJob
from .play import DONE, REJECTED, Job, Played

SHORT_S = 10.0
"""The shortest duration that a bounded slowdown divides by: else jobs of a second would be all that it shows."""

HOUR_S = 3600.0


def comparison(trace: Sequence[TraceJob], played: Mapping[str, Played]) -> dict[str, Any]:
    """All configurations' reports for one trace, and what of them can be compared."""
    return {
        "trace": {"jobs": len(trace), "from_s": trace[0].submit_s, "to_s": trace[-1].submit_s},
        "configs": {name: report_of(each) for name, each in played.items()},
        "admitted_by_all": common_waits(played),
    }


def report_of(played: Played) -> dict[str, Any]:
    """Everything that is told of one configuration."""
    teams: dict[str, list[Job]] = {}
    for job in played.jobs:
        teams.setdefault(job.trace.requester, []).append(job)
    span_s = played.end_s - played.first_s
    total = {
        **_of_jobs(played.jobs),
        **_held(played, sorted(teams)),
        **_shares(played, span_s),
    }
    return {
        "capacity": played.capacity,
        "span_h": _r(span_s / HOUR_S),
        "total": total,
        "teams": {
            team: {**_of_jobs(jobs), **_held(played, [team])}
            for team, jobs in sorted(teams.items(), key=lambda pair: pair[0])
        },
        "rejected_causes": _rejections(played.jobs),
        "utilisation": _series(played),
        "digest": digest_of(played.jobs),
    }


def _of_jobs(jobs: Sequence[Job]) -> dict[str, Any]:
    admitted = [job for job in jobs if job.state != REJECTED]
    done = [job for job in admitted if job.state == DONE]
    waits_s = sorted(job.first_at - job.trace.submit_s for job in admitted if job.first_at >= 0)
    slowdowns = sorted(
        max(1.0, (job.ended_at - job.trace.submit_s) / max(job.trace.duration_s, SHORT_S)) for job in done
    )
    return {
        "jobs": len(jobs),
        "done": len(done),
        "rejected": len(jobs) - len(admitted),
        "unfinished": len(admitted) - len(done),
        "wait_s": spread_of(waits_s),
        "bounded_slowdown": spread_of(slowdowns),
        "preemptions_suffered": sum(job.preempted for job in jobs),
        "preemptions_caused": sum(job.caused for job in jobs),
        "rejected_gpu_h": _gpu_h(
            job.trace.duration_s * job.trace.gpus for job in jobs if job.state == REJECTED
        ),
        "lost_gpu_h": _gpu_h(job.lost_s * job.trace.gpus for job in jobs),
    }


def _held(played: Played, teams: Iterable[str]) -> dict[str, float]:
    wanted = set(teams)
    of = [holding for (_, team), holding in sorted(played.holdings.items()) if team in wanted]
    return {
        "in_share_gpu_h": _gpu_h(holding.in_share_s for holding in of),
        "borrowed_gpu_h": _gpu_h(holding.borrowed_s for holding in of),
    }


def _shares(played: Played, span_s: float) -> dict[str, float]:
    """Of all the capacity from the first submission to the last end: what was held, and what of it was of use."""
    held_s = sum(h.in_share_s + h.borrowed_s for h in played.holdings.values())
    lost_s = sum(job.lost_s * job.trace.gpus for job in played.jobs)
    there_s = played.capacity * span_s
    return {
        "utilisation": _r(held_s / there_s) if there_s else 0.0,
        "goodput": _r((held_s - lost_s) / there_s) if there_s else 0.0,
        "unmet_share_gpu_h": _r(played.shares.unmet_s / HOUR_S),
        "unmet_share_requests": played.shares.unmet,
        "longest_wait_in_share_s": _r(played.shares.longest_s),
    }


def _rejections(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Who was refused, and why: per team and cause the jobs, and the most that one asked for."""
    found: dict[tuple[str, str], list[int]] = {}
    for job in jobs:
        if job.state == REJECTED:
            causes = ", ".join(f"{cause} in {pool}" for pool, cause in sorted(job.causes.items()))
            found.setdefault((job.trace.requester, causes), []).append(job.trace.gpus)
    return [
        {"team": team, "causes": causes, "jobs": len(gpus), "gpus_max": max(gpus)}
        for (team, causes), gpus in sorted(found.items())
    ]


def _series(played: Played) -> dict[str, Any]:
    """GPUs held on average, span of time by span of time, per team."""
    first, last = int(played.first_s // played.bin_s), int(played.end_s // played.bin_s)
    teams: dict[str, list[float]] = {}
    for (_, team), holding in sorted(played.holdings.items()):
        line = teams.setdefault(team, [0.0] * (last - first + 1))
        for number, held_s in holding.bins.items():
            line[number - first] += held_s / played.bin_s
    return {
        "from_s": _r(first * played.bin_s),
        "step_s": played.bin_s,
        "gpus": {team: [round(value, 2) for value in line] for team, line in teams.items()},
    }


def spread_of(ordered: Sequence[float]) -> dict[str, float | None]:
    """mean, p50, p95 and max of values in ascending order; None of none."""
    if not ordered:
        return {"mean": None, "p50": None, "p95": None, "max": None}
    return {
        "mean": _r(sum(ordered) / len(ordered)),
        "p50": _r(ordered_quantile(ordered, 0.5)),
        "p95": _r(ordered_quantile(ordered, 0.95)),
        "max": _r(ordered[-1]),
    }


def common_waits(played: Mapping[str, Played]) -> dict[str, Any]:
    """Waits of the jobs that every configuration admits, so that one that rejects the large ones does not look
    better.
    """
    kept = [
        place
        for place, jobs in enumerate(zip(*(each.jobs for each in played.values()), strict=True))
        if all(job.first_at >= 0 for job in jobs)
    ]
    return {
        "jobs": len(kept),
        "wait_s": {
            name: spread_of(sorted(each.jobs[n].first_at - each.jobs[n].trace.submit_s for n in kept))
            for name, each in played.items()
        },
    }


def digest_of(jobs: Sequence[Job]) -> str:
    """A hash of what became of every job: equal simulations give equal digests."""
    hashed = hashlib.blake2b(digest_size=16)
    for line in job_lines(jobs):
        hashed.update(line.encode())
    return hashed.hexdigest()


JOB_COLUMNS = "row,requester,gpus,submit_s,outcome,first_start_s,end_s,queued_s,preempted,lost_s"


def job_lines(jobs: Sequence[Job]) -> Iterable[str]:
    """One line of CSV for each job, in the trace's order, as of `JOB_COLUMNS`."""
    cells: dict[str, str] = {}
    for job in jobs:
        row = job.trace
        if row.requester not in cells:  # of which there are few
            cells[row.requester] = _csv_cell(row.requester)
        yield (
            f"{row.id},{cells[row.requester]},{row.gpus},{row.submit_s:.3f},{job.state},{_time(job.first_at)}"
            f",{_time(job.ended_at)},{job.queued_s:.3f},{job.preempted},{job.lost_s:.3f}\n"
        )


def _csv_cell(text: str) -> str:
    written = io.StringIO()
    csv.writer(written, lineterminator="").writerow([text])
    return written.getvalue()


def _time(at: float) -> str:
    return "" if at < 0 else f"{at:.3f}"


def _gpu_h(gpu_s: Iterable[float]) -> float:
    return _r(sum(gpu_s) / HOUR_S)


def _r(value: float) -> float:
    """Rounded for the eye; the digest has what is exact."""
    return round(value, 4)
