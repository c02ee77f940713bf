"""Every public command may be delivered one to five times, in any interleaving, across restarts (docs/protocol.md).

Faults it stands for: a command that is carried out again when its caller only did not hear the answer; a repetition
that comes late and hits what came after (the next attempt, another configuration); an id that stands for two things.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
from test_shells import Shells

from ray_pools import wire
from ray_pools.core import records as ev
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.coordinator_state import CHANGE_IDS_KEPT, CoordinatorState
from ray_pools.errors import Refused
from ray_pools.store import open_reader
from ray_pools.store.memory import forget

Op = dict[str, Any]

SEEDS = 12


def submit(id: str, requester: str, gpu: int, **fields: Any) -> Op:
    amounts = {"gpu": gpu, "step_run": 1}
    token = id.encode()
    return {"op": "submit", "id": id, "requester": requester, "amounts": amounts, "token": token, **fields}


def own(op: str, id: str, **fields: Any) -> Op:
    return {"op": op, "id": id, "token": id.encode(), **fields}


def change(id: str, *changes: list[Any]) -> Op:
    return {"op": "change", "id": id, "changes": list(changes)}


def policy(requester: str, priority: int = 0, **fields: Any) -> list[Any]:
    return ["policy", PolicyConfig("p", requester, priority, **fields).to_wire()]


def pool(gpu: int) -> list[Any]:
    return ["pool", PoolConfig("p", {"gpu": gpu}, grace_s=1000.0).to_wire(), "p#1"]


STORY: list[Op] = [
    change("c1", pool(2), policy("low"), policy("high", 1), policy("gone")),
    submit("a", "low", 2, retries=2),
    submit("b", "high", 2),  # a must stop
    own("stopped", "a", k=1),
    change("c2", pool(3)),
    own("renew", "b"),
    submit("c", "low", 64),  # rejected
    own("release", "b"),  # a runs again, in attempt 2
    submit("d", "high", 3),  # and must stop again
    change("c3", ["unpolicy", "gone", "p"]),
    own("stopped", "a", k=2),
    own("cancel", "a"),
    submit("e", "low", 1),
    own("cancel", "e"),
    own("release", "d"),
    submit("f", "low", 1),
    change("c4", pool(4), policy("low", 0, limit={"gpu": 1})),
]


class Deliveries:
    """A coordinator and a pool in shells, to which commands are delivered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shells = Shells(monkeypatch)
        self.answers: dict[int, list[Any]] = {}

    async def deliver(self, number: int) -> None:
        """Once, from the bytes on; what it answers is kept."""
        op = STORY[number]
        if op["op"] == "renew":
            op = {"op": "renew", "items": [[op["id"], op["token"]]]}
        response = await self.shells.coordinator.call(wire.encode_request([op]))
        (result,) = wire.decode_response(response, 1)
        self.answers.setdefault(number, []).append(wire.value_of(result))

    async def quiet(self) -> None:
        """Everybody knows everything."""

        async def reached() -> None:
            still = 0
            while still < 3:
                still = 0 if any(shell.has_news() for shell in self.shells.actors.values()) else still + 1
                await asyncio.sleep(0.001)

        await asyncio.wait_for(reached(), 30.0)

    def events(self) -> dict[str, list[Any]]:
        """Both logs without what is only about the links."""
        found: dict[str, list[Any]] = {}
        for log in ("coordinator", "pool:p"):
            reader = open_reader(self.shells.address, log)
            every = [ev.unpack(row.body) for row in reader.read()]
            found[log] = [event for event in every if not isinstance(event, ev.Peer)]
            reader.close()
        return found


def play(monkeypatch: pytest.MonkeyPatch, seed: int | None) -> tuple[dict[str, list[Any]], Deliveries]:
    """The story, each command once; or, with a seed, up to five times, the repetitions later, with restarts."""

    async def main() -> tuple[dict[str, list[Any]], Deliveries]:
        world = Deliveries(monkeypatch)
        world.shells.start()
        chance = random.Random(seed)
        for number in range(len(STORY)):
            ended = asyncio.ensure_future(world.deliver(number))
            if seed is not None and chance.random() < 0.3:  # twice at once
                await asyncio.gather(ended, world.deliver(number))
            await ended
            await world.quiet()
            if seed is None:
                continue
            if chance.random() < 0.3:
                world.shells.start()
                await world.quiet()
            for _ in range(chance.randrange(4)):
                await world.deliver(chance.randrange(number + 1))
            await world.quiet()
        events = world.events()
        world.shells.stop()
        forget(world.shells.address)
        return events, world

    return asyncio.run(main())


