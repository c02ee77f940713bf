"""The server behind the page of `pools dashboard` (docs/dashboard.md); the page itself: test_dashboard_page.py.

Faults it stands for: a foreign name or another site's page that is served, an answer that a browser would run as code,
a past that is another than `pools log --at` says, a grant in the chart that the log does not have, a log that is
kept in memory without end.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner
from log_counts import PoolCounts
from test_log_usage import kept
from test_metrics import random_world

from ray_pools.cli.app import pools as command
from ray_pools.core import quota, victims
from ray_pools.core import records as ev
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.system import System
from ray_pools.dashboard import history as history_module
from ray_pools.dashboard.feed import Feed
from ray_pools.dashboard.history import History
from ray_pools.dashboard.server import is_allowed_host, make_app
from ray_pools.dashboard.sources import LogSource
from ray_pools.log_tale import tale
from ray_pools.log_view import state_at
from ray_pools.store import open_reader, open_store
from ray_pools.store.memory import forget

STATIC = Path(history_module.__file__).parent / "static"
ODD = "<script>alert(1)</script>"
Ask = TestClient[web.Request, web.Application]


def plainly(value: Any) -> Any:
    """As JSON has it."""
    return json.loads(json.dumps(value))


@asynccontextmanager
async def serving(store: str, *allowed: str) -> AsyncIterator[Ask]:
    feed = Feed(LogSource(), lambda: History(store), every_s=0.01)
    async with TestClient(TestServer(make_app(feed, allowed))) as client:
        await feed.look()
        yield client


def run(store: str, story: Callable[[Ask], Coroutine[Any, Any, None]], *allowed: str) -> None:
    async def main() -> None:
        async with serving(store, *allowed) as client:
            await asyncio.wait_for(story(client), 60.0)

    asyncio.run(main())
    forget(store)


@pytest.fixture(scope="module")
def world() -> System:
    return random_world(1)


# --- who may read


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:8270", True),
        ("127.0.0.1", True),
        ("localhost:1", True),
        ("LOCALHOST", True),
        ("pools.localhost:80", True),
        ("[::1]:8270", True),
        ("[::1]", True),
        ("10.1.2.3:8270", True),
        ("head.example", True),
        ("Head.Example.:8270", True),
        ("evil.example:8270", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:80", False),
        ("evil.example#localhost", False),
        ("notlocalhost", False),
        ("1", False),
        ("", False),
    ],
)
def test_only_addresses_and_allowed_names_are_served(host: str, allowed: bool) -> None:
    assert is_allowed_host(host, {"head.example"}) == allowed


def test_a_foreign_name_and_another_sites_page_get_nothing(world: System) -> None:
    """DNS rebinding: a name of somebody else's that leads to this address."""

    async def story(client: Ask) -> None:
        for path in ("/", "/static/main.js", "/api/events", "/api/at?moment=@1"):
            answer = await client.get(path, headers={"Host": "evil.example:8270"})
            text = await answer.text()
            assert (answer.status, "--allow-host" in text, "gpu" in text) == (403, True, False)
        for site in ("cross-site", "same-site"):
            answer = await client.get("/api/at?moment=@1", headers={"Sec-Fetch-Site": site})
            assert answer.status == 403
        assert (await client.get("/", headers={"Sec-Fetch-Site": "cross-site"})).status == 200  # a link to it
        assert (await client.get("/", headers={"Host": "head.example"})).status == 200

    run(kept(world), story, "Head.Example")


def test_it_only_reads_and_each_answer_says_what_a_browser_may_do_with_it(world: System) -> None:
    async def story(client: Ask) -> None:
        for path in ("/", "/static/main.js", "/api/events", "/api/at", "/api/grants", "/api/request"):
            for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
                answer = await client.request(method, path)
                assert answer.status == 405, (method, path)
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        for path in ("/", "/static/style.css", "/nothing", "/api/at"):
            answer = await client.get(path)
            policy = answer.headers["Content-Security-Policy"]
            assert "unsafe" not in policy
            assert {"frame-ancestors 'none'", "require-trusted-types-for 'script'"} <= set(policy.split("; "))
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert "aiohttp" not in answer.headers["Server"]
            assert answer.status == {"/": 200, "/static/style.css": 200, "/api/at": 400}.get(path, 404)

    run(kept(world), story)


