"""Against what a Python program would use instead: dask's distributed.Semaphore, which keeps nothing on disk.

A cycle is acquire and release, each acknowledged: of a slot, of the semaphore, and as the floor two bare calls of a
no-op actor. One client process for the time of a cycle, four for throughput; all three in turn in every round.
dask's scheduler is a process of its own on this machine. Needs `pip install distributed` (the extra `bench`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.cycles import ROOMY, side_by_side
from benchmarks.figures import Figure, middle, ratios, say, size, verdict
from benchmarks.live import Bare, Worker, live, quantile, workers

ROUNDS, SECONDS = 5, 3.0
PROCESSES = 4
TIMES_MAX = 3.0
_BARE = "ray-pools-benchmark-bare"
_START_S = 60.0


@contextlib.contextmanager
def scheduler() -> Iterator[str]:
    """dask's, in a process of its own; gives its address."""
    with tempfile.TemporaryDirectory(prefix="ray-pools-bench-") as folder:
        file = Path(folder) / "scheduler.json"
        command = [
            sys.executable,
            "-m",
            "distributed.cli.dask_scheduler",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
        ]
        process = subprocess.Popen(
            [*command, "--no-dashboard", "--scheduler-file", str(file)],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            ends_at = time.monotonic() + _START_S
            while not (file.exists() and file.read_text().endswith("}")):
                if process.poll() is not None or time.monotonic() > ends_at:
                    raise RuntimeError(f"dask's scheduler does not start: {' '.join(command)}")
                time.sleep(0.05)
            yield str(json.loads(file.read_text())["address"])
        finally:
            process.terminate()
            process.wait()


def run() -> Iterator[Figure]:
    """The figures, medians of 5 rounds in turn."""
    if importlib.util.find_spec("distributed") is None:
        say("semaphore: not measured, dask's distributed is not installed (pip install 'ray-pools[bench]')")
        return
    seconds = size(SECONDS, 0.2)
    with contextlib.ExitStack() as stack:
        bench = stack.enter_context(live(ROOMY))
        address = stack.enter_context(scheduler())
        bare = Bare(_BARE)
        stack.callback(bare.close)
        made: dict[str, Sequence[Worker]] = {}
        for name, *arguments in (["slots"], ["bare", _BARE], ["semaphore", address]):
            four = [bench.process("benchmarks.cycles", name, *arguments) for _ in range(PROCESSES)]
            made[name] = stack.enter_context(workers(four))
        times: dict[str, list[float]] = {name: [] for name in made}
        rates: dict[str, list[float]] = {name: [] for name in made}
        for name in made:
            side_by_side(made[name], seconds, ["loops"])
        for _ in range(size(ROUNDS, 2)):
            for name, four in made.items():
                times[name].append(quantile(side_by_side(four[:1], seconds, ["loops"])[1], 0.5))
            for name, four in made.items():
                rates[name].append(side_by_side(four, seconds, ["loops"])[0])
    words = {"slots": "a slot", "bare": "two bare calls", "semaphore": "distributed.Semaphore"}
    for name, values in times.items():
        value, spread = middle(values)
        ratio, target, met = ratios(values, times["bare"]), "", None
        if name == "slots":
            target, met = f"at most {TIMES_MAX:g} times two bare calls", verdict(ratio <= TIMES_MAX)
        yield Figure(f"semaphore: cycle of {words[name]}, p50", value * 1e3, "ms", ratio, target, met, spread)
    for name, values in rates.items():
        value, spread = middle(values)
        ratio, target, met = ratios(values, rates["semaphore"]), "", None
        if name == "slots":
            target, met = "at least that of the semaphore", verdict(ratio >= 1)
        shown = f"semaphore: {words[name]}, {PROCESSES} processes"
        yield Figure(shown, value, "cycles/s", ratio, target, met, spread)
