"""Addresses of stores: each form leads where it says, everything else is one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import BadInputReader

from ray_pools.store import Corrupt, StoreError, open_reader, open_store
from ray_pools.store.address import parse_address
from ray_pools.store.memory import MemoryStore
from ray_pools.store.sqlite import SqliteReader, SqliteStore


def test_every_form_leads_where_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    here = str(tmp_path)
    for address, directory in {
        "sqlite:///var/lib/logs": "/var/lib/logs",
        "sqlite:/var/lib/logs": "/var/lib/logs",
        "SQLITE:///var/lib/logs/": "/var/lib/logs",
        "sqlite:logs": f"{here}/logs",
        "sqlite:./logs/../other": f"{here}/other",
        "/var/lib/logs": "/var/lib/logs",
        "sqlite:////var/lib/logs": "/var/lib/logs",
        "//var/lib/logs": "/var/lib/logs",
        "logs": f"{here}/logs",
        ".": here,
        "~/logs": "/home/somebody/logs",
        "./with:colon": f"{here}/with:colon",
        "/50%25": "/50%25",
    }.items():
        assert parse_address(address) == ("sqlite", directory), address
    assert parse_address("memory:") == ("memory", "memory:")
    assert isinstance(open_store("memory:a", "x"), MemoryStore)
    assert isinstance(open_store("logs", "x"), SqliteStore)


@pytest.mark.parametrize(
    "address",
    ["", " ", "sqlite:", "sqlite://", "sqlite://host/dir", "http://x", "mysql://x/y", "a:b", "x\0y", None, 3],
)
def test_anything_else_is_refused(refuses: BadInputReader, address: str) -> None:
    for use in (open_store, open_reader):
        with refuses("store", "sqlite:///DIRECTORY"):
            use(address, "pool")
    with refuses("store", "sqlite:///DIRECTORY", where="pools.yaml:3"):
        parse_address(address, "pools.yaml:3")


def test_a_file_is_no_directory(refuses: BadInputReader, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refuses("store", "is not a directory"):
        open_store(str(tmp_path / "file"), "pool")


@pytest.mark.parametrize("name", ["", " x", "a\nb", "x" * 201])
def test_a_name_must_be_one(refuses: BadInputReader, name: str) -> None:
    with refuses("name"):
        open_store("memory:", name)


def test_two_memory_addresses_are_two_places(tmp_path: Path) -> None:
    first, second = open_store(f"memory:{tmp_path}/1", "x"), open_store(f"memory:{tmp_path}/2", "x")
    first.open()
    first.append([(1.0, b"x")], 0)
    second.open()
    assert (first.head(), second.head()) == ((1, 1), (1, 0))


@pytest.mark.parametrize("odd", ["a?b#c%41 d", "e'f&mode=rw"])
def test_a_log_is_read_where_it_was_written_whatever_the_place_is_called(tmp_path: Path, odd: str) -> None:
    """A path with more slashes, or with what has a meaning in addresses, can be written and read alike."""
    for address in (f"sqlite:///{tmp_path}/{odd}", f"/{tmp_path}/{odd}", str(tmp_path / odd)):
        store = open_store(address, "x")
        store.open()
        store.close()
        reader = open_reader(address, "x")
        assert reader.head()[1] == 0
        reader.close()
    assert SqliteReader(f"/{tmp_path}/{odd}", "x").head()[1] == 0


def test_a_log_that_can_not_be_opened_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it was read, so nobody can say so: its owner would restore a backup for nothing."""
    store = open_store(str(tmp_path), "x")
    store.open()
    store.close()
    monkeypatch.setattr("ray_pools.store.sqlite.read_only_uri", lambda where: f"file://elsewhere{where}")
    with pytest.raises(StoreError, match="it can't be opened: invalid uri authority") as caught:
        open_reader(str(tmp_path), "x")
    assert not isinstance(caught.value, Corrupt)
