"""Writers of the sqlite store that are killed: SIGKILL before a commit, at any time, and while others open the log.

Stands for: a torn turn, an acknowledged turn that is lost, a reader that moves what a dead writer left behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ray_pools.store import SequenceGap, open_reader
from ray_pools.store.sqlite import SqliteStore
from ray_pools.store.sqlite_file import database_path

NAME = "pool-a"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "logs")


WRITER = """
import os, signal, sqlite3, sys
from ray_pools.store.sqlite import SqliteStore
class Killed(sqlite3.Connection):
    at = ""
    def execute(self, sql, *values):
        if self.at and sql.startswith(self.at):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(sql, *values)
store = SqliteStore(sys.argv[1], "pool-a", connection=Killed)
store.open()
"""


def run_writer(folder: str, code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WRITER + code, folder], stdout=subprocess.PIPE, text=True)


def test_killed_before_the_commit_nothing_of_the_turn_is_there(folder: str) -> None:
    code = "store.append([(1.0, b'x')] * 7, 0); Killed.at = 'COMMIT'; store.append([(1.0, b'x' * 9000)] * 400, 7)"
    with run_writer(folder, code) as writer:
        assert writer.wait() == -signal.SIGKILL
    store = SqliteStore(folder, NAME)
    assert store.open() == 2
    assert store.head() == (2, 7)
    assert len(list(store.read())) == 7
    with pytest.raises(SequenceGap):
        store.append([(1.0, b"x")], 407)
    assert store.append([(1.0, b"x")], 7) == 8
    store.close()


@pytest.mark.parametrize("acknowledged", [1, 5, 40])
def test_killed_at_any_time_whole_turns_and_all_acknowledged_ones_are_there(
    folder: str, acknowledged: int
) -> None:
    code = "\nseq = 0\nwhile True:\n    seq = store.append([(1.0, b'x' * 300)] * 7, seq)\n    print(seq, flush=True)"
    with run_writer(folder, code) as writer:
        assert writer.stdout is not None
        for _ in range(acknowledged):
            writer.stdout.readline()
        writer.kill()
        told = [int(line) for line in writer.stdout.read().split()]
    store = SqliteStore(folder, NAME)
    assert store.open() == 2
    seq = store.head()[1]
    assert seq % 7 == 0
    assert seq >= max([7 * acknowledged, *told])
    assert len(list(store.read())) == seq
    store.close()


def test_two_openers_at_once_make_one_log(folder: str) -> None:
    """Both make the file; one of them wins, and both get epochs of the same log."""
    writers = [run_writer(folder, "print(store._epoch)") for _ in range(4)]
    epochs = []
    for writer in writers:
        with writer:
            assert writer.stdout is not None
            epochs.append(int(writer.stdout.read()))
    assert sorted(epochs) == [1, 2, 3, 4]
    assert os.listdir(folder) == ["pool-a.sqlite"]


def test_a_reader_never_checkpoints(folder: str) -> None:
    """A writer that was killed leaves a WAL; a reader, even the last one to close, leaves it as it is."""
    with run_writer(folder, "store.append([(1.0, b'x')] * 5, 0); os._exit(0)") as writer:
        assert writer.wait() == 0
    path = database_path(folder, NAME)
    before = Path(path).read_bytes(), Path(path + "-wal").read_bytes()
    assert len(before[1]) > 0
    reader = open_reader(folder, NAME)
    assert len(list(reader.read())) == 5
    reader.close()
    assert (Path(path).read_bytes(), Path(path + "-wal").read_bytes()) == before
