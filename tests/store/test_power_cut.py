"""The power goes: what a log that lives on an ext4 file system has lost then. Needs root, loop devices and mkfs.ext4.

The file system is in an image. The writer is stopped, the image is copied as it is on its disk, the copy is mounted:
what the kernel had not written yet is not in it. All that was acknowledged must be. The same with `synchronous=NORMAL`,
which does not sync commits, must lose some: else this would not be a power cut.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ray_pools.store import StoreError
from ray_pools.store.sqlite import SqliteStore

NAME = "pool-a"
CUTS = 20
IMAGE_BYTES = 48 * 2**20
PER_TURN = 3

WRITER = """
import sqlite3, sys
from ray_pools.store.sqlite import SqliteStore
class NotSynced(sqlite3.Connection):
    def execute(self, sql, *values):
        if sql == "PRAGMA synchronous":
            return super().execute("SELECT 2")
        return super().execute(sql.replace("synchronous = FULL", "synchronous = NORMAL"), *values)
kind = sqlite3.Connection if sys.argv[2] == "FULL" else NotSynced
store = SqliteStore(sys.argv[1], "pool-a", connection=kind)
store.open()
seq = store.head()[1]
while True:  # until it is stopped, in the middle of whatever it does then
    seq = store.append([(1.0, b"%d" % number) for number in range(seq + 1, seq + 4)], seq)
    print(seq, flush=True)
"""


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def mounted(image: Path, at: Path) -> Iterator[Path]:
    """The kernel writes its journal when asked only: what reaches the image was synced (or had to make room)."""
    at.mkdir(exist_ok=True)
    run("mount", "-o", "loop,commit=300", str(image), str(at))
    try:
        yield at
    finally:
        run("umount", str(at))


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A new file system; skips where there can be none."""
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(IMAGE_BYTES)
    if shutil.which("mkfs.ext4") is None or shutil.which("mount") is None:
        pytest.skip("no mkfs.ext4 or mount here")
    try:
        run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image))
        with mounted(image, tmp_path / "probe"):
            pass
    except OSError as error:
        pytest.skip(f"a loop mount is not possible here: {error}")
    return image


def cut_and_read(image: Path, copy: Path, at: Path) -> int:
    """The last row that a log has after the power was cut; its rows must be sound and its turns whole."""
    shutil.copyfile(image, copy)
    with mounted(copy, at) as folder:
        store = SqliteStore(str(folder / "logs"), NAME)
        try:
            store.open()
            rows = list(store.read())
            assert [row.body for row in rows] == [b"%d" % number for number in range(1, len(rows) + 1)]
            assert len(rows) % PER_TURN == 0
            return len(rows)
        finally:
            store.close()


def lost_by_cuts(image: Path, tmp_path: Path, synchronous: str) -> list[int]:
    """For each cut how many acknowledged events are missing."""
    lost = []
    with mounted(image, tmp_path / "disk") as disk:
        command = [sys.executable, "-c", WRITER, str(disk / "logs"), synchronous]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        try:
            for _ in range(CUTS):
                told = b""
                while told.count(b"\n") < 40:
                    told += os.read(writer.stdout.fileno(), 65536)
                writer.send_signal(signal.SIGSTOP)
                os.waitpid(writer.pid, os.WUNTRACED)
                os.set_blocking(writer.stdout.fileno(), False)
                while True:
                    try:
                        told += os.read(writer.stdout.fileno(), 65536)
                    except BlockingIOError:
                        break
                os.set_blocking(writer.stdout.fileno(), True)
                acknowledged = int(told[: told.rindex(b"\n")].split()[-1])
                try:
                    found = cut_and_read(image, tmp_path / "copy", tmp_path / "after")
                except StoreError:
                    found = 0
                lost.append(max(0, acknowledged - found))
                writer.send_signal(signal.SIGCONT)
        finally:
            writer.kill()
            writer.wait()
            writer.stdout.close()
    return lost


@pytest.mark.faults
@pytest.mark.slow
def test_power_cuts_lose_nothing_that_was_acknowledged(image: Path, tmp_path: Path) -> None:
    assert lost_by_cuts(image, tmp_path, "FULL") == [0] * CUTS


@pytest.mark.faults
@pytest.mark.slow
def test_without_syncs_the_same_power_cuts_lose_events(image: Path, tmp_path: Path) -> None:
    lost = lost_by_cuts(image, tmp_path, "NORMAL")
    assert any(lost), "nothing is lost without syncs: these are no power cuts"
