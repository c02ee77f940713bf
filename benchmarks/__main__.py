"""`python -m benchmarks [NAME...] [--json] [--compare FILE]`: run benchmarks, say which targets were met."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import click

from benchmarks import compare, figures, live
from ray_pools.errors import BadInput, PoolsError


class Benchmark(NamedTuple):
    """One of them: a module here with `run() -> Iterable[Figure]`. `long`: only by its name."""

    about: str
    module: str = ""
    long: bool = False


NAMES = {
    "log": Benchmark("the log: appends, replay of a million events, a restart's fold"),
    "decide": Benchmark("the pure core: a decision with few and many waiting, a no, a choice of victims"),
    "grants": Benchmark(
        "live: from acquire to usable, and from a pool's grant to the waiter that knows of it"
    ),
    "batch": Benchmark("live: a hundred at once, granted and released"),
    "clients": Benchmark("live: throughput of 1, 8 and 32 client processes"),
    "multi-pool": Benchmark("live: queueing in three pools at once over one", "multi_pool"),
    "placed": Benchmark("live: a slot with a placement group over the group alone"),
    "depth": Benchmark("live: grants a second behind 100 and 50,000 waiting"),
    "memory": Benchmark("live: what the actors hold with 50,000 waiting and 5,000 held"),
    "restart": Benchmark(
        "live: a pool's actor with a million events in its log, killed, until it serves again"
    ),
    "semaphore": Benchmark("live: a slot against dask's distributed.Semaphore (needs the extra `bench`)"),
    "slurm": Benchmark("live: a slot against salloc (needs Debian's slurm-wlm)"),
    "kueue": Benchmark("live: Kueue's performance set-up, a few minutes", long=True),
    "scale": Benchmark("live: throughput of 1, 4 and 16 pools, a few minutes", long=True),
    "prewarm": Benchmark("live: nodes that take 20 s to boot, announced or not, 15 minutes", long=True),
}
"""In the order in which they run."""


def about() -> str:
    """What there is, for --help."""
    width = max(map(len, NAMES))
    lines = [f"{name:{width}}  {each.about}{' *' * each.long}" for name, each in NAMES.items()]
    return "\n".join(["\b", *lines, "", "* only by its name"])


def run(name: str) -> Iterator[figures.Figure]:
    """The figures of one benchmark, as they come."""
    module = importlib.import_module(f"benchmarks.{NAMES[name].module or name}")
    yield from module.run()


@click.command(epilog=about())
@click.argument("names", nargs=-1, metavar="[NAME]...", type=click.Choice(list(NAMES)))
@click.option("--json", "as_json", is_flag=True, help="One JSON line for each figure.")
@click.option(
    "--address",
    help="Run the live ones in this Ray cluster, on its head (host:port, or auto). Default: one on this machine.",
)
@click.option(
    "--compare",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Also say what is worse than in FILE (lines of --json) by more than the spread. Without names: runs "
    "those that FILE has.",
)
@click.option("--quick", is_flag=True, help="Only see that they work: tiny rounds, no verdict.")
def main(names: tuple[str, ...], as_json: bool, address: str | None, file: Path | None, quick: bool) -> None:
    """Run the benchmarks of these names; without any, all but the long ones.

    Exits with 1 if a target was missed or something got worse, with 2 for a mistake in the command line or in FILE, and
    with 3 if the cluster can't be reached.
    """
    out = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what Ray has to say of workers that are killed
            well = _run(names, as_json, address, file, quick, out)
        sys.exit(0 if well else 1)
    except PoolsError as problem:
        figures.say(f"benchmarks: error: {problem}")
        sys.exit(getattr(problem, "exit_code", 1))
    finally:
        live.CLUSTER.leave()


def _run(
    names: tuple[str, ...], as_json: bool, address: str | None, file: Path | None, quick: bool, out: TextIO
) -> bool:
    before = compare.read(file) if file is not None else {}
    if not names and file is not None:
        names = tuple(name for name in compare.benchmarks_of(before) if name in NAMES)
        if not names:
            known = f"figures of a benchmark that there is: {', '.join(NAMES)}"
            raise BadInput("--compare", ", ".join(compare.benchmarks_of(before))[:200], known, str(file))
    live.CLUSTER.address = address
    os.environ[figures.QUICK_ENV] = "1" if quick else ""
    found: list[figures.Figure] = []
    for name in names or tuple(name for name, each in NAMES.items() if not each.long):
        found += figures.show(run(name), as_json, out)
    met = all(figure.met is not False for figure in found)
    if file is None:
        return met
    of_these = {key: figure for key, figure in before.items() if key.partition(":")[0] in names}
    lines, as_good = compare.report(of_these, found)
    for line in lines:  # beside JSON lines, which stay such
        click.echo(line, file=sys.stderr if as_json else out)
    return met and as_good


if __name__ == "__main__":
    main()
