"""Who may do what, and how much (docs/protocol.md, "Who may do what"; docs/limits.md), on the actors' own shells.

Faults it stands for: a request that another than its holder ends; an operator's word that leaves no trace; a key that
can be read somewhere; a log that whoever is refused can fill; a limit that some submission gets around; a submission of
long ago that runs again.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgpack
import pytest
from test_shells import Play, Shells, play  # noqa: F401 - a fixture

from ray_pools import keys, wire
from ray_pools.core import records as ev
from ray_pools.core.access import DENIED_EVERY_S, DENIED_KINDS_MAX, Denials, key_hash
from ray_pools.core.coordinator import RETENTION_S
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.errors import BadInput, PoolsError, Refused
from ray_pools.limits import CLOCK_SKEW_MAX_S, WAITING_PER_REQUESTER
from ray_pools.log_words import words
from ray_pools.store import open_reader

TOKEN, OTHER = b"the holder's own", b"another client's"
KEY, WRONG = keys.new_key(), keys.new_key()
HASH = {"key_sha256": key_hash(KEY)}


def logged(shells: Shells, *kinds: type[Any]) -> list[Any]:
    """Events of these kinds in the coordinator's log."""
    reader = open_reader(shells.address, "coordinator")
    try:
        return [event for row in reader.read() if isinstance(event := ev.unpack(row.body), kinds)]
    finally:
        reader.close()


