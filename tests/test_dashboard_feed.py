"""How the page of `pools dashboard` hears what is new, and how the actors are asked for it (docs/dashboard.md).

Faults it stands for: an update that is lost or sent for nothing, a page that keeps actors busy, a present that waits
for a long log, a pool that does not answer and is shown as if it did.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from test_dashboard import Ask, run
from test_log_usage import kept
from test_metrics import random_world

from ray_pools.core import records as ev
from ray_pools.core import status
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.explain import cause
from ray_pools.core.system import System
from ray_pools.dashboard import feed as feed_module
from ray_pools.dashboard import sources
from ray_pools.dashboard.feed import Feed
from ray_pools.dashboard.history import History
from ray_pools.dashboard.server import make_app
from ray_pools.dashboard.sources import LiveSource, LogSource
from ray_pools.errors import Unreachable
from ray_pools.store import open_store
from ray_pools.store.memory import forget


@pytest.fixture(scope="module")
def world() -> System:
    return random_world(1)


async def messages(client: Ask) -> AsyncIterator[dict[str, Any]]:
    async with client.get("/api/events") as answer:
        assert answer.content_type == "text/event-stream"
        async for line in answer.content:
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))


def test_a_page_gets_all_at_first_and_then_what_changed(world: System) -> None:
    store = kept(world)

    async def story(client: Ask) -> None:
        news = messages(client)
        first = await anext(news)
        assert set(first) == {"pool:p", "pool:q", "top", "logs", "at"}
        assert (first["top"]["pools"], first["top"]["live"]) == (["p", "q"], False)
        writer = open_store(store, "pool:q")
        writer.open()
        seq = writer.head()[1]
        writer.append(
            [(500.0, ev.pack(ev.Queued("new", 1, True, "b", [["gpu", 9]], True, 999, 500.0, 0.0, {})))], seq
        )
        second = await anext(news)
        assert set(second) == {"pool:q", "logs", "at"}, "pool p is as it was"
        assert "new" in {item["id"] for item in second["pool:q"]["queue"]}
        assert second["logs"]["rows"]["q"] == seq + 1
        other = await anext(messages(client))
        assert set(other) == set(first)
        assert other["pool:q"] == second["pool:q"]

    run(store, story)


def test_nobody_is_asked_while_nobody_looks(world: System) -> None:
    """Before the first page is open, and after the last one is closed."""
    store = kept(world)
    looks: list[int] = []

    class Counting(LogSource):
        def look(self, history: History | None) -> dict[str, Any]:
            looks.append(1)
            return super().look(history)

    async def main() -> None:
        feed = Feed(Counting(), lambda: History(store), every_s=0.001)
        async with TestClient(TestServer(make_app(feed))) as client:
            for _ in range(20):
                await client.get("/")
            assert looks == []
            reader = feed.read(60.0)
            assert await anext(reader)
            assert looks
            await reader.aclose()
            before = len(looks)
            for _ in range(20):
                await client.get("/")
            assert len(looks) <= before + 1, "one was perhaps on its way"

    asyncio.run(main())
    forget(store)


def test_one_page_too_many_is_told_so(monkeypatch: pytest.MonkeyPatch, world: System) -> None:
    monkeypatch.setattr(feed_module, "READERS_MAX", 1)
    store = kept(world)

    async def main() -> None:
        feed = Feed(LogSource(), lambda: History(store), every_s=0.01)
        async with TestClient(TestServer(make_app(feed))) as client:
            reader = feed.read(60.0)
            assert await anext(reader)
            answer = await client.get("/api/events")
            assert (answer.status, await answer.json()) == (503, {"error": "too many pages are open"})
            await reader.aclose()
            assert await anext(messages(client)), "there is room again"

    asyncio.run(main())
    forget(store)


def test_of_a_long_queue_only_what_is_shown_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SHOWN", 3)
    world = System({"p": PoolConfig("p", {"gpu": 5})}, [PolicyConfig("p", "a")])
    for number in range(12):
        world.submit(f"r{number}", "a", {"gpu": 1})
    judged: list[str] = []

    def counted(pool: Any, attempt: Any) -> str | None:
        judged.append(attempt.id)
        return cause(pool, attempt)

    monkeypatch.setattr(status, "cause", counted)
    store = kept(world)
    history = History(store)
    history.read()
    said = LogSource().look(history)["pools"]["p"]
    assert [item["id"] for item in said["queue"]] == judged == ["r5", "r6", "r7"]
    assert [grant["id"] for grant in said["grants"]] == ["r2", "r3", "r4"]
    assert said["waiting"] == 7
    history.close()
    forget(store)


def test_logs_that_cant_be_read_here_leave_the_present() -> None:
    def open_history() -> History:
        raise Unreachable("the logs are elsewhere")

    async def main() -> None:
        async with TestClient(TestServer(make_app(Feed(LiveSource(Actors()), open_history, 0.01)))) as client:  # type: ignore[arg-type]
            first = await anext(messages(client))
            assert first["logs"] == {"rows": {}, "trouble": "the logs are elsewhere"}
            assert first["pool:a"]["held"] == {"gpu": 1}
            answer = await client.get("/api/at", params={"moment": "@5"})
            assert (answer.status, await answer.json()) == (503, {"error": "the logs are elsewhere"})
            said = await (await client.get("/api/request", params={"id": "x"})).json()
            assert (said["view"]["id"], said["trouble"]) == ("x", "the logs are elsewhere")

    asyncio.run(main())


def test_the_present_does_not_wait_for_a_long_log(monkeypatch: pytest.MonkeyPatch, world: System) -> None:
    store, go_on = kept(world), threading.Event()

    class Slow(History):
        def read(self) -> None:
            assert go_on.wait(30.0)
            super().read()

    async def main() -> None:
        monkeypatch.setattr(feed_module, "_LOGS_WAIT_S", 0.01)
        feed = Feed(LiveSource(Actors()), lambda: Slow(store), 0.01)  # type: ignore[arg-type]
        async with TestClient(TestServer(make_app(feed))) as client:
            news = messages(client)
            first = await anext(news)
            assert (first["logs"]["trouble"], first["pool:a"]["held"]) == (
                "the logs are being read",
                {"gpu": 1},
            )
            go_on.set()
            while "logs" not in (said := await anext(news)):
                pass
            assert (said["logs"]["trouble"], sorted(said["logs"]["rows"])) == ("", ["p", "q"])

    asyncio.run(main())
    forget(store)


# --- live actors


class Actors:
    """What a client of two pools says."""

    namespace = "ns"

    def __init__(self) -> None:
        self.seqs = {"coordinator": 1, "a": 1, "b": 1}
        self.away: set[str] = set()
        self.asked: list[tuple[str, str]] = []

    def coordinator(self, op: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(("coordinator", op["op"]))
        if "coordinator" in self.away:
            raise Unreachable("nobody is there")
        return {"seq": self.seqs["coordinator"], "now": 7.0, "pools": ["a", "b"]}

    def ask_pools(self, pools: list[str], op: dict[str, Any]) -> dict[str, dict[str, Any]]:
        self.asked += [(pool, op["op"]) for pool in pools]
        return {
            pool: {"unreachable": "gone"}
            if pool in self.away
            else {"seq": self.seqs[pool], "held": {"gpu": 1}}
            for pool in pools
        }

    def get(self, id: str) -> dict[str, Any]:
        return {"id": id}

    def explain(self, id: str) -> dict[str, Any]:
        return {}

    def statuses(self) -> list[str]:
        found = [who for who, op in self.asked if op == "status"]
        self.asked.clear()
        return found


def test_actors_are_asked_for_all_only_when_they_have_news(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(sources.time, "monotonic", lambda: now[0])
    actors = Actors()
    source = LiveSource(actors)  # type: ignore[arg-type]
    source.look(None)
    assert actors.statuses() == ["coordinator", "a", "b"]
    now[0] += 1.0
    source.look(None)
    assert actors.statuses() == []
    actors.seqs["b"] = 2
    source.look(None)
    assert actors.statuses() == ["b"]
    now[0] += 10.0
    source.look(None)
    assert actors.statuses() == ["coordinator", "a", "b"], "graces run down without an event"


def test_an_actor_that_answers_slowly_is_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(sources.time, "monotonic", lambda: now[0])
    asked = sources._Asked()
    assert asked.is_due(1, now[0])
    asked.keep({"seq": 1}, 100.0, 101.0)  # it took a second
    assert not asked.is_due(2, 110.0)
    assert asked.is_due(2, 101.0 + 1.0 / sources.BUSY_SHARE)


def test_what_does_not_answer_is_shown_as_it_was_with_a_word() -> None:
    actors = Actors()
    source = LiveSource(actors)  # type: ignore[arg-type]
    source.look(None)
    actors.away = {"b"}
    said = source.look(None)
    assert said["pools"]["b"] == {"seq": 1, "held": {"gpu": 1}, "unreachable": "gone"}
    assert "unreachable" not in said["pools"]["a"]
    actors.away = set()
    assert "unreachable" not in source.look(None)["pools"]["b"]
    actors.away = {"coordinator"}
    said = source.look(None)
    assert (said["trouble"], sorted(said["pools"])) == ("nobody is there", ["a", "b"])
