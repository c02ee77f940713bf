"""What is said of a request while it waits: `explain()` is one sentence in every state, and the line on a terminal is
only there, is not asked for too often, and is gone at the end."""

from __future__ import annotations

import io
from typing import Any

import pytest
from fake_pools import FakePools

import ray_pools as pools
from ray_pools.client import live_status
from ray_pools.client.explanation import Explanation, duration_text
from ray_pools.client.live_status import LiveStatus
from ray_pools.client.transport import RayTransport, TryAgain

WAITS: dict[str, Any] = {
    "cause": "waiting_capacity", "position": 2, "waiting": 7, "state": "queued", "text": "2 gpu more needed in a",
}  # fmt: skip


@pytest.mark.parametrize(
    ("view", "said", "sentence", "line"),
    [
        ({"state": "queued"}, {}, "waits: its pools have not been asked yet", "queued"),
        (
            {"state": "queued"},
            {"b": {"unreachable": "it restarts"}, "a": WAITS},
            "waits: a: 2 of 7, 2 gpu more needed in a; b: does not answer (it restarts)",
            "queued: a 2 of 7, waiting capacity; b does not answer",
        ),
        (
            {"state": "queued"},
            {"a": {**WAITS, "estimate_s": 300}},
            "waits: a: 2 of 7, 2 gpu more needed in a, about 5 min",
            "queued: a 2 of 7, waiting capacity, about 5 min",
        ),
        ({"state": "queued"}, {"a": {}}, "waits: a: it has not heard of it yet", "queued: a"),
        (
            {"state": "allocated", "pool": "a", "ready": False},
            {"a": {"state": "granted"}},
            "is granted in a, and its nodes are made ready",
            "granted in a, its nodes are made ready",
        ),
        (
            {"state": "allocated", "pool": "a", "ready": True},
            {"a": {"state": "granted", "text": "it is in the share of me"}},
            "holds a slot in a: it is in the share of me",
            None,
        ),
        (
            {"state": "preempting", "pool": "a"},
            {"a": {"state": "preempting", "text": "it has 20 s to stop"}},
            "is called back in a: it has 20 s to stop",
            "gives its slot in a back",
        ),
        ({"state": "preempting", "pool": "a"}, {}, "is called back in a", None),
        ({"state": "rejected"}, {"a": {"cause": "no_policy"}}, "was rejected: a: no_policy", None),
        ({"state": "rejected"}, {}, "was rejected: no pool admits it", None),
        ({"state": "released"}, {}, "was given back", None),
        ({"state": "cancelled"}, {}, "was cancelled", None),
        ({"state": "expired"}, {}, "is over: its lease ran out", None),
        (
            {"state": "preempting", "pool": "a", "for_nobody": "evict"},
            {},
            "is called back in a: an operator emptied its pool",
            None,
        ),
        (
            {"state": "preempted", "for_nobody": "evict"},
            {},
            "was stopped: an operator emptied its pool, and no retries are left",
            None,
        ),
        ({"state": "preempted"}, {}, "was stopped for another request, and no retries are left", None),
    ],
)
def test_an_explanation_is_one_sentence(view: Any, said: Any, sentence: str, line: str | None) -> None:
    found = Explanation({"id": "r1", **view}, said)
    assert str(found) == f"request r1 {sentence}"
    assert found == said
    if line is not None:
        assert found.line() == line


def test_a_time_is_told_in_a_unit_that_fits() -> None:
    assert [duration_text(each) for each in (45.4, 700, 9000)] == ["45 s", "12 min", "2.5 h"]


def test_a_ticket_explains_itself(fake: FakePools, client: pools.Client) -> None:
    ticket = client.submit("vision", gpus=1, id="r1")
    assert str(ticket.explain()) == "request r1 waits: a: waiting_capacity; b: waiting_capacity"
    fake.grant("r1")
    ticket.wait(30)
    assert str(ticket.explain()).startswith("request r1 holds a slot in a")
    fake.preempt("r1")
    assert str(ticket.explain()).startswith("request r1 is called back in a")
    fake.finish("r1", "preempted")
    assert str(ticket.explain()).endswith("no retries are left")