async def refused(shells: Shells, code: str, op: str, **fields: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        await shells.ask(op, **fields)
    assert caught.value.code == code, caught.value
    return caught.value


# --- tokens


def test_an_operation_on_a_request_needs_its_token_or_an_operator_and_reading_needs_neither(
    play: Play,  # noqa: F811
) -> None:
    async def story(shells: Shells) -> None:
        await shells.submit("x", "low", 1, token=TOKEN)
        await shells.until({"x": "allocated"})
        for op in ("release", "cancel", "stopped"):
            await refused(shells, "wrong_token", op, id="x", token=OTHER, by="eve@node")
            await refused(shells, "wrong_token", op, id="x")
        again = {"id": "x", "requester": "low", "amounts": {"gpu": 1, "step_run": 1}}
        problem = await refused(shells, "wrong_token", "submit", **again, token=OTHER)
        assert "'x' is taken" in str(problem)  # who types `pools run --id x` twice hears what has it
        assert "is allocated; use a new id" in str(problem)
        answer = await shells.ask("renew", items=[["x", OTHER], ["none", OTHER]], by="eve@node")
        assert answer == {"renewed": 0, "final": [], "unknown": ["none"], "refused": ["x"]}
        (view,) = await shells.ask("get", ids=["x"])
        assert view["state"] == "allocated"
        assert (await shells.ask("list"))["total"] == 1
        assert (await shells.ask("status"))["requests"] == {"allocated": 1}
        assert (await shells.ask("renew", items=[["x", TOKEN]]))["renewed"] == 1
        await shells.ask("release", id="x", token=TOKEN)
        await shells.until({"x": "released"})
        denied = [(event.id, event.what, event.by) for event in logged(shells, ev.Denied)]
        tried = [(op, by) for op in ("release", "cancel", "stopped") for by in ("eve@node", "")]
        assert denied == [("x", *each) for each in [*tried, ("submit", "low"), ("renew", "eve@node")]]
        assert logged(shells, ev.Commanded) == []

    play(story)


def test_an_operator_overrides_and_the_log_the_view_and_the_error_say_who(play: Play) -> None:  # noqa: F811
    async def story(shells: Shells) -> None:
        from ray_pools.client.views import error_of

        await shells.submit("held", "low", 2, token=TOKEN)
        await shells.until({"held": "allocated"})
        await shells.submit("waits", "low", 1, token=TOKEN)
        for _ in range(2):  # again, as after a lost answer
            await shells.ask("cancel", id="waits", operator="alice@host")
            view = await shells.ask("cancel", id="held", operator="alice@host")
        await shells.until({"held": "cancelled", "waits": "cancelled"})
        assert view["by"] == "alice@host"
        assert str(error_of(view)).endswith("cancelled (by operator alice@host)")
        assert logged(shells, ev.Commanded) == [
            ev.Commanded("waits", "cancel", "alice@host", ""),
            ev.Commanded("held", "cancel", "alice@host", ""),
        ]
        await shells.ask("change", changes=[["limits", {}]], operator="bob@host")
        assert logged(shells, ev.Changed)[-1].by == "bob@host"
        assert "by operator bob@host" in words(logged(shells, ev.Changed)[-1])
        with pytest.raises(BadInput, match="operator"):
            await shells.ask("cancel", id="held", operator="a\nb")

    play(story)


def test_who_is_refused_can_not_fill_the_log() -> None:
    """Faults: an event for each refusal; a caller who calls itself otherwise each time; counts that are lost."""
    denials, now = Denials(), 1000.0
    assert denials.note(now, "x", "release", "eve", "wrong_token") == (
        "x",
        "release",
        "eve",
        "wrong_token",
        1,
    )
    for second in range(50):
        assert denials.note(now + second, "x", "release", "eve", "wrong_token") is None
    assert denials.note(now, "y", "release", "eve", "wrong_token") is not None, (
        "another request is another kind"
    )
    assert denials.due(now + DENIED_EVERY_S) == [("x", "release", "eve", "wrong_token", 50)]
    assert denials.due(now + 2 * DENIED_EVERY_S) == []
    events = [denials.note(now + 200, f"id{i}", "release", f"eve{i}", "wrong_token") for i in range(10_000)]
    assert sum(event is not None for event in events) <= DENIED_KINDS_MAX + 1
    later = denials.due(now + 200 + DENIED_EVERY_S)
    assert sum(event[-1] for event in later) == 10_000 - sum(event is not None for event in events)
    assert denials.due(now + 200 + 2 * DENIED_EVERY_S) == []
    assert not denials._kinds


def test_refusals_that_were_only_counted_are_logged_a_minute_later(play: Play) -> None:  # noqa: F811
    async def story(shells: Shells) -> None:
        await shells.submit("x", "low", 1, token=TOKEN)
        for _ in range(5):
            await refused(shells, "wrong_token", "cancel", id="x", token=OTHER)
        shells.clock.set(shells.clock.now() + DENIED_EVERY_S)
        await shells.ask("_forget")
        assert [event.times for event in logged(shells, ev.Denied)] == [1, 4]

    play(story)


# --- keys


def test_a_requester_with_a_key_is_submitted_for_with_this_key_only(play: Play) -> None:  # noqa: F811
    async def story(shells: Shells) -> None:
        await shells.ask("change", changes=[["requester", "high", HASH]])
        for fields in ({}, {"key": WRONG}, {"key": key_hash(KEY)}, {"key": KEY[:-1]}, {"key": 7}):
            problem = await refused(
                shells,
                "wrong_key",
                "submit",
                id="x",
                requester="high",
                amounts={"gpu": 1, "step_run": 1},
                **fields,
            )
            assert "RAY_POOLS_KEY" in str(problem)
            assert str(fields.get("key", "?")) not in str(wire.error_to_wire(problem))
        assert "x" not in shells.coordinator.state.requests
        await shells.submit(
            "l", "low", 1, key=WRONG
        )  # not protected: whatever the environment has is no matter
        await shells.submit("x", "high", 1, key=KEY)
        await shells.until({"l": "allocated", "x": "allocated"})
        shells.start()  # the log knows it, not only the process
        await refused(
            shells, "wrong_key", "submit", id="y", requester="high", amounts={"gpu": 1, "step_run": 1}
        )
        await shells.ask("change", changes=[["unrequester", "high"]])
        await shells.submit("z", "high", 1)
        everything = b"".join(row.body for row in open_reader(shells.address, "coordinator").read())
        status = [await shells.ask(op) for op in ("config", "status", "list")]
        for secret in (KEY, WRONG):
            assert secret.encode() not in everything + msgpack.packb(status)
        assert ("x", "submit", "high", "wrong_key") in [event[:4] for event in logged(shells, ev.Denied)]

    play(story)


def test_operators_with_a_key_need_it_and_it_can_be_changed_with_it_only(play: Play) -> None:  # noqa: F811
    async def story(shells: Shells) -> None:
        await shells.submit("x", "low", 1, token=TOKEN)
        await shells.until({"x": "allocated"})
        await shells.ask("change", changes=[["operators", HASH]], operator="alice@host")
        new = {"key_sha256": key_hash(WRONG)}
        named = {"operator": "eve@node"}
        for fields in (named, {**named, "operator_key": WRONG}):
            await refused(shells, "not_operator", "cancel", id="x", **fields)
            await refused(shells, "not_operator", "change", changes=[["operators", {}]], **fields)
            await refused(shells, "not_operator", "change", changes=[["operators", new]], **fields)
            await refused(shells, "not_operator", "operate", what="upgrade", **fields)
            await refused(shells, "not_operator", "drain", **fields)
        await refused(shells, "not_operator", "change", changes=[["limits", {}]])
        await shells.ask("stopped", id="x", token=TOKEN)  # a holder needs none
        alice = {"operator": "alice@host", "operator_key": KEY}
        await shells.ask("operate", what="upgrade", detail="to version 9", **alice)
        await shells.ask("change", changes=[["operators", new]], **alice)
        await refused(shells, "not_operator", "cancel", id="x", **alice)
        await shells.ask("cancel", id="x", operator="bob@host", operator_key=WRONG)
        await shells.until({"x": "cancelled"})
        assert [event[1:] for event in logged(shells, ev.Commanded)] == [
            ("upgrade", "alice@host", "to version 9"),
            ("cancel", "bob@host", ""),
        ]
        denied = {(event.what, event.by) for event in logged(shells, ev.Denied)}
        assert {(op, "eve@node") for op in ("cancel", "change", "operate", "drain")} <= denied

    play(story)


def test_keys_and_limits_are_in_the_state_and_take_part_in_all_or_nothing(play: Play) -> None:  # noqa: F811
    async def story(shells: Shells) -> None:
        before = await shells.ask("config")
        for broken, field in (
            (["requester", "low", {"key_sha256": KEY}], "requesters.low.key_sha256"),
            (["requester", "low", {}], "requesters.low.key_sha256"),
            (["operators", {"key": "x"}], "operators.key"),
            (["limits", {"waiting_per_requester": 0}], "limits.waiting_per_requester"),
            (["limits", {"waiting": 1}], "limits.waiting"),
        ):
            with pytest.raises(BadInput) as caught:
                await shells.ask("change", changes=[["unpolicy", "high", "p"], broken])
            assert caught.value.field == field
            assert KEY not in str(caught.value)
        await refused(shells, "unknown_requester", "change", changes=[["unrequester", "low"]])
        assert await shells.ask("config") == before
        changes = [["requester", "low", HASH], ["operators", HASH], ["limits", {"live_requests": 5}]]
        await shells.ask("change", changes=changes, id="c1")
        same = await shells.ask("change", changes=changes, id="c1", operator="a", operator_key=KEY)
        assert same == {"version": 2}
        config = await shells.ask("config")
        assert (config["requesters"], config["operators"]) == ({"low": HASH}, HASH)
        assert config["limits"] == {"waiting_per_requester": WAITING_PER_REQUESTER, "live_requests": 5}
        state = shells.coordinator.state
        assert CoordinatorState.load(state.dump()).digest() == state.digest()

    play(story)


def test_a_key_comes_by_the_environment_or_a_file_and_is_never_shown(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert keys.client_keys() == keys.Keys(None, None)
    monkeypatch.setenv("RAY_POOLS_KEY_FILE", str(file))
    assert keys.client_keys().of_requester() == {"key": KEY}
    monkeypatch.setenv("RAY_POOLS_KEY", WRONG)
    assert keys.client_keys().requester == WRONG
    assert keys.client_keys(KEY).requester == KEY
    assert KEY not in repr(keys.client_keys(KEY, KEY))
    for bad in ("short", "x" * 21, KEY + "\n" + KEY, "k" * 2000):
        with pytest.raises(BadInput) as caught:
            keys.client_keys(bad)
        assert bad not in str(caught.value)
    monkeypatch.delenv("RAY_POOLS_KEY")
    monkeypatch.setenv("RAY_POOLS_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(BadInput, match="RAY_POOLS_KEY_FILE"):
        keys.client_keys()


# --- limits


def test_a_requester_may_have_so_many_waiting_and_all_so_many_live(play: Play) -> None:  # noqa: F811
    async def story(shells: Shells) -> None:
        await shells.ask("change", changes=[["limits", {"waiting_per_requester": 2, "live_requests": 4}]])
        await shells.submit("held", "low", 2)
        await shells.until({"held": "allocated"})
        await shells.submit("w1", "low", 1)
        await shells.submit("w2", "low", 1)
        fields = {"requester": "low", "amounts": {"gpu": 1, "step_run": 1}}
        problem = await refused(shells, "too_many_waiting", "submit", id="w3", **fields)
        assert problem.details == {"requester": "low", "waiting": 2, "more": 1, "limit": 2}
        await shells.submit("w2", "low", 1)  # a repetition is no new request
        await shells.submit("never", "low", 64)  # neither is what is rejected at once
        await shells.submit("other", "high", 2)
        problem = await refused(
            shells, "too_many_live", "submit", id="o2", requester="high", amounts={"gpu": 1, "step_run": 1}
        )
        assert problem.details == {"live": 4, "more": 1, "limit": 4}
        await shells.ask("cancel", id="w1")
        await shells.submit("w3", "low", 1)
        state = shells.coordinator.state
        assert CoordinatorState.load(state.dump()).waiting_of == state.waiting_of
        held = state.requests["held"].shown  # or called back by now, for `other`
        assert state.waiting_of == {"low": 2 + (held == "queued"), "high": 1}
        await refused(shells, "too_many_waiting", "room", requesters={"low": ["w3", "w4"]})
        for id in ("other", "w2", "w3", "held"):
            await shells.ask("cancel", id=id)
        assert shells.coordinator.state.waiting_of == {}

    play(story)


def test_the_coordinator_says_before_the_first_of_many_whether_all_can_come(play: Play) -> None:  # noqa: F811
    async def story(shells: Shells) -> None:
        ids = [f"r{number}" for number in range(WAITING_PER_REQUESTER + 1)]
        problem = await refused(shells, "too_many_waiting", "room", requesters={"low": ids})
        assert str(WAITING_PER_REQUESTER) in str(problem)
        assert str(len(ids)) in str(problem)
        await shells.submit("r0", "low", 1)
        await shells.ask("room", requesters={"low": ids[:-1]})  # r0 is known: it is no new one
        for wrong in (7, {"low": 1}, {"low": [1]}, {"": []}):
            with pytest.raises(BadInput):
                await shells.ask("room", requesters=wrong)

    play(story)


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        ("get", {"ids": [["unhashable"]]}),
        ("renew", {"items": [[["unhashable"], b""]]}),
        ("renew", {"items": [["x"]]}),
        ("nonsense", {}),
        ("submit", {"id": "x", "requester": "low", "amounts": {"gpu": 1, "step_run": 1}, "made_at": "now"}),
    ],
)
def test_what_is_malformed_hurts_nobody_else_of_its_turn(
    play: Play,  # noqa: F811
    op: str,
    fields: dict[str, Any],
) -> None:
    """Fault: one caller's nonsense undoes the turn, and with it what others asked for."""

    async def story(shells: Shells) -> None:
        good = asyncio.ensure_future(shells.submit("good", "low", 1))
        with pytest.raises(BadInput):
            await shells.ask(op, **fields)
        assert (await good)["state"] == "queued"

    play(story)


# --- age


def test_a_submission_that_may_have_been_forgotten_does_not_run_again(
    play: Play,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clocks may differ by hours; a repetition of what is known is answered at any age."""

    async def story(shells: Shells) -> None:
        import ray_pools.actors.coordinator as module

        now = time.time()
        fields = {"requester": "low", "amounts": {"gpu": 1, "step_run": 1}}
        await shells.ask("submit", id="scenario", made_at=0.0, **fields)  # time is a scenario's: nobody knows
        monkeypatch.setattr(module, "ManualClock", type("Other", (), {}))
        hour, oldest = 3600.0, RETENTION_S - CLOCK_SKEW_MAX_S
        for id, age_s in (("now", 0.0), ("slow", 20 * hour), ("fast", -20 * hour), ("old", oldest - hour)):
            await shells.ask("submit", id=id, made_at=now - age_s, **fields)
        await refused(shells, "too_old", "submit", id="older", made_at=now - oldest - hour, **fields)
        await refused(
            shells, "clock_ahead", "submit", id="ahead", made_at=now + CLOCK_SKEW_MAX_S + hour, **fields
        )
        await shells.ask("submit", id="now", made_at=now - 100 * RETENTION_S, **fields)
        await shells.ask("submit", id="silent", **fields)  # older clients don't say
        assert set(shells.coordinator.state.requests) == {"scenario", "now", "slow", "fast", "old", "silent"}

    play(story)


def test_a_repetition_of_one_submission_has_the_age_of_the_first() -> None:
    from ray_pools.client import Submission

    before = time.time()
    made = Submission("team", gpus=1)
    ops = [made.operation("client", b"token") for _ in range(2)]
    assert ops[0] == ops[1]
    assert before <= ops[0]["made_at"] <= time.time()


# --- every operation in every state (docs/protocol.md, "In every state")


async def _to(shells: Shells, state: str) -> str:
    """A request in this state; its id."""
    id = state
    if state in ("allocated", "preempting", "ending"):
        await shells.submit(id, "low", 2, token=TOKEN)
        await shells.until({id: "allocated"})
    if state == "preempting":
        await shells.submit("taker", "high", 2)
        await shells.until({id: "preempting", "taker": "queued"})
    elif state == "ending":  # asked, and its pool has not answered yet
        asked = asyncio.ensure_future(shells.ask("release", id=id, token=TOKEN))
        while not shells.coordinator.state.requests[id].asked:
            await asyncio.sleep(0)
        asked.add_done_callback(lambda done: done.exception())
    elif state in ("queued", "cancelled"):
        await shells.submit("holder", "low", 2)
        await shells.until({"holder": "allocated"})
        await shells.submit(id, "low", 2, token=TOKEN)
        if state == "cancelled":
            await shells.ask("cancel", id=id, token=TOKEN)
    elif state == "rejected":
        await shells.submit(id, "low", 64, token=TOKEN)
    elif state == "released":
        await shells.submit(id, "low", 1, token=TOKEN)
        await shells.until({id: "allocated"})
        await shells.ask("release", id=id, token=TOKEN)
    elif state == "expired":
        await shells.submit(id, "low", 1, token=TOKEN, lease_s=5.0)
        await shells.until({id: "allocated"})
        shells.clock.set(shells.clock.now() + 6.0)
        shells.coordinator.schedule_turn()
        await shells.until({id: "expired"})
    elif state == "preempted":
        await shells.submit(id, "low", 2, token=TOKEN)
        await shells.until({id: "allocated"})
        await shells.submit("taker", "high", 2)
        await shells.until({id: "preempting", "taker": "queued"})
        await shells.ask("stopped", id=id, token=TOKEN)
        await shells.until({id: "preempted", "taker": "allocated"})
    return id


@pytest.mark.parametrize(
    ("state", "cancelled", "released"),
    [
        ("queued", "cancelled", "cancelled"),
        ("allocated", "cancelled", "released"),
        ("preempting", "cancelled", "released"),
        ("ending", "released", "released"),
        *((final, final, final) for final in ("released", "cancelled", "rejected", "expired", "preempted")),
    ],
)
@pytest.mark.parametrize("op", ["cancel", "release"])
def test_cancel_and_release_in_every_state(
    play: Play,  # noqa: F811
    op: str,
    state: str,
    cancelled: str,
    released: str,
) -> None:
    """The table of docs/protocol.md; and the same again, and with another's token, in each of them."""
    expected = cancelled if op == "cancel" else released

    async def story(shells: Shells) -> None:
        id = await _to(shells, state)
        before = (await shells.ask("get", ids=[id]))[0]["state"]
        await refused(shells, "wrong_token", op, id=id, token=OTHER)
        assert (await shells.ask("get", ids=[id]))[0]["state"] in (before, expected)
        for _ in range(2):
            view = await asyncio.wait_for(shells.ask(op, id=id, token=TOKEN), 30.0)
            assert view["state"] == expected
        await refused(shells, "unknown_id", op, id="nobody", token=TOKEN)

    play(story)


def test_a_request_that_no_pool_was_told_to_run_is_cancelled_at_once(
    play: Play,  # noqa: F811
) -> None:
    """Open in two pools: the answer does not wait for any of them."""

    async def story(shells: Shells) -> None:
        from ray_pools.core.config_rules import PolicyConfig, PoolConfig

        await shells.ask(
            "change",
            changes=[
                ["pool", PoolConfig("q", {"gpu": 2}).to_wire(), "q#1"],
                ["policy", PolicyConfig("q", "low", 5).to_wire()],
            ],
        )
        monkey = shells.coordinator
        monkey._peer("q").poke = lambda: None  # type: ignore[method-assign]  # q has no actor here
        await shells.submit("open", "low", 1, token=TOKEN)
        assert shells.coordinator.state.requests["open"].phase == "open"
        view = await shells.ask("cancel", id="open", token=TOKEN)
        assert view["state"] == "cancelled"

    play(story)


def test_errors_of_the_wire_name_their_class_again() -> None:
    for problem in (
        Refused("wrong_key", "text", {"requester": "r"}),
        BadInput("key", "5 characters", "longer"),
    ):
        again: PoolsError = wire.error_from_wire(wire.error_to_wire(problem))
        assert (type(again), str(again)) == (type(problem), str(problem))
