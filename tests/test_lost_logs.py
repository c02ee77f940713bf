"""A log that lost something is found by what the other side remembers, also where nothing happens (docs/protocol.md,
"A pool whose log is lost"; docs/log.md, "What the other side remembers").

Faults it stands for: a log that is put back from an old copy, cut or removed while its actor is down, and goes on as if
nothing were missing; a pool that lost its log and is taken for a zombie; a promise that rests on a log that is not
whole; an operator's word that is heard twice; a heartbeat that fills the logs.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

import pytest
from test_shells import Shells

from ray_pools import wire
from ray_pools.actors import shell as shell_module
from ray_pools.actors.coordinator import CoordinatorShell
from ray_pools.actors.pool import PoolShell
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.link import SHORTER_LOG, ShorterLog
from ray_pools.errors import Refused
from ray_pools.store.memory import MemoryLog, _logs, forget

BEAT_S = 0.02


class Beating(Shells):
    """Shells that exchange often, of one pool, whose requests never meet a second one."""

    options: ClassVar[dict[str, Any]] = {"beat_s": BEAT_S}

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.ended: list[str] = []

    def dies(self, shell: Any, why: str) -> None:
        """A process ends; those that were replaced are nobody's any more."""
        if shell in self.actors.values():
            self.ended.append(why)

    async def begin(self) -> None:
        self.start()
        await self.ask(
            "change",
            changes=[
                ["pool", PoolConfig("p", {"gpu": 2}).to_wire(), "p#1"],
                ["policy", PolicyConfig("p", "a").to_wire()],
            ],
        )
        await self.submit("first", "a", 1)
        await self.until({"first": "allocated"})

    def log(self, name: str) -> MemoryLog:
        return _logs[self.address, name]

    def copy_of(self, name: str) -> MemoryLog:
        log = self.log(name)
        made = MemoryLog(log.batches[0].chain if log.batches else b"")
        vars(made).update({k: copy.copy(v) for k, v in vars(log).items() if k != "lock"})
        return made

    def put_back(self, name: str, old: MemoryLog | None) -> None:
        """While the actor is down: an old copy, or nothing at all."""
        key = self.address, name
        if old is None:
            del _logs[key]
        else:
            _logs[key] = old

    async def trouble(self) -> str:
        """What status says as soon as it says something."""

        async def said() -> str:
            while not (trouble := (await self.ask("status"))["trouble"]):
                await asyncio.sleep(BEAT_S / 4)
            return str(trouble["p"])

        return await asyncio.wait_for(said(), 30.0)

    def restart(self, *who: str) -> None:
        """These processes are replaced."""
        options = {"clock": "manual", "prewarm": False, "resend_s": 0.01, **self.options}
        if "p" in who:
            self.pool.coordinator.close()
            self.pool.placer.close()
        if "coordinator" in who:
            for peer in self.coordinator._peers.values():
                peer.close()
            name = wire.coordinator_actor_name()
            self.actors[name] = CoordinatorShell(self.address, "ns", options)
        if "p" in who:
            self.actors[wire.pool_actor_name("p")] = PoolShell(self.address, "ns", "p", options)

    async def begins_anew(self) -> None:
        """The pool's process ends when it hears that it was declared lost; with an empty log there is no need to."""
        while not self.pool.state.uid.startswith("p#1+"):
            await asyncio.sleep(BEAT_S / 4)
        if self.ended:
            self.ended.clear()
            self.restart("p")

    async def beats_of_pool(self) -> None:
        """The pool is refused a few times."""
        heard = []
        outgoing = self.pool.core.outgoing
        self.pool.core.outgoing = lambda: heard.append(1) or outgoing()  # type: ignore[method-assign, func-returns-value]
        while len(heard) < 3:
            await asyncio.sleep(BEAT_S / 4)

    async def beats(self, count: int) -> None:
        """So many exchanges come and go."""
        for _ in range(count):
            before = self.coordinator._peers["p"].spoke_at
            while self.coordinator._peers["p"].spoke_at == before:
                await asyncio.sleep(BEAT_S / 4)


Story = Callable[[Beating], Coroutine[Any, Any, None]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Story], None]:
    def run(story: Story) -> None:
        async def main() -> None:
            shells = Beating(monkeypatch)
            monkeypatch.setattr(shell_module.Shell, "_die", lambda *said: shells.dies(*said))  # noqa: PLW0108 - a method would not get the shell
            try:
                await shells.begin()
                await asyncio.wait_for(story(shells), 60.0)
            finally:
                shells.stop()
                forget(shells.address)

        asyncio.run(main())

    return run


def test_a_heartbeat_logs_nothing(play: Callable[[Story], None]) -> None:
    """Fault: two actors that have nothing to say tell each other so, in their logs, for ever."""

    async def story(shells: Beating) -> None:
        await shells.beats(3)
        heads = [shell.store.head() for shell in shells.actors.values()]
        await shells.beats(5)
        assert heads == [shell.store.head() for shell in shells.actors.values()]

    play(story)


