"""What `pools simulate --out DIR` writes: the report for people and for programs, every job, and plots."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import BadInput
from .play import Played
from .report import HOUR_S, JOB_COLUMNS, job_lines


def write_all(folder: Path, said: Mapping[str, Any], played: Mapping[str, Played]) -> Iterator[Path]:
    """Writes all of it, and yields each path. Plots only where matplotlib is installed (the extra `plot`)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield _write(folder / "report.json", json.dumps(said, indent=1) + "\n")
        yield _write(folder / "report.md", markdown(said))
        for name, each in played.items():
            text = JOB_COLUMNS + "\n" + "".join(job_lines(each.jobs))
            yield _write(folder / f"jobs-{file_name(name)}.csv", text)
    except OSError as problem:
        raise BadInput("--out", str(folder), f"a folder to write to: {problem.strerror or problem}") from None
    from .plots import plot_all

    yield from plot_all(folder, said, played)


def file_name(name: str) -> str:
    """A configuration's name as a part of a file's."""
    return "".join(each if each.isalnum() or each in "-_." else "-" for each in name).strip("-.")


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def markdown(said: Mapping[str, Any]) -> str:
    """The report as tables for a page."""
    configs, common = said["configs"], said["admitted_by_all"]
    head = (
        "| configuration | utilisation | goodput | wait mean, h | median, h | p95, h | slowdown, median | preempted"
        " | lost GPU-h | rejected GPU-h | unmet share |"
    )
    lines = [head, "|---" + "|---:" * 10 + "|"]
    for name, report in configs.items():
        total, waits = report["total"], common["wait_s"][name]
        cells = [
            f"{total['utilisation']:.3f}",
            f"{total['goodput']:.3f}",
            *(_hours(waits[part]) for part in ("mean", "p50", "p95")),
            _number(total["bounded_slowdown"]["p50"]),
            f"{total['preemptions_suffered']:,}",
            f"{total['lost_gpu_h']:,.0f} ({_part(total['lost_gpu_h'], total)})",
            f"{total['rejected_gpu_h']:,.0f}",
            f"{total['unmet_share_gpu_h']:g}",
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"{said['trace']['jobs']:,} jobs. Waits: until the first start, of the {common['jobs']:,} jobs that every"
        " configuration admits.",
    ]
    for name, report in configs.items():
        lines += ["", f"## {name}", "", *_teams(report)]
    return "\n".join(lines) + "\n"


def _teams(report: Mapping[str, Any]) -> list[str]:
    lines = [
        "| team | jobs | rejected | GPU-h in share | borrowed | lost | wait mean, h | median, h | p95, h | max, h"
        " | slowdown, median | preempted | preempted others |",
        "|---" + "|---:" * 12 + "|",
    ]
    for team, said in [*report["teams"].items(), ("all", report["total"])]:
        cells = [
            f"{said['jobs']:,}",
            f"{said['rejected']:,}",
            *(f"{said[f'{part}_gpu_h']:,.0f}" for part in ("in_share", "borrowed", "lost")),
            *(_hours(said["wait_s"][part]) for part in ("mean", "p50", "p95", "max")),
            _number(said["bounded_slowdown"]["p50"]),
            f"{said['preemptions_suffered']:,}",
            f"{said['preemptions_caused']:,}",
        ]
        lines.append(f"| {team} | " + " | ".join(cells) + " |")
    return lines


def _part(lost_gpu_h: float, total: Mapping[str, Any]) -> str:
    held = total["in_share_gpu_h"] + total["borrowed_gpu_h"]
    return f"{lost_gpu_h / held:.1%}" if held else "0%"


def _hours(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds / HOUR_S:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
