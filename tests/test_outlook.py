"""What would become of a request, told before it is submitted, and how long those that wait will wait.

Faults it stands for: an answer that differs from what the pools then do (100 random states, decisions of live-style
actors with real messages); a look ahead that changes something; a wait that is told for sure where nobody can know it.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from click.testing import CliRunner
from fake_pools import FakePools
from live_style import LiveStyle

import ray_pools as pools
from ray_pools.cli.app import pools as cli
from ray_pools.cli.explaining import explained
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.picture import coordinator_picture, pool_picture
from ray_pools.core.requests import FINAL
from ray_pools.simulate.outlook import Outlook, estimates, would

TEAMS = ("t1", "t2", "t3")
Pictures = tuple[dict[str, Any], list[dict[str, Any]]]


def pictures(live: LiveStyle) -> Pictures:
    """As they come over the wire."""

    def sent(picture: dict[str, Any]) -> Any:
        return msgpack.unpackb(msgpack.packb(picture), strict_map_key=False)

    return sent(coordinator_picture(live.coordinator)), [
        sent(pool_picture(live.pool(name))) for name in live.pools
    ]


def random_life(rng: random.Random) -> LiveStyle:
    """Pools, policies and requests of every kind, some time later, when nothing is on its way."""
    names = ["p", "q", "r"][: rng.choice([1, 2, 2, 3])]
    configs = {
        name: PoolConfig(
            name,
            {"gpu": rng.randint(6, 9)},
            queueing=rng.choice(["backfill", "strict"]),
            starvation_after_s=rng.choice([0.0, 20.0, 300.0]),
            grace_s=rng.choice([10.0, 30.0]),
            min_runtime_s=rng.choice([0.0, 0.0, 20.0]),
            placement=rng.choice([None, {"strategy": "PACK", "provision_timeout_s": 60.0}]),
        )
        for name in names
    }
    policies = []
    for name in names:
        for team in TEAMS:
            if rng.random() < 0.85:
                limit = rng.choice([{}, {}, {"gpu": rng.randint(2, 5)}])
                reserved = rng.choice([{}, {"gpu": 1}, {"gpu": 2}])
                policies.append(PolicyConfig(name, team, rng.choice([0, 0, 1, 5]), reserved, limit))
    live = LiveStyle(configs, policies)
    for n in range(rng.randint(0, 40)):
        live.submit(f"r{n}", rng.choice(TEAMS), rng.choice([1, 1, 2, 3]), **random_options(rng))
        live.run()
        for id, request in list(live.coordinator.state.requests.items()):
            if request.phase != FINAL and rng.random() < 0.06:
                what = "stopped" if request.shown == "preempting" else "release" if request.told else "cancel"
                live.about(what, id)
        live.run()
        if rng.random() < 0.4:
            live.advance(live.now + rng.choice([1.0, 12.0, 50.0]))
    return live


def random_options(rng: random.Random) -> dict[str, Any]:
    return {"preemptible": rng.random() < 0.92, "retries": rng.choice([0, 0, 2])}


def really(live: LiveStyle, requester: str, gpus: int, options: dict[str, Any]) -> tuple[str, str, set[str]]:
    """Submits it, and sees what becomes of it before any time goes by."""
    before = {id for id, state in live.states().items() if state.startswith("preempting")}
    live.submit("real", requester, gpus, **options)
    live.run(errands=False)
    request = live.coordinator.state.requests["real"]
    called = {id for id, state in live.states().items() if state.startswith("preempting")} - before
    if request.shown == "rejected":
        return "rejected", "", set()
    if request.shown == "allocated":
        return "granted", request.owner, set()
    if request.told == "nominated":
        return "stops_others", request.owner, called
    assert request.shown == "queued"
    return "waits", "", set()


def check(seeds: range) -> dict[str, int]:
    answers: dict[str, int] = {}
    for seed in seeds:
        rng = random.Random(seed)
        live = random_life(rng)
        requester, gpus, options = rng.choice(TEAMS), rng.choice([1, 1, 2, 3, 3, 10]), random_options(rng)
        digests = [core.state.digest() for core in live.cores.values()]
        found = would(*pictures(live), requester, (("gpu", gpus),), **options)
        assert [core.state.digest() for core in live.cores.values()] == digests, "a look changes nothing"
        answer, pool, victims = really(live, requester, gpus, options)
        assert (found.answer, found.pool, set(found.victims)) == (answer, pool, victims), (
            f"seed {seed}: {found}"
        )
        answers[answer] = answers.get(answer, 0) + 1
        live.close()
    return answers


def test_would_agrees_with_what_a_submission_then_does() -> None:
    assert len(check(range(12))) >= 3


@pytest.mark.slow
def test_would_agrees_in_100_of_100_states() -> None:
    answers = check(range(100))
    assert sum(answers.values()) == 100
    assert len(answers) == 4
    assert min(answers.values()) >= 5, answers


# --- how long


def full(expected_run_s: float | None = 100.0) -> LiveStyle:
    """One pool, full since 0 by two requests of 2 GPUs that say how long they run."""
    live = LiveStyle(
        {"p": PoolConfig("p", {"gpu": 4}, grace_s=10.0)},
        [PolicyConfig("p", "t1"), PolicyConfig("p", "t2", 5)],
    )
    options = {} if expected_run_s is None else {"expected_run_s": expected_run_s}
    for id in ("a", "b"):
        live.submit(id, "t1", 2, options=options)
        live.run()
        live.advance(live.now + 20.0)
    return live


def test_a_wait_is_estimated_from_what_runs_declared() -> None:
    live = full()
    live.submit("c", "t1", 2)
    live.run()
    assert estimates(*pictures(live), ["c", "a", "nobody"]) == {"c": 60.0}
    found = would(*pictures(live), "t1", (("gpu", 2),))  # behind c: when b ends
    assert found == Outlook("waits", "", (), {"p": "waiting_capacity"}, 80.0)
    assert str(found) == "would wait about 80 s (p: waiting capacity)"
    live.close()


def test_a_wait_is_estimated_from_how_long_those_of_the_same_requester_ran() -> None:
    live = full(expected_run_s=None)
    live.submit("c", "t1", 4)
    live.run()
    assert estimates(*pictures(live), ["c"]) == {"c": None}, "nobody ever ran to an end"
    for id in ("a", "b"):
        live.about("release", id)
        live.run()
    assert live.states()["c"] == "allocated@p"
    live.submit("d", "t1", 1)
    live.run()
    # a ran for 40 s, b for 20 s
    assert estimates(*pictures(live), ["d"]) == {"d": 30.0}
    live.advance(live.now + 50.0)  # c runs longer than any: half as long again
    assert estimates(*pictures(live), ["d"]) == {"d": 25.0}
    live.close()


def test_who_is_stopped_is_told_and_when_the_grace_is_over() -> None:
    live = full()
    found = would(*pictures(live), "t2", (("gpu", 2),))
    assert found == Outlook("stops_others", "p", ("b",), {}, 10.0)
    assert str(found) == "would stop 1 in p (b) and wait about 10 s"
    assert would(*pictures(live), "t2", (("gpu", 9),)) == Outlook(
        "rejected", "", (), {"p": "exceeds_capacity"}, None
    )
    live.about("release", "a")
    live.run()
    assert would(*pictures(live), "t1", (("gpu", 2),)) == Outlook("granted", "p", (), {}, 0.0)
    live.close()


def test_what_is_on_its_way_between_the_actors_is_taken_to_arrive() -> None:
    live = full()
    live.submit("c", "t2", 2)  # the pool has not heard of it
    live.submit("d", "t1", 2)
    assert estimates(*pictures(live), ["c", "d"]) == {"c": 10.0, "d": 60.0}
    live.run()
    assert estimates(*pictures(live), ["c", "d"]) == {"c": 10.0, "d": 60.0}
    live.close()


@pytest.mark.parametrize(
    ("retries", "given_back", "wanted"),
    # c has what b held, until then a has 60 s to go, less the 11 s of before
    [(1, False, {"b": 49.0}), (0, False, {}), (1, True, {})],
)
def test_an_end_that_its_pool_has_not_told_yet_is_taken_to_be_told(
    retries: int, given_back: bool, wanted: dict[str, float]
) -> None:
    """It is queued again only if it has retries left and is still wanted (section 8)."""
    live = LiveStyle(
        {"p": PoolConfig("p", {"gpu": 4}, grace_s=10.0)},
        [PolicyConfig("p", "t1"), PolicyConfig("p", "t2", 5)],
    )
    for id in ("a", "b"):
        live.submit(id, "t1", 2, retries=retries, options={"expected_run_s": 100.0})
        live.run()
        live.advance(live.now + 20.0)
    live.submit("c", "t2", 2, options={"expected_run_s": 100.0})
    live.run()
    assert live.states()["b"] == "preempting@p"
    live.now += 11.0
    live.turn("p")  # its grace is over, and the coordinator has not heard of it
    assert live.pool("p").state.attempts["c"].state == "granted"
    if given_back:
        live.about("release", "b")
    assert estimates(*pictures(live), ["b"]) == wanted
    live.close()


def test_a_pool_that_does_not_answer_is_left_out() -> None:
    live = full()
    coordinator, _ = pictures(live)
    assert would(coordinator, [], "t1", (("gpu", 1),)).answer == "rejected"
    live.close()


# --- asked by a client, and by a command


@pytest.fixture
def ahead(client: pools.Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[pools.Client]:
    """A client whose actors stand where `full` leaves them."""
    live = full()
    monkeypatch.setattr(client, "_pictures", lambda: pictures(live))
    yield client
    live.close()


def test_a_client_asks_as_it_would_submit(ahead: pools.Client, fake: FakePools) -> None:
    assert ahead.would("t2", gpus=2).victims == ("b",)
    assert ahead.would("t1", pools.ResourceSettings(gpu_count=2, preemptible=False)).causes == {
        "p": "exceeds_reserved"
    }
    assert ahead.estimates(["a"]) == {}
    assert fake.ops("submit") == []
    with pytest.raises(pools.BadInput, match="gpus"):
        ahead.would("t2", gpus=-1)
    with pytest.raises(pools.BadInput, match="expected_run_s"):
        ahead.would("t2", gpus=1, expected_run_s=-1)


def test_an_estimate_is_part_of_an_explanation(ahead: pools.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = ahead.submit("t1", gpus=1, id="r1")
    assert all(each["estimate_s"] is None for each in ticket.explain(estimate=True).values()), (
        "nobody knows it there"
    )
    live = full()
    live.submit("r1", "t1", 1)
    live.run()
    monkeypatch.setattr(ahead, "_pictures", lambda: pictures(live))
    said = ticket.explain(estimate=True)
    assert {pool: each["estimate_s"] for pool, each in said.items()} == {"a": 60.0, "b": 60.0}
    assert "about 60 s" in said.line()
    assert all("estimate_s" not in each for each in ticket.explain().values())
    live.close()


def test_why_goes_without_an_estimate_where_actors_of_before_can_not_say(
    client: pools.Client, fake: FakePools
) -> None:
    client.submit("t1", gpus=1, id="r1")
    said = explained(client, "r1")
    assert {pool: each["cause"] for pool, each in said["pools"].items()} == {
        "a": "waiting_capacity",
        "b": "waiting_capacity",
    }
    assert all("estimate_s" not in each for each in said["pools"].values())
    assert len(fake.ops("explain")) == 2, "each pool is asked once"


@pytest.mark.parametrize(
    ("gpus", "code", "said"),
    [
        ("2", 0, "t2 would stop 1 in p (b)"),
        ("9", 1, "t2 would be rejected: p: exceeds_capacity: it asks for 9 gpu; p has 4 in all"),
    ],
)
def test_the_command(
    ahead: pools.Client, monkeypatch: pytest.MonkeyPatch, gpus: str, code: int, said: str
) -> None:
    monkeypatch.setattr("ray_pools.cli.would.connect", lambda *_: contextlib.nullcontext(ahead))
    config = {
        "pools": [{"name": "p", "capacity": {"gpu": 4}}],
        "policies": [PolicyConfig("p", "t2").to_wire()],
    }
    monkeypatch.setattr(ahead, "config", lambda: config)
    result = CliRunner().invoke(cli, ["would", "-r", "t2", "--gpus", gpus])
    assert result.exit_code == code, result.output
    assert said in result.output
    as_json = CliRunner().invoke(cli, ["would", "-r", "t2", "--gpus", gpus, "--json"])
    assert set(json.loads(as_json.output)) == {"answer", "pool", "victims", "causes", "wait_s"}


def test_actors_of_another_version_are_said_to_be(
    ahead: pools.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = full()
    coordinator, of_pools = pictures(live)
    of_pools[0]["state"]["layout"]["fields"].append("newer")
    monkeypatch.setattr(ahead, "_pictures", lambda: (coordinator, of_pools))
    with pytest.raises(pools.PoolsError, match="another version"):
        ahead.would("t1", gpus=1)
    live.close()