@pytest.mark.parametrize("way", ["..", "%2e%2e", "..%2f..", "../dashboard"])
def test_no_way_leads_out_of_the_pages_files(world: System, way: str) -> None:
    """As it is written: a client that knows the way shortens it before it asks."""

    async def story(client: Ask) -> None:
        reader, writer = await asyncio.open_connection(client.host, client.port)
        for file in ("style.css", f"{way}/server.py"):
            writer.write(f"GET /static/{file} HTTP/1.1\r\nHost: {client.host}\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            body = await reader.readexactly(int(re.findall(r"Content-Length: (\d+)", head)[0]))
            assert head.split()[1] == ("200" if file == "style.css" else "404"), head
            assert "Content-Security-Policy" in head
            assert (b"def " in body, b"{" in body) == (False, True)
        writer.close()

    run(kept(world), story)


def test_the_page_is_made_of_its_own_files_and_writes_no_html() -> None:
    """What the policy forbids would only show in a browser."""
    page = (STATIC / "index.html").read_text()
    assert re.findall(r"<script(?![^>]* src=\"/static/)[^>]*>", page) == []
    assert re.findall(r"\son\w+=|\sstyle=|<style|javascript:", page) == []
    for file in STATIC.iterdir():
        text = file.read_text()
        urls = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`]*", text))
        assert urls <= {"http://www.w3.org/2000/svg"}, file
        if file.suffix == ".js":
            for word in (
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "new Function",
            ):
                assert word not in text, file
            for name in re.findall(r"from \"\./([\w.]+)\"", text):
                assert (STATIC / name).is_file()
        if file.suffix == ".css":
            assert "@import" not in text
            assert "url(" not in text


def test_the_page_has_words_for_each_cause_reason_and_end() -> None:
    """A word of the wire that the page does not know stands there as it is."""
    text = (STATIC / "words.js").read_text()
    tables = {
        name: set(re.findall(r"^  (\w+): \"", body, re.MULTILINE))
        for name, body in re.findall(r"^const ([A-Z]+) = \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL)
    }
    causes = {value for name, value in vars(quota).items() if name.isupper() and isinstance(value, str)}
    assert tables["CAUSES"] == causes - {quota.NOMINATED}, "who is nominated has a cause besides"
    assert tables["REASONS"] == {victims.RECLAIM, victims.PRIORITY, victims.OWN, victims.OPERATOR}
    assert tables["ENDS"] == {*ev.ENDS, history_module.LOST} - {"withdrawn"}, "only who waits is withdrawn"


# --- the past


def test_the_past_is_what_the_log_command_says(world: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the fold begins at a state on the way."""
    monkeypatch.setattr(history_module, "CHECKPOINTS_MAX", 4)
    monkeypatch.setattr(history_module.Follower, "spacing", 20)
    store, rng = kept(world), random.Random(5)
    ends = min(world.logs[log][-1][0] for log in ("p", "q"))
    times = sorted({at for log in ("p", "q") for at, _ in world.logs[log] if at <= ends})

    async def story(client: Ask) -> None:
        said = await (await client.get("/api/at", params={"moment": "@-1"})).json()
        assert {pool: list(found) for pool, found in said["pools"].items()} == {
            "p": ["missing"],
            "q": ["missing"],
        }, "before their first rows"
        for at in [*rng.sample(times, 12), times[0], times[3] + 0.01]:
            said = await (await client.get("/api/at", params={"moment": f"@{at!r}"})).json()
            assert said["at"] == at
            for pool in ("p", "q"):
                reader = open_reader(store, f"pool:{pool}")
                assert said["pools"][pool] == plainly(state_at(reader, f"pool:{pool}", at))
                reader.close()

    run(store, story)


def test_who_held_what_when_is_what_the_log_has(world: System) -> None:
    store = kept(world)
    rows = [(at, ev.unpack(body)) for at, body in world.logs["p"]]

    async def story(client: Ask) -> None:
        query = {"pool": "p", "from": "0", "to": "1e9", "after": "0"}
        said = await (await client.get("/api/grants", params=query)).json()
        found = {(g["id"], g["k"]): g for g in said["grants"]}
        granted = {(e.id, e.k): at for at, e in rows if isinstance(e, ev.Granted)}
        ended = {(e.id, e.k): (at, e.how) for at, e in rows if isinstance(e, ev.Ended)}
        told = {(id, k): (at, e.id) for at, e in rows if isinstance(e, ev.Nominated) for id, k in e.victims}
        assert {key: g["granted_at"] for key, g in found.items()} == granted
        assert {key: (g["ended_at"], g["how"]) for key, g in found.items() if g["how"]} == {
            key: end for key, end in ended.items() if key in granted
        }
        assert {key: (g["told_at"], g["asker"]) for key, g in found.items() if g["told_at"]} == told
        reasons = Counter((g["requester"], g["reason"]) for g in found.values() if g["reason"])
        counted = PoolCounts("p", rows).counts
        assert reasons == {key[2:]: by for key, by in counted.items() if key[0] == "pools_preemptions"}
        # at any moment those that hold by the chart are those that hold by the state
        reader = open_reader(store, "pool:p")
        for at in sorted({at for at, _ in rows})[::9]:
            holds = {g["id"] for g in found.values() if g["granted_at"] <= at < (g["ended_at"] or 1e9)}
            assert holds == {g["id"] for g in state_at(reader, "pool:p", at)["grants"]}
        reader.close()
        half = len(rows) // 2
        later = await (await client.get("/api/grants", params={**query, "after": str(half)})).json()
        assert {(g["id"], g["k"]) for g in later["grants"]} == {
            k for k, g in found.items() if g["seq"] > half
        }
        window = await (await client.get("/api/grants", params={**query, "from": "20", "to": "30"})).json()
        assert {(g["id"], g["k"]) for g in window["grants"]} == {
            key for key, g in found.items() if g["granted_at"] <= 30 and (g["ended_at"] or 1e9) >= 20
        }

    run(store, story)


def test_what_is_kept_of_a_long_log_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "GRANTS_KEPT", 5)
    monkeypatch.setattr(history_module, "CHECKPOINTS_MAX", 3)
    monkeypatch.setattr(history_module.Follower, "spacing", 4)
    world = System({"p": PoolConfig("p", {"gpu": 4})}, [PolicyConfig("p", "a")])
    for number in range(40):
        world.submit(f"r{number}", "a", {"gpu": 1})
        world.advance(1.0)
        world.release(f"r{number}")
    store = kept(world)
    history = History(store)
    history.read()
    follower = history.followers["p"]
    assert (len(follower.over), len(follower.checkpoints) <= 3, follower.spacing > 4) == (5, True, True)
    said = history.grants("p", 0.0, 1e9, 0, 3)
    assert ([g["id"] for g in said["grants"]], said["cut"]) == (["r37", "r38", "r39"], True)
    history.close()
    forget(store)


def test_a_request_has_its_story_and_an_unknown_one_is_not_found() -> None:
    world = System({"p": PoolConfig("p", {"gpu": 1})}, [PolicyConfig("p", ODD)])
    world.submit("one", ODD, {"gpu": 1})
    world.submit("two", ODD, {"gpu": 1})
    store = kept(world)

    async def story(client: Ask) -> None:
        answer = await client.get("/api/request", params={"id": "two"})
        assert answer.content_type == "application/json"
        said = await answer.json()
        assert said["story"] == [plainly(line.plain()) for line in tale(store, "two")]
        assert ODD in said["story"][0]["text"], "the name goes as it is; the page shows it as text"
        for query, status in (({"id": "nobody"}, 404), ({"id": ""}, 400), ({}, 400), ({"id": "a\nb"}, 400)):
            answer = await client.get("/api/request", params=query)
            assert (answer.status, list(await answer.json())) == (status, ["error"])

    run(store, story)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/api/at?moment=12", "moment"),
        ("/api/at?moment=yesterday", "moment"),
        ("/api/at?moment=@nan", "moment"),
        ("/api/grants?pool=p&from=a&to=1&after=0", "from"),
        ("/api/grants?pool=p&from=inf&to=1&after=0", "from"),
        ("/api/grants?pool=&from=0&to=1&after=0", "pool"),
        ("/api/grants?from=0&to=1&after=0", "pool"),
    ],
)
def test_a_bad_question_is_one_line_that_names_the_field(world: System, path: str, field: str) -> None:
    async def story(client: Ask) -> None:
        answer = await client.get(path)
        said = await answer.json()
        assert answer.status == 400
        assert re.match(rf"{field}\b", said["error"]), said
        assert "\n" not in said["error"]

    run(kept(world), story)


# --- the command


def test_a_port_that_is_taken_and_logs_that_are_not_there_are_one_line(tmp_path: Path, world: System) -> None:
    store = open_store(str(tmp_path), "coordinator")
    store.open()
    store.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = CliRunner().invoke(command, ["dashboard", "--store", str(tmp_path), "--port", str(port)])
    assert done.exit_code == 2
    assert f"127.0.0.1:{port}" in done.output
    done = CliRunner().invoke(command, ["dashboard", "--store", str(tmp_path / "none")])
    assert (done.exit_code, done.output.count("\n")) == (2, 1)
    assert "where logs are: there are none" in done.output
