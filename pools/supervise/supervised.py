"""A command under guard, from the side of who starts it (guard.py says how nothing of it is left)."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from . import guard

MARK = "RAY_POOLS_COMMAND"
"""A variable in the command's environment, by which what is left is known when both guards were killed."""

_LOST = -signal.SIGKILL


@dataclass(frozen=True)
class Ending:
    """How a command ended: its code, or minus the signal that ended it; `failure` is why it could not start."""

    returncode: int
    failure: str = ""

    @property
    def exit_code(self) -> int:
        """As a shell has it: 128 and the signal's number for one that was killed."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    def __str__(self) -> str:
        if self.failure:
            return self.failure
        if self.returncode >= 0:
            return f"ended with code {self.returncode}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:
            name = f"signal {-self.returncode}"
        return f"ended by {name}"


class Supervised:
    """A running command. Made, it is on its way; `wait` returns when it, and all that it started, is gone.

    argv, env: as of `execve`, with env's PATH searched. cwd: None for this process's. stdout, stderr: as of
    `subprocess.Popen`; standard input is empty. remove: a file that goes when the command has gone. Everything
    ends with this process, too.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str | None = None,
        *,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        remove: str | None = None,
    ) -> None:
        self._remove = remove
        self._mark = secrets.token_hex(16)
        spec = {"argv": [*argv], "env": {**env, MARK: self._mark}, "cwd": cwd, "remove": remove}
        told, told_end = os.pipe()
        try:
            # its own session: a Ctrl-C in the terminal is the launcher's to pass on
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(told_end)],
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(told_end,),
                start_new_session=True,
            )
        except BaseException:
            os.close(told)
            raise
        finally:
            os.close(told_end)
        self.stdout, self.stderr = self._process.stdout, self._process.stderr
        self.pid: int | None = None
        self._ending: Ending | None = None
        self._lock = threading.Lock()
        self._gone = threading.Event()
        self._thread = threading.Thread(
            target=self._listen, args=(told,), name="ray-pools-guard", daemon=True
        )
        self._thread.start()
        self._say(json.dumps(spec))

    def terminate(self) -> None:
        """SIGTERM to the command's process group, once."""
        self._say("term")

    def kill(self) -> None:
        """SIGKILL to everything that it started."""
        self._say("kill")

    def wait(self, timeout_s: float | None = None) -> Ending | None:
        """How it ended, once nothing of it is left; None if not within the time."""
        return self._ending if self._gone.wait(timeout_s) else None

    def _say(self, line: str) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with self._lock:
            try:
                pipe.write(line.encode() + b"\n")
                pipe.flush()
            except (OSError, ValueError):  # it is over
                pass

    def _listen(self, told: int) -> None:
        ending: Ending | None = None
        with open(told, "rb") as file:
            for line in file:
                what: dict[str, Any] = json.loads(line)
                if "started" in what:
                    self.pid = what["started"]
                elif "ended" in what:
                    ending = Ending(what["ended"])
                elif "failed" in what:
                    failed = what["failed"]
                    said = f"can't {failed['what']} {failed['named']!r}: {failed['why']}"
                    ending = Ending(failed["code"], said)
        if self._process.wait() != 0:
            self._end_marked()
        if self._remove:  # the guard did, unless it was killed
            Path(self._remove).unlink(missing_ok=True)
        with self._lock:
            assert self._process.stdin is not None
            try:
                self._process.stdin.close()
            except OSError:  # what could not be said before
                pass
        self._ending = ending or Ending(_LOST)
        self._gone.set()

    def _end_marked(self) -> None:
        """The guards were killed before it was done: what has the command's mark in its environment ends here."""
        mark = f"{MARK}={self._mark}".encode()
        ends_at = time.monotonic() + guard.SWEEP_S
        while time.monotonic() < ends_at:
            found = [pid for pid in _processes() if mark in _environment_of(pid)]
            if not found:
                return
            for pid in found:
                guard.send(pid, signal.SIGKILL)
            time.sleep(guard.LOOK_S)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return []
