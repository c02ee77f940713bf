"""The shells of the actors (actors/shell.py) on one event loop, without Ray: what they add to the cores.

Faults it stands for: terms that run from the log's last event instead of from now, callers that are told what is not
in the log or wait for ever, links that hang after an append that failed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

import pytest

from ray_pools import wire
from ray_pools.actors import shell as shell_module
from ray_pools.actors.clock import ManualClock
from ray_pools.actors.coordinator import CoordinatorShell
from ray_pools.actors.peer import PeerCaller, exchange_op
from ray_pools.actors.pool import PoolShell
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.store import AppendFailed, open_store
from ray_pools.store.memory import forget, memory_log

_addresses = itertools.count()


class Shells:
    """The actors' own shells on one event loop: calls between them are calls of `call`, the clock is a test's."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.address = f"memory:shells-{next(_addresses)}"
        self.clock = ManualClock(1000.0)
        self.actors: dict[str, Any] = {}

        async def exchange(caller: PeerCaller, message: Any) -> Any:
            request = wire.encode_request([exchange_op(caller.me, message)])
            response = await self.actors[caller.actor_name].call(request)
            (result,) = wire.decode_response(response, 1, caller.actor_name)
            return type(message)(*wire.value_of(result))

        monkeypatch.setattr(PeerCaller, "_exchange", exchange)
        monkeypatch.setattr(shell_module, "make_clock", lambda kind, last_logged: self.clock)

    @property
    def coordinator(self) -> CoordinatorShell:
        shell: CoordinatorShell = self.actors[wire.coordinator_actor_name()]
        return shell

    @property
    def pool(self) -> PoolShell:
        shell: PoolShell = self.actors[wire.pool_actor_name("p")]
        return shell

    def start(self) -> None:
        """Both actors, in the place of those before them; what these still do, they do for nobody."""
        self.stop()
        options = {"clock": "manual", "prewarm": False, "resend_s": 0.01, **self.options}
        self.actors = {
            wire.coordinator_actor_name(): CoordinatorShell(self.address, "ns", options),
            wire.pool_actor_name("p"): PoolShell(self.address, "ns", "p", options),
        }

    def stop(self) -> None:
        """The processes are gone."""
        for shell in self.actors.values():
            for peer in getattr(shell, "_peers", {}).values():
                peer.close()
        if self.actors:
            self.pool.coordinator.close()
            self.pool.placer.close()

    async def ask(self, op: str, **fields: Any) -> Any:
        """One operation at the coordinator."""
        (result,) = await self.coordinator.command([{"op": op, **fields}])
        if isinstance(result, Exception):
            raise result
        return result

    async def until(self, states: dict[str, str]) -> None:
        """Waits until the requests are in these states, and nobody has news."""

        async def reached() -> None:
            while states != {id: r.shown for id, r in self.coordinator.state.requests.items()} or any(
                shell.has_news() for shell in self.actors.values()
            ):
                await asyncio.sleep(0.002)

        await asyncio.wait_for(reached(), 30.0)

    async def chat(self) -> None:
        """Each side hears how far the other is, which neither logs."""
        for _ in range(2):
            message = list(self.pool.core.outgoing())
            await self.coordinator.command([{"op": "exchange", "pool": "p", "message": message}])
            answer = list(self.coordinator.core.outgoing("p"))
            await self.pool.command([{"op": "exchange", "message": answer, "answer": True}])

    async def submit(self, id: str, requester: str, gpu: int, **fields: Any) -> Any:
        """A request for GPUs enters."""
        amounts = {"gpu": gpu, "step_run": 1}
        return await self.ask("submit", id=id, requester=requester, amounts=amounts, **fields)


