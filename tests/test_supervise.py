"""A supervised command and all that it started: nothing outlives it, whoever is killed first.

Faults it stands for: children that start their own session or are orphaned by a double fork, children that ignore
SIGTERM, a SIGKILL of any of the processes that stand over the command; output that is lost at the end; a second SIGTERM
from who signalled the whole tree; a Python's ignored SIGPIPE that the command inherits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_pools.supervise import Ending, Supervised
from ray_pools.supervise.guard import descendants

LIMIT_S = 30.0

# Leaves five processes: a child, one in its own session, a double fork, both again under a parent that is gone.
# Each holds the lock file open for ever and ignores SIGTERM; `up` says when all are there.
FAMILY = r"""
import os, signal, sys, time
lock, kind = sys.argv[1], sys.argv[2]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready, ready_end = os.pipe()

def stay():
    os.set_inheritable(os.open(lock, os.O_RDONLY), False)
    os.write(ready_end, b".")
    while True:
        time.sleep(60)

def fork(then):
    if os.fork() == 0:
        then()
        os._exit(0)

fork(stay)
fork(lambda: (os.setsid(), stay()))
fork(lambda: fork(stay))
fork(lambda: (os.setsid(), fork(lambda: (os.setsid(), stay()))))
for _ in range(4):
    os.read(ready, 1)
print("up", flush=True)
if kind == "stay":
    stay()
"""


def holders(path: Path) -> list[int]:
    """The processes that have the file open."""
    found = []
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.path.samestat(fd.stat(), path.stat()):
                found.append(int(fd.parts[2]))
    return sorted(set(found))


def all_gone(path: Path) -> bool:
    ends_at = time.monotonic() + LIMIT_S
    while holders(path):
        if time.monotonic() > ends_at:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "lock"
    path.touch()
    yield path
    for pid in holders(path):  # a test that failed leaves nothing
        os.kill(pid, signal.SIGKILL)


def started(*argv: str) -> Supervised:
    """A Python whose first line of output is awaited."""
    command = Supervised(
        [sys.executable, "-c", *argv], os.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert command.stdout is not None
    assert command.stdout.readline() == b"up\n"
    return command


def guards_of(command: Supervised) -> tuple[int, int]:
    """The outer and the keeper."""
    outer = command._process.pid
    keeper = descendants(outer)[0]
    return outer, keeper


def ended(command: Supervised) -> Ending:
    ending = command.wait(LIMIT_S)
    assert ending is not None
    assert command.stdout is not None
    command.stdout.close()
    return ending


def output_of(script: str, **more: str) -> tuple[str, Ending]:
    command = Supervised(["sh", "-c", script], {**os.environ, **more}, stdout=subprocess.PIPE)
    assert command.stdout is not None
    with command.stdout:
        said = command.stdout.read().decode()
    ending = command.wait(LIMIT_S)
    assert ending is not None
    return said, ending


# --- how it ends


def test_the_commands_code_output_and_environment() -> None:
    said, ending = output_of("cat; echo $NAME; exit 7", NAME="välue")
    assert (said, ending, ending.exit_code) == ("välue\n", Ending(7), 7)
    _, ending = output_of("kill -9 $$")
    assert (ending.returncode, ending.exit_code, str(ending)) == (-9, 137, "ended by SIGKILL")


def test_a_command_that_can_not_start_says_why(tmp_path: Path) -> None:
    for argv, cwd, code, word in (
        ("no-such-command", None, 127, "No such file"),
        (str(tmp_path), None, 126, "Permission denied"),
        ("true", str(tmp_path / "gone"), 126, "can't enter"),
    ):
        ending = Supervised([argv], os.environ, cwd).wait(LIMIT_S)
        assert ending is not None
        assert ending.exit_code == code
        assert word in ending.failure


def test_signals_are_as_a_shell_has_them() -> None:
    """Python ignores SIGPIPE, and who started Ray may have ignored others: an ignored signal is inherited."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        said, _ = output_of(
            "yes | head -n 1; trap; grep SigIgn /proc/self/status; grep SigBlk /proc/self/status"
        )
    finally:
        signal.signal(signal.SIGUSR1, before)
    masks = [int(line.split()[1], 16) for line in said.splitlines() if line.startswith("Sig")]
    libc_own = 0b11 << 31  # 32 and 33, which no program can set
    assert [mask & ~libc_own for mask in masks] == [0, 0]


