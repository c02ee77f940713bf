"""Writes `tests/histories/vN`: logs as this version of the code writes them, and what states they give.

Once written they are never edited again: a log of years ago must be readable for ever (docs/log.md, "Events"). A new
version of an event is a reason for a new directory beside the others.

usage: python tests/write_histories.py v2     writes that directory; refuses if it is there
       python tests/write_histories.py        what the logs that are there give today, as JSON

A file holds one log, a row a line: the core's time, and the event in hexadecimal. `states.json` holds per file hashes
of the state after every tenth row and the last, and which parts of the state went into them: what later code adds is
left out when they are computed again.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

from ray_pools.core import access, announcements, eviction, holders
from ray_pools.core import records as ev
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.pool_state import PoolState

HISTORIES = Path(__file__).parent / "histories"
STATES = "states.json"
EVERY_ROWS = 10
# days of `fault_simulation` whose logs the next directory keeps; v1 has others
SEEDS = (7, 45, 56)

Rows = list[tuple[float, bytes]]


def read_rows(path: Path) -> Iterator[tuple[float, bytes]]:
    """The rows of a history."""
    for line in path.read_text().splitlines():
        at, body = line.split(" ")
        yield float(at), bytes.fromhex(body)


def replay(path: Path) -> Any:
    """The state that the history gives."""
    state: Any = CoordinatorState() if "coordinator" in path.stem else PoolState()
    for at, body in read_rows(path):
        state.apply(ev.unpack(body), at)
    return state


def hashes(path: Path, known: dict[str, list[str]]) -> dict[str, str]:
    """Row number to hash of the state after it, for every tenth row and the last."""
    state: Any = CoordinatorState() if "coordinator" in path.stem else PoolState()
    rows = list(read_rows(path))
    found: dict[str, str] = {}
    for at, body in rows:
        state.apply(ev.unpack(body), at)
        if state.seq % EVERY_ROWS == 0 or state.seq == len(rows):
            found[str(state.seq)] = hash_of(state, known)
    return found


# --- the part of a state that a version of the code knew


def parts(state: Any) -> dict[str, list[str]]:
    """Names of all that a state consists of today."""
    return {
        **{name: list(names) for name, names in state.dump()["layout"].items()},
        "pool": sorted(PoolConfig("p", {}).to_wire()),
        "policy": sorted(PolicyConfig("p", "r").to_wire()),
    }


def hash_of(state: Any, known: dict[str, list[str]]) -> str:
    """A hash of these parts of the state."""
    dumped = state.dump()
    fields = dumped["layout"]["fields"]

    def record(values: list[Any]) -> list[Any]:
        """An attempt or a request: what is nested, then its fields by name."""
        nested = len(values) - len(fields)
        named = dict(zip(fields, values[nested:], strict=True))
        return [values[:nested], [named[name] for name in known["fields"]]]

    def picked(of: str, wire: dict[str, Any] | None) -> Any:
        return wire and [wire[name] for name in known[of]]

    made: dict[str, Any] = {name: dumped[name] for name in known["keys"]}
    for name in ("attempts", "ended", "requests"):
        if name in made:
            made[name] = [record(values) for values in made[name]]
    made["policies"] = [picked("policy", policy) for policy in made["policies"]]
    if "config" in made:
        made["config"] = picked("pool", made["config"])
    else:
        made["pools"] = [[picked("pool", pool), *rest] for pool, *rest in made["pools"]]
    return hashlib.blake2b(msgpack.packb([made[name] for name in known["keys"]]), digest_size=16).hexdigest()


# --- writing


def logs_of(world: Any) -> dict[str, Rows]:
    """What the actors of a `LiveStyle` wrote; it is over then."""
    logs = {name: [(row.at, row.body) for row in store.read()] for name, store in world.stores.items()}
    world.close()
    return {who if who == "coordinator" else "pool-" + who: rows for who, rows in logs.items()}


def a_rich_day() -> dict[str, Rows]:
    """What the seeded days do not have: tokens, clients, bundles, names that are not ASCII, rejections."""
    from live_style import LiveStyle

    placement = {"strategy": "PACK", "provision_timeout_s": 60.0}
    pools = {
        "p": PoolConfig("p", {"gpu": 2, "cpu": 8000}, grace_s=10.0, placement=placement),
        "q": PoolConfig("q", {"gpu": 1}, queueing="strict", starvation_after_s=0.0),
    }
    team = "équipe 7"
    world = LiveStyle(
        pools, [PolicyConfig("p", team, 1), PolicyConfig("q", team, 2), PolicyConfig("p", "b", 9)]
    )
    extras: dict[str, Any] = {
        "token": bytes(range(16)),
        "client": "host-1/4711",
        "options": {"bundles": [{"gpu": 1, "cpu": 1000}, {"gpu": 1}], "strategy": "SPREAD"},
    }
    world.ask(
        "submit", "job/é", team, {"gpu": 2, "cpu": 2000, "memory": 0}, retries=2, lease_s=600.0, **extras
    )
    world.submit("small", team, 1, client="host-2/1")
    world.submit("nobody", "stranger", 1)
    world.run()
    world.now += 5.25
    world.submit("urgent", "b", 2, lease_s=30.0)
    world.run()
    world.about("stopped", "job/é")
    world.run()
    world.submit("unplaced", team, 1)
    world.run(errands=False)
    world.ask("change", [("policy", PolicyConfig("q", "b", 3, {"gpu": 1}, {"gpu": 1}))], "change-1")
    world.run()
    world.advance(40.0)
    world.about("cancel", "small")
    world.run()
    world.ask("change", [("unpolicy", "b", "q")], "change-2")
    for id, state in world.states().items():
        if "@" in state:
            world.about("release", id)
    world.run()
    world.advance(200.0)
    return logs_of(world)


def a_day_with_operators() -> dict[str, Rows]:
    """Processes that are gone or taken over from; operators, keys, limits, and who is refused."""
    from live_style import COORDINATOR, LiveStyle

    pools = {"p": PoolConfig("p", {"gpu": 2}, grace_s=10.0), "q": PoolConfig("q", {"gpu": 1}, placement=None)}
    world = LiveStyle(pools, [PolicyConfig("p", "team", 1), PolicyConfig("q", "team", 2)])
    operator, token = "alicé@host", bytes(range(16))

    def holder(client: str) -> dict[str, str]:
        node, pid = client.split("/")
        return {
            "cluster": "c1",
            "job": "01000000",
            "kind": "driver",
            "node": node,
            "pid": pid,
            "worker": client,
        }

    def submitted(id: str, client: str, gpu: int = 1) -> None:
        world.submit(id, "team", gpu, client=client, lease_s=60.0, token=token)
        world.turn(COORDINATOR, lambda core: holders.seen(core, client, holder(client)))
        world.run()

    hashed = {"key_sha256": access.key_hash("of the team, which is long enough")}
    first = [("requester", "team", hashed), ("limits", {"live_requests": 50}), ("lease", {"default_s": 90.0})]
    world.ask("change", [*first, ("prewarm", {"linger_s": 0.0})], "keys-1", operator)
    submitted("held", "host-1/1")
    submitted("second", "host-2/2")
    submitted("waits", "host-1/1", 2)
    world.now += 1.5
    # the same submission by another process; that one is gone a little later
    submitted("held", "host-3/3")
    world.ask("denied", "held", "release", "eve@host", access.WRONG_TOKEN)
    world.now += 2.25
    for _ in range(3):
        world.ask("denied", "held", "release", "eve@host", access.WRONG_TOKEN)
    gone = "host-3/3"
    world.turn(COORDINATOR, lambda core: holders.gone(core, gone, holder(gone), "its worker is gone"))
    world.run()
    world.ask("commanded", "upgrade", operator, "", "to version 2")
    world.turn(COORDINATOR, lambda core: core.cancel(core.find("waits"), operator))
    world.turn(COORDINATOR, lambda core: core.release(core.find("second"), operator))
    world.run()
    world.now += access.DENIED_EVERY_S
    world.ask("forget")
    world.ask("change", [("operators", hashed), ("unrequester", "team"), ("limits", {})], "keys-2", operator)
    world.submit("unheld", "team", 1)
    world.run()
    return logs_of(world)


def a_day_with_an_emptied_pool() -> dict[str, Rows]:
    """A pool that is cordoned, drained, emptied and taken away."""
    from live_style import COORDINATOR, LiveStyle

    pools = {
        "p": PoolConfig("p", {"gpu": 3}, grace_s=10.0, placement={"strategy": "PACK"}),
        "q": PoolConfig("q", {"gpu": 1}),
    }
    world = LiveStyle(
        pools,
        [PolicyConfig("p", "team", 2, {"gpu": 1}), PolicyConfig("q", "team", 1), PolicyConfig("p", "b")],
    )

    def close(state: str) -> None:
        world.ask("change", [("pool", pools["p"]._replace(state=state), "p#1")], state, "alicé@host")
        world.run()

    world.ask("submit", "fixed", "team", {"gpu": 1}, preemptible=False)
    world.ask("submit", "again", "team", {"gpu": 1}, retries=1)
    world.run()
    close("cordoned")
    world.submit("waits", "b", 1)
    world.run()
    close("open")
    world.submit("late", "b", 1)
    world.run()
    close("draining")
    world.turn(COORDINATOR, lambda core: eviction.evict(core, "p", "alicé@host"))
    world.run()
    world.about("stopped", "again")
    world.run()
    world.advance(40.0)
    world.ask("change", [("unpool", "p")], "gone", "alicé@host")
    world.run()
    return logs_of(world)


def a_day_with_announcements() -> dict[str, Rows]:
    """Capacity that is announced, used up, taken back, over by itself, and gone with its pool."""
    from live_style import COORDINATOR, LiveStyle

    pools = {
        "p": PoolConfig("p", {"gpu": 8}, placement={"node": {"gpu": 4}}),
        "q": PoolConfig("q", {"gpu": 2}, placement={}),
    }
    world = LiveStyle(pools, [PolicyConfig("p", "équipe 7")])

    def announce(by: str, *wanted: announcements.Asked) -> None:
        world.turn(COORDINATOR, lambda core: announcements.announce(core, wanted, by))
        world.run()

    asked = announcements.Asked
    announce("alicé@host", asked("one", "p", (("gpu", 4),), 30.0, ""))
    announce("bob@host", asked("two", "p", (("gpu", 2), ("mcpu", 500)), 900.0, "équipe 7"),
             asked("three", "q", (("gpu", 2),), 60.0, ""))  # fmt: skip
    world.submit("uses", "équipe 7", 3)
    world.run()
    world.advance(31.0)
    world.ask("change", [("unpool", "q")], "gone", "alicé@host")
    announce("", asked("four", "p", (("memory_mb", 1000),), 5.5, ""))
    world.turn(
        COORDINATOR,
        lambda core: announcements.take_back(core, ["two", "one"], "alicé@host", lambda each: None),
    )
    world.run()
    return logs_of(world)


def logs_of_today() -> dict[str, Rows]:
    """File name to rows."""
    from fault_processes import COORDINATOR
    from fault_simulation import play

    made = {f"rich-{who}": rows for who, rows in a_rich_day().items()}
    made |= {f"operators-{who}": rows for who, rows in a_day_with_operators().items()}
    made |= {f"emptied-{who}": rows for who, rows in a_day_with_an_emptied_pool().items()}
    made |= {f"announced-{who}": rows for who, rows in a_day_with_announcements().items()}
    for seed in SEEDS:
        for who, disk in play(seed).disks.items():
            name = who if who == COORDINATOR else "pool-" + who
            made[f"day{seed}-{name}"] = [(at, body) for at, _, body in disk.rows]
    return made


def write(version: str) -> None:
    """The directory of this version, once."""
    into = HISTORIES / version
    into.mkdir(parents=True)
    states: dict[str, Any] = {}
    for name, rows in sorted(logs_of_today().items()):
        path = into / f"{name}.log"
        path.write_text("".join(f"{at!r} {body.hex()}\n" for at, body in rows))
        known = parts(replay(path))
        states[path.name] = {"hashes": hashes(path, known), "parts": known}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(kept)}" for name, kept in states.items())
    (into / STATES).write_text("{\n" + lines + "\n}\n")


def today() -> dict[str, list[Any]]:
    """Per log: the hashes to compare with those that are stored, and the digest of all of its state at the end."""
    found: dict[str, list[Any]] = {}
    for stored in sorted(HISTORIES.glob(f"*/{STATES}")):
        for name, kept in json.loads(stored.read_text()).items():
            path = stored.parent / name
            found[f"{stored.parent.name}/{name}"] = [hashes(path, kept["parts"]), replay(path).digest()]
    return found


if __name__ == "__main__":
    if sys.argv[1:]:
        write(sys.argv[1])
    else:
        print(json.dumps(today()))
