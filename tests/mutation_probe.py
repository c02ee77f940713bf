"""What a mutant is held against: every scenario, then the reference on random cases. Exits with `HIT` at the first."""

from __future__ import annotations

import sys
from pathlib import Path

import random_cases
from reference import make_world as make_reference

import ray_pools
from ray_pools.core.system import make_world
from ray_pools.scenario import run_files

# not 1, which is also what an error of the probe itself ends with
HIT = 10


def main(package: str, seeds: int) -> int:
    if Path(ray_pools.__file__).parent != Path(package):
        print(f"the mutant is not what was imported: {ray_pools.__file__}", file=sys.stderr)
        return 2
    try:
        if not run_files(sorted((Path(__file__).parent / "scenarios").glob("*.yaml")), make_world).ok:
            return HIT
        for seed in range(seeds):
            if random_cases.compare(seed, make_world, make_reference) is not None:
                return HIT
    except (AssertionError, KeyError, RecursionError, TypeError) as error:  # the core's own checks caught it
        print(f"caught by {error!r}", file=sys.stderr)
        return HIT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