@pytest.mark.parametrize("gone", ["cut", "removed"])
@pytest.mark.parametrize("also", ["", "coordinator"])
def test_a_pool_that_lost_its_log_is_found_and_told_from_a_zombie(
    play: Callable[[Story], None], gone: str, also: str
) -> None:
    """Whichever restarts. It grants nothing, the report names both sides and what to do, and an operator's word, said
    twice, brings service back: what was held counts as preempted, what waits goes on.
    """

    async def story(shells: Beating) -> None:
        old = shells.copy_of("pool:p") if gone == "cut" else None
        await shells.submit("second", "a", 1, retries=1)
        await shells.until({"first": "allocated", "second": "allocated"})
        await shells.beats(1)
        shells.put_back("pool:p", old)
        shells.restart(*(["p", also] if also else ["p"]))
        said = await shells.trouble()
        for words in (
            "the log of pool:p lost something",
            "coordinator has seen",
            "pools pool declare-lost p",
        ):
            assert words in said
        await shells.submit("third", "a", 1)
        await shells.beats_of_pool()
        assert not shells.pool.welcome
        assert "third" not in shells.pool.state.attempts
        word = {"pool": "p", "operator": "somebody@somewhere", "id": "c1"}
        made = await shells.ask("declare_lost", **word)
        assert await shells.ask("declare_lost", **word) == made
        with pytest.raises(Refused, match="belongs to other"):
            await shells.ask("change", id="c1", changes=[["unpolicy", "a", "p"]])
        await shells.begins_anew()
        await shells.until({"first": "preempted", "second": "allocated", "third": "allocated"})
        assert (await shells.ask("status"))["trouble"] == {}
        assert shells.pool.state.uid == made["uid"] != "p#1"

    play(story)


@pytest.mark.parametrize("also", ["", "p"])
def test_a_coordinator_that_lost_its_end_promises_nothing(play: Callable[[Story], None], also: str) -> None:
    async def story(shells: Beating) -> None:
        old = shells.copy_of("coordinator")
        await shells.submit("second", "a", 1)
        await shells.until({"first": "allocated", "second": "allocated"})
        await shells.beats(1)
        shells.put_back("coordinator", old)
        shells.restart(*(["coordinator", also] if also else ["coordinator"]))
        with pytest.raises(Refused) as refused:
            await shells.submit("third", "a", 1)
        assert refused.value.code == SHORTER_LOG
        said = await shells.trouble()
        assert "the log of coordinator lost something" in said
        assert "pool:p has seen" in said
        assert "pools restore" in said
        head = shells.coordinator.store.head()
        await asyncio.sleep(3 * BEAT_S)
        assert shells.coordinator.store.head() == head, "it goes on writing on what is not whole"
        # the way without a backup: its log, as it is, is the truth from here on
        await shells.ask("declare_lost", pool="p", operator="somebody", id="c1")
        await shells.begins_anew()
        await shells.submit("third", "a", 2)
        await shells.until({"first": "preempted", "third": "allocated"})

    play(story)


def test_an_empty_coordinator_hears_from_the_pools_that_it_was_not_always_so(
    play: Callable[[Story], None],
) -> None:
    """It knows no pool that it could ask: they ask it."""

    async def story(shells: Beating) -> None:
        shells.put_back("coordinator", None)
        shells.restart("coordinator")
        assert "the log of coordinator lost something" in await shells.trouble()
        with pytest.raises(Refused, match="lost something"):  # not: rejected, for there are no pools
            await shells.submit("second", "a", 1)

    play(story)


def test_a_log_that_is_opened_in_an_earlier_epoch_is_no_zombie(
    play: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that was set back gives a lost log a lower epoch; its own answers show that nobody has replaced it."""

    async def story(shells: Beating) -> None:
        monkeypatch.setattr(shell_module.time, "time", lambda: 1.0)
        shells.put_back("pool:p", None)
        shells.restart("p")
        assert "the log of pool:p lost something" in await shells.trouble()

    play(story)


def test_what_grew_since_it_was_opened_makes_no_log_whole() -> None:
    """Fault: a log that lost three events and gained five counts as longer than before."""
    from test_protocol import pool as pool_of

    from ray_pools.core.coordinator import Coordinator
    from ray_pools.core.coordinator_state import CoordinatorState
    from ray_pools.core.link import Message

    coordinator = Coordinator(CoordinatorState(), 1, 0.0)
    coordinator.change([("pool", pool_of("p"), "p#1")])
    hello = Message("pool:p", "p#1", 5, 10, 0, 0, [], 0, [], 0, 0, 0, 10)
    coordinator.exchange("p", hello)
    with pytest.raises(ShorterLog, match="opened with 7 events"):
        coordinator.exchange("p", hello._replace(epoch=6, opened=7, head=12))
    coordinator.exchange("p", hello._replace(epoch=6, opened=10, head=12))