def test_an_actor_that_is_away_is_said_in_calm_words() -> None:
    """Fault: `pools upgrade` fills waiters' terminals with what Ray says of actors that were killed."""
    from ray import exceptions

    transport = RayTransport("ns")

    def said(problem: Exception) -> str:
        found = transport._translated("ray-pools:pool:a", problem)
        assert isinstance(found, TryAgain)
        return str(found)

    assert said(exceptions.ActorDiedError()) == "it restarts"
    assert (
        said(exceptions.ActorUnavailableError("RpcError: code 14\nsocket closed", b"0" * 16)) == "it restarts"
    )
    assert said(exceptions.GetTimeoutError("x")) == "Ray does not reach it just now (GetTimeoutError)"
    died = exceptions.RayActorError(actor_id="0" * 32)
    died.args = (
        "The actor died because of an error raised in its creation task, ray::X()\nNoLog: is not there",
    )
    died._msg = died.error_msg = died.args[0]
    assert said(died) == "it can't start: NoLog: is not there"


# --- the line


class Terminal(io.StringIO):
    """What was written; tells the test of it."""

    def __init__(self, fake: FakePools, is_one: bool = True) -> None:
        super().__init__()
        self.fake, self.is_one = fake, is_one

    def isatty(self) -> bool:
        return self.is_one

    def flush(self) -> None:
        with self.fake.changed:
            self.fake.changed.notify_all()


def test_a_line_is_written_over_and_over_and_goes(fake: FakePools, client: pools.Client) -> None:
    ticket = client.submit("vision", gpus=1, id="r1")
    terminal = Terminal(fake)
    with LiveStatus(ticket, stream=terminal):
        fake.until(lambda: "queued: a waiting capacity; b waiting capacity (0 s)" in terminal.getvalue())
    assert terminal.getvalue().endswith("\r\x1b[2K")
    assert "\n" not in terminal.getvalue()
    assert ticket._listeners == set() or ticket.state == "queued"


@pytest.mark.parametrize(("enabled", "is_terminal"), [(False, True), (True, False)])
def test_nothing_is_asked_where_nobody_reads_it(
    fake: FakePools, client: pools.Client, enabled: bool, is_terminal: bool
) -> None:
    ticket = client.submit("vision", gpus=1, id="r1")
    terminal = Terminal(fake, is_terminal)
    with LiveStatus(ticket, enabled, terminal):
        fake.grant("r1")
        ticket.wait(30)
    assert terminal.getvalue() == ""
    assert fake.ops("explain") == []


def test_it_is_asked_again_on_news_and_not_for_each_drawing(
    fake: FakePools, client: pools.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_status, "_REDRAW_S", 0.001)
    monkeypatch.setattr(live_status, "ASK_EVERY_S", 3600.0)
    monkeypatch.setattr(live_status, "ASK_AT_MOST_EVERY_S", 0.0)
    ticket = client.submit("vision", gpus=1, id="r1")
    terminal = Terminal(fake)
    with LiveStatus(ticket, stream=terminal):
        fake.until(lambda: terminal.getvalue().count("queued: a") > 20)
        assert (
            len(fake.ops("explain")) <= 2 * 2
        )  # two pools, at the start and on the word that it was submitted
        fake.grant("r1", ready=False)
        fake.until(lambda: "granted in a, its nodes are made ready" in terminal.getvalue())


def test_a_coordinator_that_is_away_is_said(fake: FakePools) -> None:
    with fake.client(give_up_s=0.05) as client:
        ticket = client.submit("vision", gpus=1, id="r1")
        fake.down = pools.Unreachable("no pools run in namespace 'fake'")
        terminal = Terminal(fake)
        with LiveStatus(ticket, stream=terminal):
            fake.until(lambda: "no pools run in namespace" in terminal.getvalue())


def test_a_terminal_that_is_gone_harms_nobody(fake: FakePools, client: pools.Client) -> None:
    ticket = client.submit("vision", gpus=1, id="r1")
    terminal = Terminal(fake)
    terminal.close()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    with LiveStatus(ticket, stream=terminal):
        fake.grant("r1")
        ticket.wait(30)


@pytest.mark.parametrize("wait", ["wait", "slot"])
def test_waiting_shows_it_if_wanted(
    fake: FakePools, client: pools.Client, aside: Any, monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    terminal = Terminal(fake)
    monkeypatch.setattr("sys.stderr", terminal)

    def use_slot() -> None:
        with client.slot("vision", gpus=1, id="r1", progress=True):
            pass

    if wait == "slot":
        waiting = aside(use_slot)
        fake.until(lambda: "r1" in fake.views)
    else:
        waiting = aside(client.submit("vision", gpus=1, id="r1").wait, 30, progress=True)
    fake.until(lambda: "queued: a waiting capacity" in terminal.getvalue())
    fake.grant("r1")
    waiting.result(30)
    assert terminal.getvalue().endswith("\r\x1b[2K")
