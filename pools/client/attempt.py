"""One run of a command inside one slot: on the slot's node, or here where the slot only counts.

What happens is posted as events, in the attempt's own thread: Ended, once nothing of the command is left and all of
its output was written; Lost, when nobody can tell how it ended. Nothing here waits for anybody.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..settings import MCPU
from ..supervise import Ending, Supervised
from .authentication import one_line
from .runner import Runner, devices, write_secret

if TYPE_CHECKING:
    from .slot import Slot

READ_S = 20.0
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray's own: what a driver below a job takes over from it (runtime environment, metadata)."""


@dataclass(frozen=True)
class CommandSpec:
    """A command as its user gave it. cwd: entered on the slot's node if it is there; None for where Ray's runtime
    environment leads. env: on top of the node's own.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None = None


@dataclass(frozen=True)
class Started:
    """It runs. `note` is for the user: where."""

    note: str


@dataclass(frozen=True)
class Ended:
    """Nothing of the command is left."""

    ending: Ending


@dataclass(frozen=True)
class Lost:
    """What ran it is gone, and the command with it; or it never ran."""

    why: str
    began: bool = True


@dataclass(frozen=True)
class Unread:
    """Nobody reads our output any more."""


Post = Callable[[Any], None]


class Attempt(Protocol):
    """Made, it is under way."""

    def terminate(self) -> None:
        """SIGTERM to the command's process group."""
        ...

    def kill(self) -> None:
        """SIGKILL to everything that it started."""
        ...

    def close(self) -> None:
        """Whatever is left of it ends."""
        ...


def start_attempt(slot: Slot, spec: CommandSpec, token: bytes, post: Post) -> Attempt:
    """Runs the command in a slot."""
    env = {**slot_environment(slot), **spec.env}
    if slot.counts_only:
        return LocalAttempt(spec, env, token, post)
    return RayAttempt(slot, spec, env, token, post)


def slot_environment(slot: Slot) -> dict[str, str]:
    """By which a command knows its slot; `current_slot()` reads it."""
    import ray

    group = "" if slot.counts_only else slot.placement_group.id.hex()
    env = {
        "RAY_ADDRESS": str(ray.get_runtime_context().gcs_address),
        "RAY_POOLS_NAMESPACE": slot._ticket._client.namespace,
        "RAY_POOLS_SLOT_ID": slot.id,
        "RAY_POOLS_REQUESTER": slot.requester,
        "RAY_POOLS_POOL": slot.pool,
        "RAY_POOLS_ATTEMPT": str(slot.k),
        "RAY_POOLS_PLACEMENT_GROUP": group,
    }
    env.update(thread_environment(slot.resources))
    config = os.environ.get(JOB_CONFIG) or _job_config()
    return {**env, JOB_CONFIG: config} if config else env


def thread_environment(resources: Mapping[str, int]) -> dict[str, str]:
    """As Ray has it for tasks: as many threads as whole CPUs were asked for; Ray's own default where none were."""
    cpus = resources.get(MCPU, 0) // 1000
    return {"OMP_NUM_THREADS": str(cpus)} if cpus else {}


def _job_config() -> str:
    """Of this driver's own runtime environment, so that a driver that the command is has the same."""
    import ray

    runtime_env = dict(ray.get_runtime_context().runtime_env)
    return json.dumps({"runtime_env": runtime_env}) if runtime_env else ""


class LocalAttempt:
    """On this machine, with this process's output; for slots that only count."""

    def __init__(self, spec: CommandSpec, env: Mapping[str, str], token: bytes, post: Post) -> None:
        secret = write_secret(token)
        merged = {**os.environ, **env, "RAY_POOLS_TOKEN_FILE": secret}
        self._command = Supervised(spec.argv, merged, spec.cwd, remove=secret)
        self._post = post
        threading.Thread(target=self._wait, name="ray-pools-command", daemon=True).start()
        post(Started("on this machine"))

    def terminate(self) -> None:
        self._command.terminate()

    def kill(self) -> None:
        self._command.kill()

    def close(self) -> None:
        self._command.kill()

    def _wait(self) -> None:
        ending = self._command.wait()
        assert ending is not None
        self._post(Ended(ending))


