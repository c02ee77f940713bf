"""A driver beside the pools, in a process of its own: GPUs without a slot, a call of the autoscaler, or Ray Data.

usage: python tests/beside_live.py outside | foreign | data. It says `ready ...` and ends with its standard input.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.util import placement_group


def outside() -> str:
    """An actor, a task and a placement group, each with one GPU."""

    class Trainer:
        def ready(self) -> None:
            pass

    def work() -> None:
        time.sleep(3600)

    trainer = ray.remote(num_gpus=1, num_cpus=0)(Trainer).remote()
    ray.get(trainer.ready.remote())
    kept.append(trainer)
    kept.append(ray.remote(num_gpus=1, num_cpus=0)(work).remote())
    group = placement_group([{"GPU": 1}], name="aside")
    ray.get(group.ready())
    kept.append(group)
    return str(ray.get_runtime_context().get_job_id())


def foreign() -> str:
    """What anybody may call."""
    request_resources(bundles=[{"CPU": 1}])
    return ""


def data() -> str:
    """A job that never ends, eight tasks at a time of which each wants a CPU."""
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False

    def slow(batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(1)
        return batch

    dataset = ray.data.range(1_000_000, override_num_blocks=10_000)
    mapped = dataset.map_batches(slow, batch_size=100, num_cpus=1, concurrency=8)

    def run() -> None:
        for batch in mapped.iter_batches():
            if not kept:
                kept.append(batch)
                first.set()

    first = threading.Event()
    threading.Thread(target=run, daemon=True).start()
    first.wait()
    return ""


kept: list[Any] = []

if __name__ == "__main__":
    ray.init(log_to_driver=False)
    print("ready", {"outside": outside, "foreign": foreign, "data": data}[sys.argv[1]](), flush=True)
    sys.stdin.read()
