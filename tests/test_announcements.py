"""Capacity announced ahead (docs/prewarming.md): durable, ends by itself, is used up by what comes, and who may do it.

Faults it stands for: nodes wished for twice once the announced work runs; an announcement that goes with a process, or
never ends; one that a repeated call makes longer; half of a batch; one that a stranger ends.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import BadInputReader
from fake_pools import FakePools
from shell_pools import NoGroups, shell_pools
from test_access import HASH, KEY, WRONG, logged, refused
from test_shells import Play, Shells, play  # noqa: F401 - a fixture

import ray_pools as pools
from ray_pools.cli.times import parse_duration
from ray_pools.core import records as ev
from ray_pools.core.announcements import KEPT, Announcement, not_used_yet
from ray_pools.core.config_rules import DRAINING, PolicyConfig, PoolConfig
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.demand import pool_views
from ray_pools.core.prewarm import target
from ray_pools.errors import BadInput
from ray_pools.limits import ANNOUNCED_MAX_S, ANNOUNCEMENTS_MAX
from ray_pools.log_words import words

NODES = {"labels": {}, "node": {"gpu": 4}}


@pytest.fixture(autouse=True)
def _nothing_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools have nodes here, and no Ray."""
    monkeypatch.setattr("ray_pools.actors.pool.Placer", NoGroups)


def wanted(id: str = "a", gpu: int = 4, for_s: float = 60.0, **more: Any) -> dict[str, Any]:
    return {"id": id, "pool": "p", "amounts": {"gpu": gpu}, "for_s": for_s, **more}


async def announce(shells: Shells, *wants: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    said = await shells.ask("announce", announcements=list(wants), **fields)
    return list(said["announcements"])


async def begin(shells: Shells, **config: Any) -> None:
    """Pool p has nodes."""
    pool = PoolConfig("p", {"gpu": 8}, placement=NODES, **config)
    await shells.ask("change", changes=[["pool", pool.to_wire(), "p#1"]])
    await shells.until({})


def wished(state: CoordinatorState) -> float:
    return sum(wish.total("GPU") for wish in target(pool_views(state)))


def announcements(play: Play, story: Any) -> None:  # noqa: F811
    async def whole(shells: Shells) -> None:
        await begin(shells)
        await story(shells)

    play(whole)


def test_it_is_wished_for_until_it_is_over_also_after_a_restart(play: Play) -> None:  # noqa: F811
    async def story(shells: Shells) -> None:
        begun = shells.clock.now()
        (view,) = await announce(shells, wanted(), operator="alice@host")
        assert view == {
            "id": "a", "pool": "p", "amounts": {"gpu": 4}, "for_s": 60.0, "until": begun + 60, "left_s": 60.0,
            "requester": "", "by": "alice@host", "over": "",
        }  # fmt: skip
        assert wished(shells.coordinator.state) == 4
        digest = shells.coordinator.state.digest()
        shells.start()
        state = shells.coordinator.state
        assert state.digest() == digest == CoordinatorState.load(state.dump()).digest()
        assert wished(state) == 4
        (shown,) = (await shells.ask("status"))["announced"]
        assert shown["id"] == "a"
        assert shells.coordinator.next_event_at() == begun + 60
        await shells.until({})  # nothing ends before the pools were heard
        await shells.ask("clock", now=begun + 60)
        assert wished(shells.coordinator.state) == 0
        assert (await shells.ask("status"))["announced"] == []
        said = [words(event) for event in logged(shells, ev.Announced, ev.Unannounced)]
        assert said == [
            "alice@host announces gpu 4 of pool p for the next 60 s (a)",
            "announced no more: a: its time is over",
        ]

    announcements(play, story)


def test_the_same_again_changes_nothing_and_another_content_is_refused(play: Play) -> None:  # noqa: F811
    async def story(shells: Shells) -> None:
        (first,) = await announce(shells, wanted())
        shells.clock.set(shells.clock.now() + 20)
        (again,) = await announce(shells, wanted())
        assert again == {**first, "left_s": 40.0}
        await refused(shells, "id_in_use", "announce", announcements=[wanted(gpu=2)])
        shells.clock.set(shells.clock.now() + 40)
        (over,) = await announce(shells, wanted())
        assert (over["over"], over["left_s"]) == ("its time is over", 0.0)
        assert len(logged(shells, ev.Announced)) == 1

    announcements(play, story)


def test_a_batch_is_announced_whole_or_not_at_all(play: Play) -> None:  # noqa: F811
    async def story(shells: Shells) -> None:
        await refused(
            shells, "unknown_pool", "announce", announcements=[wanted("a"), {**wanted("b"), "pool": "q"}]
        )
        await refused(shells, "id_in_use", "announce", announcements=[wanted("a"), wanted("a", gpu=1)])
        assert logged(shells, ev.Announced) == []
        views = await announce(shells, wanted("a"), wanted("b", gpu=2), wanted("a"))
        assert [view["id"] for view in views] == ["a", "b", "a"]
        assert len(logged(shells, ev.Announced)) == 2
        many = [wanted(f"m{n}", gpu=1) for n in range(ANNOUNCEMENTS_MAX - 1)]
        await refused(shells, "too_many_announced", "announce", announcements=many)
        await announce(shells, *many[1:])
        await refused(shells, "too_many_announced", "announce", announcements=[many[0]])

    announcements(play, story)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"amounts": {}}, "amounts"),
        ({"amounts": {"gpu": 0}}, "amounts"),
        ({"amounts": {"gpu": -1}}, "amounts.gpu"),
        ({"amounts": {"gpu": 9}}, "amounts.gpu"),
        ({"amounts": {"licence": 1}}, "amounts.licence"),
        ({"for_s": 0.5}, "for_s"),
        ({"for_s": ANNOUNCED_MAX_S + 1}, "for_s"),
        ({"for_s": float("nan")}, "for_s"),
        ({"for_s": True}, "for_s"),
        ({"id": ""}, "id"),
        ({"pool": 3}, "pool"),
        ({"requester": "a\n"}, "requester"),
    ],
)
def test_what_can_not_be_right_is_named(play: Play, change: dict[str, Any], field: str) -> None:  # noqa: F811
    async def story(shells: Shells) -> None:
        with pytest.raises(BadInput) as caught:
            await announce(shells, {**wanted(), **change})
        assert caught.value.field == field
        assert logged(shells, ev.Announced) == []

    announcements(play, story)