def test_the_file_to_be_removed_goes_with_the_command(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch()
    assert Supervised(["true"], os.environ, remove=str(secret)).wait(LIMIT_S) == Ending(0)
    assert not secret.exists()


# --- being told to stop

TRAPS = """
import signal, sys, time
def stop(number, frame):
    print("told", flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
while True:
    time.sleep(60)
"""


def test_terminate_reaches_the_command() -> None:
    command = started(TRAPS)
    command.terminate()
    assert ended(command) == Ending(3)


def test_a_shells_child_works_on_its_stop_after_the_shell_is_gone(tmp_path: Path) -> None:
    """`sh -c 'python train.py; ...'`: the shell dies of SIGTERM, the checkpoint is its child's."""
    code = "import signal, sys, time, pathlib\n" + (
        "def stop(*_):\n    time.sleep(0.5)\n    pathlib.Path(sys.argv[1]).touch()\n    sys.exit()\n"
        "signal.signal(signal.SIGTERM, stop)\nprint('up', flush=True)\nwhile True: time.sleep(60)\n"
    )
    script = '"$0" -c "$1" "$2"; true'
    saved = tmp_path / "saved"
    command = Supervised(
        ["sh", "-c", script, sys.executable, code, str(saved)], os.environ, stdout=subprocess.PIPE
    )
    assert command.stdout is not None
    assert command.stdout.readline() == b"up\n"
    command.terminate()
    assert ended(command) == Ending(-signal.SIGTERM)
    assert saved.exists()


def test_who_signalled_the_whole_tree_is_not_doubled() -> None:
    """`ray job stop` sends SIGTERM to every process; the command must not take ours for "at once"."""
    code = """
import signal, time
seen = []
signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
print("up", flush=True)
while not seen: time.sleep(0.01)
time.sleep(0.3)
raise SystemExit(len(seen))
"""
    command = started(code)
    assert command.pid is not None
    for pid in (*guards_of(command), command.pid):
        os.kill(pid, signal.SIGTERM)
    command.terminate()
    assert ended(command) == Ending(1)


# --- nothing is left


def test_kill_ends_all_that_it_started(lock: Path) -> None:
    command = started(FAMILY, str(lock), "stay")
    assert len(holders(lock)) == 5
    command.terminate()  # all of them ignore it
    command.kill()
    assert ended(command) == Ending(-signal.SIGKILL)
    assert holders(lock) == []


def test_what_a_command_leaves_behind_ends_with_it(lock: Path) -> None:
    command = started(FAMILY, str(lock), "go")
    assert ended(command) == Ending(0)
    assert holders(lock) == []


@pytest.mark.parametrize(
    "victims", ["keeper", "outer", "command", "keeper and command", "outer and command", "keeper and outer"]
)
def test_a_sigkill_of_any_of_them_leaves_nothing(lock: Path, victims: str) -> None:
    command = started(FAMILY, str(lock), "stay")
    outer, keeper = guards_of(command)
    assert command.pid is not None
    for name, pid in (("keeper", keeper), ("outer", outer), ("command", command.pid)):
        if name in victims:
            os.kill(pid, signal.SIGKILL)
    assert ended(command) == Ending(-signal.SIGKILL)
    assert all_gone(lock)


def test_a_sigkill_of_the_launcher_leaves_nothing(lock: Path) -> None:
    code = """
import os, sys
from ray_pools.supervise import Supervised
Supervised([sys.executable, "-c", *sys.argv[1:]], os.environ).wait()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, FAMILY, str(lock), "stay"], stdout=subprocess.PIPE
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"up\n"
        assert len(holders(lock)) == 5
        launcher.kill()
    assert all_gone(lock)