class RayAttempt:
    """In the slot's placement group, its output written here as it comes."""

    def __init__(
        self, slot: Slot, spec: CommandSpec, env: Mapping[str, str], token: bytes, post: Post
    ) -> None:
        import ray

        self._post = post
        self._lock = threading.Lock()
        self._stop: bool | None = None  # asked for before it was there: by force?
        self._started = self._began = False
        where = slot._strategy(0)
        bundle = slot.bundles[0] if slot.bundles else {}
        self._devices = _devices_of(bundle, where)
        options = {"num_cpus": 0, "max_concurrency": 4, "max_restarts": 0, "scheduling_strategy": where}
        self._runner = ray.remote(Runner).options(**options).remote()
        self._begin = ([*spec.argv], dict(env), spec.cwd, token)
        threading.Thread(target=self._run, name="ray-pools-command", daemon=True).start()

    def terminate(self) -> None:
        self._stop_it(False)

    def kill(self) -> None:
        self._stop_it(True)

    def close(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # it may be gone, and the cluster too
            ray.kill(self._runner)

    def _stop_it(self, force: bool) -> None:
        with self._lock:
            first, self._stop = self._stop is None, force
            if self._started:
                with contextlib.suppress(Exception):  # the thread that reads finds out what it was
                    self._runner.stop.remote(force)
                return
        if first:  # its workers may never come up: in a group that is gone, they are pending for ever
            self._post(Ended(Ending(-signal.SIGTERM, "stopped before it began")))

    def _run(self) -> None:
        try:
            event: Ended | Lost | None = self._follow()
        except Exception as problem:  # noqa: BLE001 - whatever Ray raises: how it ended is not known
            cause = getattr(problem, "cause", None) or problem  # what was raised there, not Ray's word for it
            event = Lost(f"{type(cause).__name__}: {one_line(str(cause))}", self._began)
        if event is not None and (self._started or self._stop is None):
            self._post(event)

    def _follow(self) -> Ended | None:
        """None: it was told to stop before it began."""
        import ray

        argv, env, cwd, token = self._begin
        visible = ray.get(self._devices) if self._devices is not None else {}
        with self._lock:
            if self._stop is not None:
                return None
            answer = self._runner.start.remote(argv, {**visible, **env}, cwd, token)
            self._started = True
        found = ray.get(answer)
        self._began = True
        note = f"on {found['host']}"
        if cwd is not None and not found["same_cwd"]:
            note += f", in {found['cwd']}: {cwd} is not there"
        self._post(Started(note))
        after, read = 0, True
        while True:
            after, chunks, ended = ray.get(self._runner.read.remote(after, READ_S))
            for number, data in chunks:
                if read and not _write(number, data):
                    read = False  # what comes is dropped from now on, so that the command can end
                    self._post(Unread())
            if ended is not None:
                return Ended(Ending(*ended))


def _devices_of(bundle: Mapping[str, float], where: Any) -> Any:
    """Asks which accelerators the bundle has; None if it has none."""
    import ray

    gpus = bundle.get("GPU", 0)
    others = {key: n for key, n in bundle.items() if key not in ("GPU", "CPU", "memory") and n > 0}
    if not gpus and not others:
        return None
    options = {"num_cpus": 0, "num_gpus": gpus, "resources": others, "scheduling_strategy": where}
    return ray.remote(devices).options(**options, max_retries=3).remote()


def _write(number: int, data: bytes) -> bool:
    """All of it. False: the reader is gone."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(number, view) :]
        except OSError as problem:
            if problem.errno == errno.EAGAIN:  # somebody made our terminal non-blocking
                threading.Event().wait(0.01)
                continue
            return False
    return True