Play = Callable[[Callable[[Shells], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Runs a coroutine function with the shells of a coordinator and of pool p, where `high` stands above `low`."""

    def run(story: Callable[[Shells], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            shells = Shells(monkeypatch)
            shells.start()
            policies = [["policy", PolicyConfig("p", *each).to_wire()] for each in (("low",), ("high", 1))]
            await shells.ask(
                "change", changes=[["pool", PoolConfig("p", {"gpu": 2}).to_wire(), "p#1"], *policies]
            )
            await story(shells)
            shells.stop()
            forget(shells.address)

        asyncio.run(main())

    return run


def test_the_shells_give_full_terms_from_the_restart_on(play: Play) -> None:
    """Fault: the core is made before its shell has a clock, and terms run from the last event in the log."""

    async def story(shells: Shells) -> None:
        await shells.submit("l", "low", 2)
        await shells.until({"l": "allocated"})
        await shells.submit("h", "high", 2, lease_s=50.0)
        await shells.until({"l": "preempting", "h": "queued"})
        shells.clock.set(4600.0)
        shells.start()
        assert shells.coordinator.next_event_at() == 4650.0
        assert shells.pool.next_event_at() == 4630.0
        await shells.until({"l": "preempting", "h": "queued"})
        shells.clock.set(4630.0)
        shells.pool.schedule_turn()
        await shells.until({"l": "preempted", "h": "allocated"})

    play(story)


def full(shells: Shells, name: str) -> None:
    log = memory_log(shells.address, name)
    assert log is not None
    log.next_fault = "full"


def test_a_shell_whose_append_fails_tells_its_callers_and_goes_on(play: Play) -> None:
    """Fault: a caller waits for ever, or hears of what is not in the log; links to the others hang from then on."""

    async def story(shells: Shells) -> None:
        digest = shells.coordinator.state.digest()
        full(shells, "coordinator")
        with pytest.raises(AppendFailed):
            await shells.submit("x", "low", 1)
        assert shells.coordinator.state.digest() == digest
        ended: dict[str, str] = {}
        for number in range(5):
            id = f"r{number}"
            await shells.chat()
            full(shells, "coordinator")
            with pytest.raises(AppendFailed):
                await shells.submit(id, "low", 1)
            if number % 2:
                full(shells, "pool:p")  # it can't write that the request queues: it is told again
            await shells.submit(id, "low", 1)
            await shells.until({**ended, id: "allocated"})
            full(shells, "coordinator")
            with pytest.raises(AppendFailed):
                await shells.ask("release", id=id)
            await shells.ask("release", id=id)
            ended[id] = "released"
            await shells.until(ended)

    play(story)


def test_whoever_waits_for_the_end_is_answered_although_a_turn_in_between_fails(play: Play) -> None:
    """Fault: the turn that brings the end is undone, and with it whom to answer."""

    async def story(shells: Shells) -> None:
        await shells.submit("x", "low", 1)
        await shells.until({"x": "allocated"})
        released = asyncio.ensure_future(shells.ask("release", id="x"))
        while not shells.coordinator.state.requests["x"].asked:
            await asyncio.sleep(0)
        full(shells, "coordinator")
        view = await asyncio.wait_for(released, 30.0)
        assert view["state"] == "released"
        log = memory_log(shells.address, "coordinator")
        assert log is not None
        assert log.next_fault == "", "the fault was met"

    play(story)


def test_a_replaced_coordinator_answers_nobody(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zombie would say `unknown_id` of a request that its successor has acknowledged; `ping` promises nothing."""
    ended: list[str] = []
    monkeypatch.setattr(CoordinatorShell, "_die", lambda self, why: ended.append(why))

    async def story(shells: Shells) -> None:
        successor = open_store(shells.address, "coordinator")
        successor.open()
        assert (await shells.ask("ping"))["name"] == "coordinator"
        ended.clear()  # what the pool said meanwhile found it out, too
        await shells.ask("get", ids=["a"])
        assert "a later one has opened epoch" in ended[0]

    play(story)


def test_a_durable_turn_that_can_not_be_answered_ends_the_process(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its callers would wait for ever; the successor answers them when they ask again."""
    ended: list[str] = []
    monkeypatch.setattr(CoordinatorShell, "_die", lambda self, why: ended.append(why))

    async def story(shells: Shells) -> None:
        def broken(step: Any) -> None:
            raise ZeroDivisionError

        shells.coordinator.after_turn = broken  # type: ignore[method-assign]
        await shells.submit("a", "low", 1)
        assert ended == ["what is durable is answered by its successor"]
        assert "a" in shells.coordinator.state.requests

    play(story)


# --- the long poll


def test_a_request_of_another_client_is_told_to_who_names_it(play: Play) -> None:
    async def story(shells: Shells) -> None:
        await shells.submit("mine", "low", 1, client="me", token=b"secret")
        seq, changes = wire.decode_changes(await shells.coordinator.wait(wire.encode_wait("other", 0, 0)))
        assert changes == []
        poll = wire.encode_wait("other", 0, 30, ["mine", "unknown"])
        seq, changes = wire.decode_changes(await shells.coordinator.wait(poll))
        assert [view["id"] for view in changes] == ["mine"]
        await shells.until({"mine": "allocated"})
        seq = shells.coordinator.state.seq
        waiting = asyncio.create_task(shells.coordinator.wait(wire.encode_wait("other", seq, 30, ["mine"])))
        await asyncio.sleep(0)
        await shells.ask("release", id="mine", token=b"secret")
        _, changes = wire.decode_changes(await waiting)
        assert [view["id"] for view in changes] == ["mine"]
        assert shells.coordinator._waiters == {}

    play(story)
