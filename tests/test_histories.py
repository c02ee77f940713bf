"""Logs that older code wrote (`tests/histories`, see `write_histories.py`) give the states that they gave then.

Faults it stands for: an event whose meaning changed, or that can't be read any more; a fold that depends on more than
the log, such as the order of a set; an event of newer code that is guessed at (docs/log.md, "Events").
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pytest
import write_histories
from write_histories import HISTORIES, STATES, hash_of, hashes, read_rows

from ray_pools.core import records as ev
from ray_pools.core.pool_state import _APPLY, PoolState

STORED = {
    stored.parent / name: kept
    for stored in sorted(HISTORIES.glob(f"*/{STATES}"))
    for name, kept in json.loads(stored.read_text()).items()
}


def called(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", STORED, ids=called)
def test_a_history_gives_the_state_that_it_gave(path: Path) -> None:
    kept = STORED[path]
    assert hashes(path, kept["parts"]) == kept["hashes"]


def test_the_histories_are_all_there_and_hold_every_event_in_every_version() -> None:
    """A new event, or version of one, needs a new directory of histories."""
    assert set(HISTORIES.glob("*/*.log")) == set(STORED)
    seen = Counter(
        tuple(msgpack.unpackb(body, strict_map_key=False)[:2])
        for path in STORED
        for _, body in read_rows(path)
    )
    written = {(tag, version) for tag, (_, newest) in ev._CLASSES.items() for version in range(1, newest + 1)}
    assert set(seen) == written


def test_two_processes_that_hash_differently_give_the_same_states() -> None:
    """Fault: the order of a set or of hashed keys gets into the state. These are hashes of all of it."""
    found = []
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, write_histories.__file__],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(json.loads(run.stdout))
    assert found[0] == found[1]
    assert {name: hashed for name, (hashed, _) in found[0].items()} == {
        f"{path.parent.name}/{path.name}": kept["hashes"] for path, kept in STORED.items()
    }


def test_a_history_is_not_written_twice() -> None:
    with pytest.raises(FileExistsError):
        write_histories.write("v1")


def test_a_changed_event_changes_the_hash() -> None:
    """Fault: the hash leaves out what it is there for."""
    path, kept = next((path, kept) for path, kept in STORED.items() if "pool-p" in path.stem)
    state = PoolState()
    for at, body in read_rows(path):
        event = ev.unpack(body)
        if isinstance(event, ev.Configured):
            event = event._replace(uid=event.uid + "x")
        state.apply(event, at)
    assert hash_of(state, kept["parts"]) != kept["hashes"][str(state.seq)]


# --- versions


class LaterGranted(NamedTuple):
    """What `Granted` may become: its fields in another order, and one more."""

    k: int
    id: str
    reason: str


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code in which `Granted` has had two more versions."""
    monkeypatch.setitem(ev._CLASSES, 3, (LaterGranted, 3))
    monkeypatch.setitem(ev._SHAPES, 3, (LaterGranted, 3, 5))
    monkeypatch.setitem(ev._HEADERS, LaterGranted, (3, 3))
    monkeypatch.setitem(ev.UPCASTS, (3, 1), lambda fields: [*fields, ""])
    monkeypatch.setitem(ev.UPCASTS, (3, 2), lambda fields: [fields[1], fields[0], fields[2] or "unknown"])
    monkeypatch.setitem(_APPLY, LaterGranted, PoolState._granted)


@pytest.mark.usefixtures("later")
def test_old_versions_go_through_every_step_between() -> None:
    assert ev.unpack(msgpack.packb([3, 1, "a", 7])) == LaterGranted(7, "a", "unknown")
    assert ev.unpack(msgpack.packb([3, 2, "a", 7, "room"])) == LaterGranted(7, "a", "room")
    event: Any = LaterGranted(7, "a", "room")
    assert ev.unpack(ev.pack(event)) == event
    bodies = [msgpack.packb([3, 1, "a", 7]), ev.pack(ev.Taken("a", 7, "p")), ev.pack(event)]
    assert ev.unpack_all(b"".join(bodies), 3) == [
        LaterGranted(7, "a", "unknown"),
        ev.Taken("a", 7, "p"),
        event,
    ]


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("path", [path for path in STORED if "pool" in path.stem], ids=called)
def test_a_history_gives_its_state_through_upcasts_too(path: Path) -> None:
    assert hashes(path, STORED[path]["parts"]) == STORED[path]["hashes"]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([3, 2, "a", 7], ("Granted", "version 2", "newest known here is 1")),
        ([3, 9, "a", 7, "x"], ("Granted", "version 9", "newest known here is 1")),
        ([99, 4, "a"], ("tag 99", "version 4", "unknown")),
        ([0, 1], ("tag 0", "version 1", "unknown")),
    ],
)
def test_what_newer_code_wrote_is_refused_by_name_and_version(
    row: list[Any], words: tuple[str, ...], together: bool
) -> None:
    before = ev.pack(ev.Taken("a", 7, "p"))
    count, body = (2, before + msgpack.packb(row)) if together else (1, msgpack.packb(row))
    with pytest.raises(ev.UnknownEvent) as caught:
        ev.unpack_all(body, count)
    assert all(word in str(caught.value) for word in words), str(caught.value)
