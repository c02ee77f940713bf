"""Each live benchmark works, on a cluster of its own: in tiny rounds, whose figures mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TOP = Path(__file__).parent.parent
# beside these: `log` and `decide` are not live, `semaphore` and `slurm` need what may not be installed
LIVE = ["grants", "batch", "clients", "multi-pool", "placed", "depth", "memory", "restart", "kueue", "scale"]


def test_all_of_them_in_one_quick_run() -> None:
    """One cluster for all, each benchmark's pools down before the next; figures of each, and none has a verdict."""
    command = [sys.executable, "-m", "benchmarks", "--quick", "--json"]
    done = subprocess.run(
        [*command, "log", "decide", *LIVE, "semaphore", "slurm"],
        cwd=TOP,
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {each["met"] for each in found} == {None}
    missing = {"log", "decide", *LIVE} - {each["name"].partition(":")[0] for each in found}
    assert not missing, done.stderr[-3000:]