def test_pools_without_nodes_of_their_own_and_those_on_their_way_out_are_refused(play: Play) -> None:  # noqa: F811
    async def story(shells: Shells) -> None:
        await refused(shells, "no_policy", "announce", announcements=[wanted(requester="nobody")])
        await shells.ask("change", changes=[["policy", PolicyConfig("p", "low", limit={"gpu": 2}).to_wire()]])
        with pytest.raises(BadInput, match="the limit of 'low'"):
            await announce(shells, wanted(requester="low"))
        await announce(shells, wanted())
        await begin(shells, state=DRAINING)
        assert wished(shells.coordinator.state) == 0
        await refused(shells, "draining", "announce", announcements=[wanted("b")])
        counting = PoolConfig("p", {"gpu": 8}).to_wire()
        await shells.ask("change", changes=[["pool", counting, "p#1"]])
        await refused(shells, "counts_only", "announce", announcements=[wanted("b")])
        await shells.ask("change", changes=[["unpool", "p"]])
        (over,) = await announce(shells, wanted())
        assert over["over"] == "its pool was deleted"

    announcements(play, story)


def test_who_may_announce_and_end_it(play: Play) -> None:  # noqa: F811
    async def story(shells: Shells) -> None:
        await shells.ask("change", changes=[["requester", "low", HASH], ["operators", HASH]])
        for_low = wanted("l", requester="low")
        await refused(shells, "wrong_key", "announce", announcements=[for_low], key=WRONG, by="eve@host")
        await refused(shells, "not_operator", "announce", announcements=[wanted(), for_low], key=KEY)
        await announce(shells, for_low, key=KEY)
        await announce(shells, wanted("high's", requester="high"))
        await announce(shells, wanted(), operator="alice@host", operator_key=KEY)
        await refused(shells, "not_operator", "unannounce", ids=["l"], key=WRONG)
        await refused(shells, "not_operator", "unannounce", ids=["high's", "a"])
        await refused(shells, "unknown_id", "unannounce", ids=["high's", "none"])
        assert list(shells.coordinator.state.announced) == ["l", "high's", "a"]
        await shells.ask("unannounce", ids=["l"], key=KEY, by="lou@host")
        await shells.ask("unannounce", ids=["high's"], by="eve@host")
        ended = await shells.ask("unannounce", ids=["a", "l"], operator="alice@host", operator_key=KEY)
        assert [each["over"] for each in ended["announcements"]] == ["taken back"] * 2
        assert [(event.ids, event.by) for event in logged(shells, ev.Unannounced)] == [
            (["l"], "lou@host"), (["high's"], "eve@host"), (["a"], "alice@host"),
        ]  # fmt: skip
        assert {event.why for event in logged(shells, ev.Denied)} == {"wrong_key", "not_operator"}

    announcements(play, story)


