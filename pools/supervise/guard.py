"""The program that stands over one command, so that nothing of it outlives its run.

Run as a script of its own (`python -I -S guard.py`: standard library only, no path of the user's), by `Supervised`:

    launcher --> outer --> keeper --> the command, in a session and process group of its own --> whatever it starts

Outer and keeper are this program, twice. Both are subreapers: a process below them whose parent ends, by a double
fork or `setsid`, becomes their child and is found. So whoever is killed, somebody is left who ends the rest:

- the launcher: the keeper's standard input ends;
- the outer: the keeper's tether, a pipe that only the outer can write to, ends;
- the keeper: the command dies with it (parent-death signal), and all others become children of the outer.

What the launcher says comes by standard input: one line of JSON (argv, env, cwd, remove), then `term` or `kill`, a
line each. What happens goes to the file descriptor that the first argument names, a line of JSON each: `started`,
`failed`, `ended`; its end means that nothing of the command is left. The command's output is this program's own.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from typing import Any

CONTROL = 0
LEFTOVER_S = 2.0
"""What a command leaves behind when it ends gets SIGTERM, and SIGKILL after so long."""

SWEEP_S = 10.0
"""Processes that are stuck in the kernel, or belong to another user, can't be waited for without end."""

LOOK_S = 0.1
NOT_FOUND, NOT_STARTED = 127, 126  # as shells have them

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TREE_WIDE_S = 1.0


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def descendants(top: int) -> list[int]:
    """All processes below `top`, which is not among them, parents first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read()
        except OSError:  # gone meanwhile
            continue
        # the name in brackets may have anything in it: what follows the last bracket is state and parent
        parent = int(stat.rpartition(b")")[2].split()[1])
        children.setdefault(parent, []).append(int(name))
    found = [*children.get(top, ())]
    for pid in found:  # grows while it is walked
        found += children.get(pid, ())
    return found


def tell(**what: Any) -> None:
    """To the launcher, if it is there."""
    try:
        os.write(int(sys.argv[1]), json.dumps(what).encode() + b"\n")
    except OSError:
        pass


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:  # gone, or another user's by now
        pass


class Keeper:
    """Starts the command, passes signals on, and ends what is left."""

    def __init__(self, tether: int) -> None:
        self.tether = tether
        self.pid = 0
        self.ended: int | None = None
        self.childless = False
        self.told = False  # to stop, by us
        self.terminated_at = float("-inf")  # this process got SIGTERM itself
        self.leftover_until: float | None = None
        self.heard = b""
        self.remove = ""

    def run(self) -> None:
        wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.signal(signal.SIGTERM, self._note_terminated)
        line = self._first_line()
        if line is None:
            return
        spec = json.loads(line)
        self.remove = spec.get("remove") or ""
        try:
            if self._start(spec):
                self._stand(wake)
        finally:
            self._clean()

    def _note_terminated(self, number: int, frame: object) -> None:
        self.terminated_at = time.monotonic()

    def _first_line(self) -> bytes | None:
        while b"\n" not in self.heard:
            data = os.read(CONTROL, 65536)
            if not data:
                return None
            self.heard += data
        line, _, self.heard = self.heard.partition(b"\n")
        return line

    def _start(self, spec: dict[str, Any]) -> bool:
        """Returns when the command runs, or could not be started (False)."""
        failure, failure_end = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _become(spec, parent, failure_end)
        os.close(failure_end)
        problem = b""
        while data := os.read(failure, 4096):
            problem += data
        os.close(failure)
        if problem:
            os.waitpid(self.pid, 0)
            tell(failed=json.loads(problem))
            return False
        tell(started=self.pid)
        return True

    # --- while it runs

    def _stand(self, wake: int) -> None:
        poll = select.poll()
        for fd in (wake, CONTROL, self.tether):
            poll.register(fd, select.POLLIN)
        while True:
            self._commands()
            self.reap()
            if self._is_over():
                return
            for fd, _ in poll.poll(self._patience_ms()):
                if fd == wake:
                    _drain(wake)
                elif fd == self.tether or not self._hear():
                    self.sweep()
                    return

    def _hear(self) -> bool:
        """False: the launcher is gone."""
        data = os.read(CONTROL, 65536)
        self.heard += data
        return bool(data)

    def _commands(self) -> None:
        while b"\n" in self.heard:
            line, _, self.heard = self.heard.partition(b"\n")
            if line == b"term":
                self._terminate()
            elif line == b"kill":
                self.sweep()

    def _terminate(self) -> None:
        """SIGTERM to the command's process group, unless whoever signalled us signalled the whole tree (as
        `ray job stop` does): many programs take a second one for "at once".
        """
        if not self.told and time.monotonic() - self.terminated_at > _TREE_WIDE_S and self.ended is None:
            _to_group(self.pid, signal.SIGTERM)
        self.told = True

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.childless = True
                return
            if pid == 0:
                return
            if pid == self.pid and self.ended is None:
                self.ended = os.waitstatus_to_exitcode(status)
                tell(ended=self.ended)

    def _is_over(self) -> bool:
        """Nothing is left. What a command leaves behind is told to end, and made to.

        A command that was told to stop may have been a shell: its group works on its own stop until the launcher
        says `kill`.
        """
        if self.ended is None or (self.told and _to_group(self.pid, 0)):
            return False
        if self.childless:
            return True
        now = time.monotonic()
        if self.leftover_until is None:
            self.leftover_until = now + LEFTOVER_S
            for pid in descendants(os.getpid()):
                send(pid, signal.SIGTERM)
        elif now >= self.leftover_until:
            self.sweep()
            return True
        return False

    def _patience_ms(self) -> float | None:
        """An end of something that is not our child comes with no signal."""
        return None if self.ended is None else LOOK_S * 1000

    def sweep(self) -> None:
        """SIGKILL to everything below, until nothing is left."""
        ends_at, pause_s = time.monotonic() + SWEEP_S, 0.001
        while True:
            for pid in descendants(os.getpid()):
                send(pid, signal.SIGKILL)
            self.reap()
            if self.childless or time.monotonic() >= ends_at:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_S)

    def _clean(self) -> None:
        if self.remove:
            try:
                os.unlink(self.remove)
            except OSError:
                pass


def _ignore(number: int, frame: object) -> None:
    """A handler, where SIG_IGN would be inherited by the command."""


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass


def _to_group(group: int, number: int) -> bool:
    """False: nobody is in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _become(spec: dict[str, Any], parent: int, failure: int) -> None:
    """In the child: becomes the command, or tells why not. Does not return."""
    what, named = "start", spec["argv"][0]
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before that
            os._exit(NOT_STARTED)
        # what is ignored is inherited: two by Python's own doing, others by whatever started Ray here
        for number in signal.valid_signals():
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        if spec.get("cwd"):
            what, named = "enter", spec["cwd"]
            os.chdir(spec["cwd"])
            what, named = "start", spec["argv"][0]
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
    except (OSError, ValueError) as problem:
        text = (isinstance(problem, OSError) and problem.strerror) or str(problem)
        missing = what == "start" and isinstance(problem, FileNotFoundError)
        code = NOT_FOUND if missing else NOT_STARTED
        os.write(failure, json.dumps({"what": what, "named": named, "why": text, "code": code}).encode())
    os._exit(NOT_STARTED)


def main() -> None:
    """The outer: starts the keeper, and ends what is left when the keeper did not."""
    os.set_inheritable(int(sys.argv[1]), False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's workers block some, and that is inherited
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, _ignore)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    tether, tether_end = os.pipe2(os.O_CLOEXEC)
    keeper = os.fork()
    if keeper == 0:
        os.close(tether_end)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # a fork does not inherit it
        Keeper(tether).run()
        os._exit(0)
    os.close(CONTROL)
    os.waitpid(keeper, 0)
    Keeper(tether).sweep()


if __name__ == "__main__":
    main()
    sys.exit(0)
