"""Snapshots (docs/log.md): a state written out at any row, and the rest of the log, is the state of the whole log.

Faults it stands for: something durable, or derived from it, that a snapshot does not hold; a restart that goes by the
whole log although it has a snapshot, or can't do without one; a snapshot that is damaged, or of other code, and
believed all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgpack
import pytest
from fault_processes import COORDINATOR, Disk
from fault_simulation import play
from property_worlds import kept
from test_shells import Shells

from ray_pools.actors import shell as shell_module
from ray_pools.core import records as ev
from ray_pools.core import walk
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.pool import Pool
from ray_pools.core.pool_state import PoolState
from ray_pools.store import Corrupt, open_store
from ray_pools.store.base import DamagedSnapshot
from ray_pools.store.memory import MemoryLog, forget, memory_log

# --- states


def loaded(state: Any) -> Any:
    """Written out and read back."""
    written = msgpack.packb(state.dump())
    return type(state).load(msgpack.unpackb(written, strict_map_key=False))


def whole(disk: Disk, who: str) -> Any:
    kind: Any = CoordinatorState if who == COORDINATOR else PoolState
    return disk.fold(kind())


def prefixes(disk: Disk, who: str) -> Iterator[Any]:
    """The state after no row, after the first, and so on."""
    state: Any = CoordinatorState() if who == COORDINATOR else PoolState()
    yield state
    for at, _, body in list(disk.rows):
        state.apply(ev.unpack(body), at)
        yield state


def derived(state: Any) -> Any:
    """What is not dumped, and by which the core decides."""
    if isinstance(state, CoordinatorState):
        return (
            list(state.waiting_or_holding),
            {client: list(ids) for client, ids in state.of_client.items()},
            [(id, r.shown, r.positive) for id, r in state.requests.items() if r.phase != "final"],
        )
    pool = Pool("p", state, 1, state.clock + 1e6)
    pool.tick()
    first, asking = walk.first(state, pool.now)
    preemption = walk.first_preemption(state, pool.now, asking) if first is None else None
    return (
        kept(state),
        [attempt.id for attempt in state.in_order()],
        first and first.id,
        preemption and (preemption[0].id, [victim.id for victim in preemption[1]]),
        state.lowest_borrower(),
        sorted(state.nominated),
        sorted(state.preempting),
        [message[:6] for message in [list(pool.outgoing())]],
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_snapshot_at_any_row_and_the_rest_is_the_whole_log(seed: int) -> None:
    disks = play(seed, 150).disks
    for who, disk in disks.items():
        digest = whole(disk, who).digest()
        for state in prefixes(disk, who):
            assert disk.fold(loaded(state)).digest() == digest, f"{who}, cut after row {state.seq}"


@pytest.mark.parametrize("seed", range(20, 28))
def test_what_comes_out_of_a_snapshot_decides_as_what_went_in(seed: int) -> None:
    """At every seventh row, for the core that looks ahead may not be the one that goes on."""
    for who, disk in play(seed, 150).disks.items():
        for cut in range(0, len(disk.rows), 7):
            part = Disk()
            part.rows = disk.rows[:cut]
            state = whole(part, who)
            out = loaded(state)
            assert out.digest() == state.digest()
            assert derived(out) == derived(state), f"{who}, cut after row {cut}"


@pytest.mark.parametrize("kind", [CoordinatorState, PoolState])
@pytest.mark.parametrize("change", ["a key more", "a key less", "a field more", "no layout"])
def test_a_snapshot_of_other_code_is_not_believed(kind: Any, change: str) -> None:
    """Fault: after an upgrade, or back, a state is read with what the other code had no name for."""
    dumped = kind().dump()
    if change == "a key more":
        dumped["layout"]["keys"] = [*dumped["layout"]["keys"], "stars"]
    elif change == "a key less":
        dumped["layout"]["keys"] = dumped["layout"]["keys"][1:]
    elif change == "a field more":
        dumped["layout"]["fields"] = [*dumped["layout"]["fields"], "stars"]
    else:
        del dumped["layout"]
    with pytest.raises(ev.UnknownSnapshot, match="row 0 is of another version"):
        kind.load(dumped)


# --- the actors' shells


def with_shells(
    monkeypatch: pytest.MonkeyPatch, story: Callable[[Shells], Coroutine[Any, Any, None]]
) -> None:
    """Plays a story with a coordinator and pool p, which make a snapshot every few events."""
    monkeypatch.setattr(shell_module, "SNAPSHOT_EVERY", 5)

    async def main() -> None:
        shells = Shells(monkeypatch)
        shells.start()
        pool, policy = PoolConfig("p", {"gpu": 2}), PolicyConfig("p", "low")
        await shells.ask("change", changes=[["pool", pool.to_wire(), "p#1"], ["policy", policy.to_wire()]])
        for number in range(4):
            await shells.submit(f"r{number}", "low", 1)
        await shells.until({"r0": "allocated", "r1": "allocated", "r2": "queued", "r3": "queued"})
        await shells.ask("release", id="r0")
        await shells.until({"r0": "released", "r1": "allocated", "r2": "allocated", "r3": "queued"})
        await story(shells)
        shells.stop()
        forget(shells.address)

    asyncio.run(main())


NAMES = ("coordinator", "pool:p")


def log_of(shells: Shells, name: str) -> MemoryLog:
    log = memory_log(shells.address, name)
    assert log is not None
    return log


def digests(shells: Shells) -> list[str]:
    return [shells.coordinator.state.digest(), shells.pool.state.digest()]


def prune(shells: Shells, name: str) -> None:
    """Only the snapshot knows the rows before it from now on."""
    store = open_store(shells.address, name)
    store.open()
    snapshot = store.latest_snapshot()
    assert snapshot is not None
    store.prune(snapshot.seq)
    assert store.first_seq() > 1


def damage(log: MemoryLog, seq: int | None = None) -> None:
    assert log.snapshot is not None
    was, epoch, chain, state, sealed = log.snapshot
    log.snapshot = (seq or was, epoch, chain, state[:-1] + b"\x00", sealed)


def test_shells_write_snapshots_and_restart_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(shells: Shells) -> None:
        before = digests(shells)
        for name, seq in zip(NAMES, (shells.coordinator.state.seq, shells.pool.state.seq), strict=True):
            snapshot = log_of(shells, name).snapshot
            assert snapshot is not None
            assert snapshot[0] + 5 + 10 > seq, "it is not far behind: a turn may bring some more"
            prune(shells, name)
        shells.start()
        assert digests(shells) == before
        await shells.ask("release", id="r1")
        await shells.until({"r0": "released", "r1": "released", "r2": "allocated", "r3": "allocated"})

    with_shells(monkeypatch, story)


def test_a_damaged_snapshot_is_no_loss_while_the_log_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(shells: Shells) -> None:
        before = digests(shells)
        for name in NAMES:
            damage(log_of(shells, name))
        shells.start()
        assert digests(shells) == before
        await shells.ask("release", id="r1")  # and the next snapshot takes its place
        await shells.until({"r0": "released", "r1": "released", "r2": "allocated", "r3": "allocated"})
        for name in NAMES:
            assert open_store(shells.address, name).latest_snapshot() is not None

    with_shells(monkeypatch, story)


def test_a_snapshot_of_other_code_is_no_loss_while_the_log_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(shells: Shells) -> None:
        before = digests(shells)
        for name in NAMES:
            store = open_store(shells.address, name)
            store.open()
            store.snapshot(store.head()[1], msgpack.packb({"seq": store.head()[1], "from": "the future"}))
        shells.start()
        assert digests(shells) == before

    with_shells(monkeypatch, story)


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_snapshot_is_refused_where_rows_are_pruned(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async def story(shells: Shells) -> None:
        prune(shells, name)
        damage(log_of(shells, name))
        with pytest.raises(DamagedSnapshot, match="checksum"):
            shells.start()

    with_shells(monkeypatch, story)


def test_a_damaged_snapshot_that_knows_more_than_the_log_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the log lost its end, and what told of it is thrown away."""

    async def story(shells: Shells) -> None:
        log = log_of(shells, "coordinator")
        damage(log, seq=log.seq + 1)
        with pytest.raises(DamagedSnapshot):
            shells.start()

    with_shells(monkeypatch, story)


def test_a_log_that_lost_rows_of_its_snapshot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(shells: Shells) -> None:
        log = log_of(shells, "coordinator")
        assert log.snapshot is not None
        while log.seq >= log.snapshot[0]:
            log.batches.pop()
        with pytest.raises(Corrupt, match="the log does not have it"):
            shells.start()

    with_shells(monkeypatch, story)