def test_what_comes_later_uses_it_up_and_leaves_it_again(play: Play) -> None:  # noqa: F811
    """Fault: nodes for the announcement and once more for the work that it was made for."""

    async def story(shells: Shells) -> None:
        await shells.ask("change", changes=[["policy", PolicyConfig("p", "low").to_wire()]])
        await shells.submit("before", "low", 1)
        await announce(shells, wanted(gpu=4))
        assert wished(shells.coordinator.state) == 5, "what ran before is not what was announced"
        await shells.submit("later", "low", 3)
        assert wished(shells.coordinator.state) == 5
        await shells.submit("more", "low", 3)
        assert wished(shells.coordinator.state) == 7
        for id in ("later", "more"):
            await shells.ask("cancel", id=id)
        await shells.until({"before": "allocated", "later": "cancelled", "more": "cancelled"})
        assert wished(shells.coordinator.state) == 5, "it lasts on between two jobs"

    announcements(play, story)


def made(id: str, gpu: int, age: int, requester: str = "") -> Announcement:
    return Announcement(id, "p", (("gpu", gpu),), 60.0, 60.0, requester, "", age)


@pytest.mark.parametrize(
    ("announced", "served", "left"),
    [
        ([], [(1, "r", 4)], []),
        ([made("a", 4, 5)], [(5, "r", 4)], [4]),  # came before it
        ([made("a", 4, 5)], [(6, "r", 1), (7, "s", 2)], [1]),
        ([made("a", 4, 5), made("b", 4, 5)], [(6, "r", 6)], [2]),  # each counts once
        ([made("a", 4, 5), made("b", 4, 7)], [(6, "r", 6)], [4]),  # and not for one that came after it
        ([made("a", 4, 5, "s")], [(6, "r", 4)], [4]),  # another's
        ([made("a", 4, 5, "s"), made("b", 2, 5)], [(6, "r", 1), (7, "s", 5)], []),
    ],
)
def test_what_is_not_used_yet(
    announced: list[Announcement], served: list[tuple[int, str, int]], left: list[int]
) -> None:
    found = not_used_yet(announced, [(age, who, (("gpu", gpu), ("step_run", 1))) for age, who, gpu in served])
    assert found == [{"gpu": gpu} for gpu in left]


def test_only_the_last_of_those_that_are_over_are_kept() -> None:
    state = CoordinatorState()
    for number in range(KEPT + 5):
        state.apply(ev.Announced(f"{number}", "p", [["gpu", 1]], 1.0, 1.0, "", ""), 0.0)
        state.apply(ev.Unannounced([f"{number}"], "its time is over", ""), 1.0)
    assert len(state.announced_before) == KEPT
    assert "4" not in state.announced_before
    assert "5" in state.announced_before


# --- the client and the command


