"""`python -m benchmarks [NAME...] [--json]`: run benchmarks, say which targets were met."""

from __future__ import annotations

import importlib
import sys

import click

from benchmarks import live
from benchmarks.figures import print_figures

# name -> what it measures, in one line; each is a module here with `run() -> Iterable[Figure]`
NAMES = {
    "log": "the log: appends, replay of a million events, a restart",
    "decide": "the pure core: a decision with few and many waiting, a no, a choice of victims",
    "grants": "live: from acquire to usable, and from a pool's grant to the waiter that knows of it",
}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(sorted(NAMES)))
@click.option("--json", "as_json", is_flag=True, help="One JSON line for each figure.")
@click.option(
    "--address", help="Run the live ones in this Ray cluster, on its head. Default: one on this machine."
)
def main(names: tuple[str, ...], as_json: bool, address: str | None) -> None:
    """Run the benchmarks NAMES (all of them without a name). Exits with 1 if a target was missed."""
    live.ADDRESS = address
    met = True
    for name in names or tuple(NAMES):
        module = importlib.import_module(f"benchmarks.{name}")
        met &= print_figures(module.run(), as_json)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
