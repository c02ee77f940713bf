"""What runs a command inside a slot: an actor in the slot's placement group, on the first bundle's node.

The actor takes nothing of the group's GPUs and CPUs, so that tasks of the command get all of them; which GPUs are the
bundle's, Ray tells a task that asks for all of them. The actor is its driver's: it goes with the driver, with the group
and with its node, and the command goes with it (ray_pools.supervise).
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from typing import IO, Any

from ..supervise import Ending, Supervised

STDOUT, STDERR = 1, 2
Chunk = tuple[int, bytes]
"""A file descriptor, and what was written there."""

BUFFER_BYTES = 1 << 20
"""Of output that was not fetched yet; a command that writes more waits, as at any pipe."""

READ_BYTES = 1 << 16
ANSWER_BYTES = 1 << 18
DRAIN_S = 2.0
"""After the command's end its output ends too, unless it was handed to a process that is not its own."""

ACCELERATOR_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ONEAPI_DEVICE_SELECTOR",
    "ASCEND_RT_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES",
    "NEURON_RT_VISIBLE_CORES",
    "TPU_VISIBLE_CHIPS",
)
"""By which Ray tells a process which accelerators are its own."""

_OF_THE_WORKER = (
    "RAY_JOB_ID",
    "RAY_RAYLET_PID",
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING",
    "RAY_CLIENT_MODE",
    "PYTHONBREAKPOINT",
    "OMP_NUM_THREADS",  # Ray says 1 to an actor that asks for no CPU
    "SPT_NOENV",
    *ACCELERATOR_VARIABLES,
)


def devices() -> dict[str, str]:
    """A task that has all of a bundle: what Ray says which accelerators these are."""
    return {name: os.environ[name] for name in ACCELERATOR_VARIABLES if name in os.environ}


class Runner:
    """The actor. `start` once, `read` until it says how the command ended, `stop` meanwhile."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._chunks: deque[Chunk] = deque()
        self._first, self._bytes = 0, 0  # number of the oldest chunk; how much is kept
        self._ending: Ending | None = None
        self._command: Supervised | None = None

    def start(
        self, argv: list[str], env: Mapping[str, str], cwd: str | None, token: bytes | None
    ) -> dict[str, Any]:
        """Starts it; what it runs in: {"host", "cwd", "same_cwd"}.

        env is added to the worker's own environment. cwd: entered if it is there, else (and for None) the worker's
        stays, which is that of the runtime environment.
        """
        same_cwd = cwd is not None and os.path.isdir(cwd)
        where = cwd if same_cwd else working_folder()
        merged = {**command_environment(os.environ), **env}
        secret = None
        if token is not None:
            secret = merged["RAY_POOLS_TOKEN_FILE"] = write_secret(token)
        self._command = Supervised(argv, merged, where, stdout=-1, stderr=-1, remove=secret)
        threading.Thread(target=self._collect, args=(self._command,), daemon=True).start()
        return {"host": socket.gethostname(), "cwd": where, "same_cwd": same_cwd}

    def stop(self, force: bool) -> None:
        """SIGTERM to the command's process group, or (force) SIGKILL to all that it started."""
        if self._command is not None:
            self._command.kill() if force else self._command.terminate()

    def read(self, after: int, timeout_s: float) -> tuple[int, list[Chunk], tuple[int, str] | None]:
        """Output from chunk number `after` on, as soon as there is some; what is before it is dropped.

        Returns the number after the last of them, the chunks, and once there are no more to come the command's
        return code and why it failed to start.
        """
        with self._changed:
            while self._chunks and self._first < after:
                self._bytes -= len(self._chunks.popleft()[1])
                self._first += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._chunks or self._ending is not None, timeout_s)
            found: list[Chunk] = []
            size = 0
            for chunk in self._chunks:
                if found and size + len(chunk[1]) > ANSWER_BYTES:
                    break
                found.append(chunk)
                size += len(chunk[1])
            ended = self._ending if len(found) == len(self._chunks) else None
            number = self._first + len(found)
            return number, found, None if ended is None else (ended.returncode, ended.failure)

    def _collect(self, command: Supervised) -> None:
        """Reads both pipes to their end, then waits for the command's."""
        with selectors.DefaultSelector() as selector:
            for number, pipe in ((STDOUT, command.stdout), (STDERR, command.stderr)):
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ, number)
            over = False
            while selector.get_map():
                ready = selector.select(DRAIN_S)
                if not ready and over:
                    break
                over = command.wait(0) is not None
                for key, _ in ready:
                    self._take(selector, key.fileobj, key.data)  # type: ignore[arg-type]
        ending = command.wait()
        with self._changed:
            self._ending = ending
            self._changed.notify_all()

    def _take(self, selector: selectors.BaseSelector, pipe: IO[bytes], number: int) -> None:
        data = os.read(pipe.fileno(), READ_BYTES)
        if not data:
            selector.unregister(pipe)
            pipe.close()
            return
        with self._changed:
            self._changed.wait_for(lambda: self._bytes < BUFFER_BYTES)
            self._chunks.append((number, data))
            self._bytes += len(data)
            self._changed.notify_all()


def working_folder() -> str:
    """This process's. Nodes on one machine share the folders of runtime environments, and Ray makes one anew for each
    node: what a worker was started in may be gone, with the same in its place.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        os.chdir(os.readlink("/proc/self/cwd").removesuffix(" (deleted)"))
        return os.getcwd()


def command_environment(own: Mapping[str, str]) -> dict[str, str]:
    """A command's environment on a node: the worker's, without what makes it one, and with the worker's Python first
    in PATH, so that `python` has Ray and these pools.
    """
    env = {name: value for name, value in own.items() if name not in _OF_THE_WORKER}
    own_folder, path = os.path.dirname(sys.executable), env.get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != own_folder:
        env["PATH"] = os.pathsep.join((own_folder, path))
    env["PYTHONUNBUFFERED"] = "1"
    return env


def write_secret(token: bytes) -> str:
    """A file that only this user can read: an environment is shown, logged and handed on too easily."""
    fd, path = tempfile.mkstemp(prefix=f"ray-pools-{secrets.token_hex(4)}-")  # mode 600
    with open(fd, "w") as file:
        file.write(token.hex())
    return path
