"""Ray jobs whose entrypoint queues for a slot and runs a command in it: `pools run`, submitted to Ray.

The job is submitted at once and asks Ray for nothing, so it is never pending in Ray, where it could not be stopped: it
waits inside, in our queue. Whatever ends it ends what it holds, for the slot is its own driver's; so nobody need
stay to look after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import PoolsError, Refused, Unreachable
from .attempt import JOB_CONFIG
from .authentication import one_line
from .runtime_env import check_runtime_env
from .transport import reachable_address

if TYPE_CHECKING:
    from .slot import Slot

log = logging.getLogger("ray_pools")

PREFIX = "ray_pools."
SUBMISSION_ID = "job_submission_id"
"""Ray's own key for its metadata."""

API_SERVER_ADDRESS = "RAY_API_SERVER_ADDRESS"
"""Ray's own variable: where its job commands find the dashboard, when it is not where RAY_ADDRESS is."""

LOOK_S = 0.5
STOP_WAIT_S = 3
"""From Ray's SIGTERM to its SIGKILL when a job is stopped, unless RAY_JOB_STOP_WAIT_TIME_S says another."""


def new_submission_id() -> str:
    """An id that says whose it is."""
    return f"pools-{uuid.uuid4().hex[:16]}"


def of_this_job() -> dict[str, Any]:
    """The runtime environment of the Ray job that this process belongs to."""
    import ray

    return dict(ray.get_runtime_context().runtime_env)


def metadata_of_this_job() -> dict[str, str]:
    """Of the submitted job that this process was started by; empty outside of one."""
    try:
        found = json.loads(os.environ.get(JOB_CONFIG, "{}")).get("metadata", {})
    except (ValueError, AttributeError):
        return {}
    return {str(key): str(value) for key, value in found.items()}