@pytest.fixture(scope="module")
def once() -> Iterator[dict[str, list[Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        yield play(patch, None)[0]


def test_the_story_has_everything_in_it(once: dict[str, list[Any]]) -> None:
    kinds = {type(event) for events in once.values() for event in events}
    assert kinds >= {
        ev.Changed,
        ev.Submitted,
        ev.Opened,
        ev.Asked,
        ev.Finished,
        ev.Nominated,
        ev.Granted,
        ev.Ended,
    }
    finals = {event.id: event.state for event in once["coordinator"] if isinstance(event, ev.Finished)}
    assert finals == {"a": "cancelled", "b": "released", "d": "released", "e": "cancelled"}
    asked = [(event.id, event.k, event.what) for event in once["coordinator"] if isinstance(event, ev.Asked)]
    assert asked[:1] == [("a", 1, "stopped")]
    assert ("a", 2, "stopped") in asked


@pytest.mark.parametrize("seed", range(SEEDS))
def test_delivered_up_to_five_times_the_logs_are_those_of_one_delivery(
    once: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    events, world = play(monkeypatch, seed)
    assert events == once
    for number, answers in world.answers.items():
        if STORY[number]["op"] == "change":
            assert len({answer["version"] for answer in answers}) == 1


def test_a_late_repetition_of_stopped_leaves_the_next_attempt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: attempt 2 is preempting when attempt 1's confirmation arrives a second time, and its work is cut off."""

    async def main() -> None:
        world = Deliveries(monkeypatch)
        world.shells.start()
        for number in range(9):  # until a's attempt 2 is told to stop
            await world.deliver(number)
            await world.quiet()
        request = world.shells.coordinator.state.requests["a"]
        assert (request.shown, request.k) == ("preempting", 2)
        before = world.events()
        await world.deliver(3)
        await world.quiet()
        assert world.events() == before
        world.shells.stop()
        forget(world.shells.address)

    asyncio.run(main())


OTHER_BODIES: list[Op] = [
    submit("a", "low", 1, retries=2),
    submit("a", "high", 2, retries=2),
    submit("a", "low", 2, retries=1),
    submit("a", "low", 2, retries=2, lease_s=5.0),
    submit("a", "low", 2, retries=2, preemptible=False),
    change("c1", pool(2), policy("low"), policy("high", 1)),
    change("c1", pool(3), policy("low"), policy("high", 1), policy("gone")),
    change("c1", ["unpool", "p"]),
]


@pytest.mark.parametrize("other", OTHER_BODIES, ids=lambda op: f"{op['op']}-{OTHER_BODIES.index(op)}")
def test_the_same_id_with_another_body_is_an_error(monkeypatch: pytest.MonkeyPatch, other: Op) -> None:
    async def main() -> None:
        world = Deliveries(monkeypatch)
        world.shells.start()
        await world.deliver(0)
        await world.deliver(1)
        await world.quiet()
        world.shells.start()  # the logs know it, not only the process
        await world.quiet()
        before = world.events()
        response = await world.shells.coordinator.call(wire.encode_request([other]))
        (result,) = wire.decode_response(response, 1)
        with pytest.raises(Refused) as refused:
            wire.value_of(result)
        assert refused.value.code == "id_in_use"
        assert other["id"] in str(refused.value)
        await world.quiet()
        assert world.events() == before
        world.shells.stop()
        forget(world.shells.address)

    asyncio.run(main())


def test_ids_of_changes_are_in_the_state_and_the_oldest_go() -> None:
    """Fault: a snapshot forgets them, so that a repetition after a restart changes again; or they are kept for ever."""
    state = CoordinatorState()
    for number in range(CHANGE_IDS_KEPT + 5):
        state.apply(ev.Changed(number + 1, [pool(1 + number % 2)], f"c{number}"), 0.0)
    assert len(state.changes_made) == CHANGE_IDS_KEPT
    again = CoordinatorState.load(state.dump())
    assert again.digest() == state.digest()
    kind, wire_form, uid = pool(1 + 9 % 2)
    assert again.made_before("c9", [(kind, PoolConfig.from_wire(wire_form), uid)]) == 10
    assert again.made_before("c0", [(kind, PoolConfig.from_wire(wire_form), uid)]) is None