def test_the_client_says_what_it_is_given(fake: FakePools, client: pools.Client) -> None:
    answer = {"announcements": [{"id": "w"}]}
    fake.instead["announce"] = [lambda op: answer] * 3
    fake.instead["unannounce"] = [lambda op: answer] * 2
    settings = pools.ResourceSettings(2, "0.5")
    assert client.prewarm("p", gpus=8, memory="1GB", for_s=900, id="w") == {"id": "w"}
    client.prewarm_many([{"pool": "p", "settings": settings, "for_s": 1, "requester": "r"}])
    client.cancel_prewarm("w")

    async def twins() -> None:
        assert await client.prewarm_async("p", gpus=1, for_s=5) == {"id": "w"}
        assert await client.prewarm_many_async([]) == []
        assert await client.cancel_prewarm_async("w") == [{"id": "w"}]

    asyncio.run(twins())
    sent = [op["announcements"][0] for op in fake.ops("announce")]
    assert sent[0] == {
        "id": "w", "pool": "p", "amounts": {"gpu": 8, "memory_mb": 1000}, "for_s": 900, "requester": "",
    }  # fmt: skip
    assert (sent[1]["amounts"], sent[1]["requester"]) == ({"gpu": 2, "mcpu": 500}, "r")
    assert sent[1]["id"] != sent[2]["id"]
    assert all(op["operator"] for op in fake.ops("announce"))
    assert fake.ops("unannounce")[0]["ids"] == ["w"]


def test_the_client_names_what_can_not_be_right(refuses: BadInputReader, client: pools.Client) -> None:
    with refuses("for_s", "86400"):
        client.prewarm("p", gpus=1, for_s=1e9)
    with refuses("gpus", "above 0"):
        client.prewarm("p", for_s=5)
    with refuses("announcements[1].gpu", "did you mean gpus"):
        client.prewarm_many([{"pool": "p", "gpus": 1, "for_s": 5}, {"pool": "p", "gpu": 1, "for_s": 5}])
    with refuses("announcements[0].gpus", "integer"):
        client.prewarm_many([{"pool": "p", "gpus": -1, "for_s": 5}])
    with refuses("gpus", "left out"):
        client.prewarm("p", pools.ResourceSettings(1), gpus=1, for_s=5)
    with refuses("ids", "1 to"):
        client.cancel_prewarm()


CONFIG = """
namespace: ahead
pools:
  spot: {capacity: {gpu: 8}}
  seats: {capacity: {seat: 1}, placement: none}
policies: [{requester: research, pool: spot}]
"""


def test_the_command_announces_shows_and_takes_back(tmp_path: Path) -> None:
    with shell_pools(tmp_path, CONFIG) as there:
        announced = there.run("prewarm", "spot", "-g", "4", "--for", "15m", "--id", "w", "-n", "ahead")
        assert announced.exit_code == 0, announced.output
        assert announced.output.startswith("w: gpu 4 of pool spot, announced by ")
        assert announced.output.endswith(" for the next 15 min\n")
        again = there.run("prewarm", "spot", "-g", "4", "--for", "900", "--id", "w", "-n", "ahead", "--json")
        assert json.loads(again.output)["id"] == "w"
        status = there.run("status", "-n", "ahead")
        assert "announced: w: gpu 4 of pool spot" in status.output
        assert "announces gpu 4 of pool spot" in there.run("history", "-n", "ahead").output
        other = there.run("prewarm", "spot", "-g", "2", "--for", "15m", "--id", "w", "-n", "ahead")
        assert (other.exit_code, "belongs to another announcement" in other.output) == (1, True)
        seats = there.run("prewarm", "seats", "--resource", "seat=1", "--for", "1m", "-n", "ahead")
        assert (seats.exit_code, "only counts" in seats.output) == (1, True)
        taken = there.run("prewarm", "--cancel", "w", "-n", "ahead")
        assert (taken.exit_code, taken.output) == (0, "w: gpu 4 of pool spot: over: taken back\n")
        assert there.run("prewarm", "--cancel", "none", "-n", "ahead").exit_code == 1
        for wrong in (["spot"], ["spot", "--for", "soon", "-g", "1"], ["spot", "--for", "2d", "-g", "1"],
                      ["spot", "--cancel", "w"], ["spot", "--for", "1m"]):  # fmt: skip
            result = there.run("prewarm", *wrong, "-n", "ahead")
            assert result.exit_code == 2, (wrong, result.output)
            assert len(result.output.splitlines()) == 1


def test_durations_are_read() -> None:
    assert [parse_duration(said, "--for") for said in ("90s", "1.5m", "2h", "1d", "7")] == [
        90,
        90,
        7200,
        86400,
        7,
    ]
    with pytest.raises(BadInput, match="15m"):
        parse_duration("soon", "--for")