def stop_timeout_s(default_s: float) -> float:
    """How long a command has after SIGTERM. In a submitted job Ray's SIGKILL must find its slot given back."""
    if SUBMISSION_ID not in metadata_of_this_job():
        return default_s
    try:
        ray_waits_s = float(os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", STOP_WAIT_S))
    except ValueError:
        ray_waits_s = STOP_WAIT_S
    return max(ray_waits_s - 1.0, ray_waits_s / 2)


def note_grant(slot: Slot) -> None:
    """Where the job is `pools job submit`'s, its metadata say from now on where it runs; else nothing happens.

    Ray sets a job's metadata when it is submitted, which is before the pool is known, so this writes the record in
    which Ray keeps them. Ray itself writes it when the job starts and when its process, which is this one, has ended.
    """
    said = metadata_of_this_job()
    if said.get(f"{PREFIX}request_id") != slot.id or SUBMISSION_ID not in said:
        return
    more = {f"{PREFIX}pool": slot.pool, f"{PREFIX}attempt": str(slot.k)}
    try:
        asyncio.run(_add_metadata(said[SUBMISSION_ID], more))
    except Exception as problem:  # noqa: BLE001 - Ray's private side may have changed; the job need not know
        log.warning("the job's metadata do not say its pool: %s: %s", type(problem).__name__, problem)


async def _add_metadata(submission_id: str, more: Mapping[str, str]) -> None:
    import ray
    from ray.dashboard.modules.job.common import JobInfoStorageClient, JobStatus

    store = JobInfoStorageClient(ray._private.worker.global_worker.gcs_client)
    info = await store.get_info(submission_id)
    if info is not None and info.status == JobStatus.RUNNING:
        info.metadata = {**(info.metadata or {}), **more}
        await store.put_info(submission_id, info)


# --- from outside


@dataclass(frozen=True)
class JobRequest:
    """A Ray job to be submitted, whose entrypoint is `pools run`."""

    submission_id: str
    request_id: str
    requester: str
    namespace: str
    entrypoint: str
    runtime_env: Mapping[str, Any]
    metadata: Mapping[str, str]


@contextlib.contextmanager
def submit_job(request: JobRequest) -> Iterator[Any]:
    """Submits it; Ray's JobSubmissionClient for what follows.

    Raises:
        BadInput: a runtime environment that can't be right.
        Unreachable: no dashboard (which is where jobs are submitted), or none that lets us in.
        Refused: a job of this id is there.
        PoolsError: Ray refused the job.
    """
    check_runtime_env(request.runtime_env)
    client = _job_client()
    said = {
        f"{PREFIX}request_id": request.request_id,
        f"{PREFIX}requester": request.requester,
        f"{PREFIX}namespace": request.namespace,
    }
    try:
        client.submit_job(
            entrypoint=request.entrypoint,
            submission_id=request.submission_id,
            runtime_env=dict(request.runtime_env) or None,
            metadata={**request.metadata, **said},
        )
    except Exception as problem:  # noqa: BLE001 - Ray has no classes for them
        raise _translated(problem, request.submission_id) from None
    yield client


def _job_client() -> Any:
    """For the cluster that RAY_ADDRESS names, else this machine's."""
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError as problem:
        raise Unreachable(f"ray can't submit jobs here: {one_line(str(problem))}") from None
    # the address of a dashboard has no GCS to ask
    named = os.environ.get(API_SERVER_ADDRESS) or os.environ.get("RAY_ADDRESS", "")
    if not named.startswith(("http://", "https://")):
        reachable_address()
    try:
        return JobSubmissionClient()
    except Exception as problem:  # noqa: BLE001 - ConnectionError, RuntimeError, Ray's own
        raise Unreachable(f"no Ray dashboard answers, which takes jobs: {_last_line(problem)}") from None


def _translated(problem: Exception, submission_id: str) -> PoolsError:
    text = str(problem)
    if "already exists" in text:
        return Refused(
            "job_in_use", f"a job {submission_id!r} was submitted before: choose another --submission-id"
        )
    if isinstance(problem, (ConnectionError, TimeoutError)) or "uthenticat" in text:
        return Unreachable(f"Ray did not take the job: {_last_line(problem)}")
    return PoolsError(f"Ray did not take the job: {_last_line(problem)}")


def _last_line(problem: Exception) -> str:
    """Of a traceback that came as a text."""
    lines = [line for line in str(problem).strip().splitlines() if line.strip()]
    return one_line(lines[-1]) if lines else type(problem).__name__


def follow(client: Any, submission_id: str, out: TextIO) -> int:
    """Shows a job's logs until it has ended; the exit code that it ended with, 1 where there is none."""
    from ray.job_submission import JobStatus

    shown = _Shown(out)
    while True:
        try:
            asyncio.run(_tail(client, submission_id, shown))
            info = client.get_job_info(submission_id)
        except (OSError, RuntimeError) as problem:
            raise Unreachable(
                f"the job's logs can't be followed any more: {_last_line(problem)};"
                f" `ray job status {submission_id}` says how it goes"
            ) from None
        if info.status.is_terminal():
            break
        time.sleep(LOOK_S)
    if info.status == JobStatus.SUCCEEDED:
        return 0
    if info.status == JobStatus.STOPPED:
        raise PoolsError(f"job {submission_id!r} was stopped")
    return info.driver_exit_code or 1


class _Shown:
    """Logs that start anew with each connection, shown once."""

    def __init__(self, out: TextIO) -> None:
        self.out, self.length = out, 0

    def add(self, start: int, text: str) -> int:
        """`text` begins at `start`; returns where it ends."""
        fresh = text[max(self.length - start, 0) :]
        if fresh:
            self.out.write(fresh)
            self.out.flush()
        end = start + len(text)
        self.length = max(self.length, end)
        return end


async def _tail(client: Any, submission_id: str, shown: _Shown) -> None:
    end = 0
    async for text in client.tail_job_logs(submission_id):
        end = shown.add(end, text)
