"""What `test_run_live.py` runs commands with: their place, a client beside them, and who has a file open."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POOLS = str(Path(sys.executable).parent / "pools")
LIMIT_S = 300.0

# What holds a lock file open for ever, in three sessions, and does not listen to SIGTERM.
STUBBORN = r"""
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready, ready_end = os.pipe()

def stay():
    held = os.open(sys.argv[1], os.O_RDONLY)
    os.write(ready_end, b".")
    while True:
        time.sleep(60)

if os.fork() == 0:
    os.setsid()
    stay()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        stay()
    os._exit(0)
os.wait()
os.read(ready, 1), os.read(ready, 1)
print("up", os.getppid(), flush=True)
stay()
"""

# Another process's view of the pools: one command on standard input, one answer on standard output, as JSON.
DESK = r"""
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # where Ray says what it likes
import ray_pools as pools
client, tickets = pools.connect(quiet=True), {}
for line in sys.stdin:
    verb, given = json.loads(line)
    if verb == "hold":
        ticket = tickets[given["id"]] = client.submit(**given)
        answer = ticket.wait().pool
    elif verb == "ask":
        ticket = tickets[given["id"]] = client.submit(**given)
        answer = ticket.state
    elif verb == "release":
        answer = tickets.pop(given).release()["state"]
    elif verb == "wait_for":
        answer = client.follow(given[0]).wait_for(given[1], 100)
    elif verb == "get":
        answer = client.get(given)
    elif verb == "held":
        answer = {pool: each["held"] for pool, each in client.status()["pools"].items()}
    print(json.dumps(answer, default=str), file=answers, flush=True)
"""


@dataclass
class Desk:
    """A client of the pools, in a process of its own."""

    process: subprocess.Popen[str]

    def __call__(self, verb: str, given: Any = None) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([verb, given]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the desk has failed"
        return json.loads(answer)


@dataclass
class Place:
    """Where commands run."""

    folder: Path
    env: dict[str, str]
    dashboard: str
    desk: Desk
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [POOLS, *arguments],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(process)
        return process

    def run(self, *arguments: str, code: int = 0) -> tuple[str, str]:
        out, said = self.start(*arguments).communicate(timeout=LIMIT_S)
        process = self.running.pop()
        assert process.returncode == code, f"{process.returncode}\n{out}\n{said}"
        assert "Traceback" not in said
        return out, said

    def ray_job(self, *arguments: str) -> str:
        env = {**self.env, "RAY_ADDRESS": self.dashboard}
        command = [str(Path(sys.executable).parent / "ray"), "job", *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def job(self, id: str) -> dict[str, Any]:
        from urllib.request import urlopen

        with urlopen(f"{self.dashboard}/api/jobs/{id}", timeout=LIMIT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def job_ended(self, id: str) -> dict[str, Any]:
        eventually(lambda: self.job(id)["status"] in ("SUCCEEDED", "FAILED", "STOPPED"), f"{id} does not end")
        return self.job(id)


def eventually(holds: Callable[[], object], what: str) -> None:
    """For what nobody tells: processes, and Ray's own view of jobs."""
    ends_at = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < ends_at, what
        time.sleep(0.05)


def holders(path: Path) -> list[int]:
    """The processes that have the file open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ends while it is looked at
            for fd in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.path.samestat(fd.stat(), path.stat()):
                        found.add(int(process.name))
    return sorted(found)


def line_with(process: subprocess.Popen[str], word: str, stream: str = "stdout") -> str:
    """Reads up to a line."""
    lines = getattr(process, stream)
    for line in lines:
        if word in line:
            return str(line)
    raise AssertionError(f"no line with {word!r}: {process.communicate()}")
