"""`pools apply` and `pools export` at live actors (without Ray): what changes, what comes of it, all of it or nothing.

Faults it stands for: a half-applied file, an error that does not say which line and which rule, a preview that is not
what then happens, an export that is not what runs, a second apply that finds something to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from random_cases import random_case
from shell_pools import ShellPools, shell_pools

from ray_pools.cli.changing import carry_out, plan
from ray_pools.config import load_with_warnings
from ray_pools.core import quota
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.preview import copied, preview, world_of
from ray_pools.core.system import System, make_world
from ray_pools.errors import Refused
from ray_pools.scenario import build_world, play_step

CONFIG = """\
pools:
  p: {capacity: {gpu: 4}, placement: none, grace_s: 60}
  q: {capacity: {gpu: 2}, placement: none}
policies:
  - {pool: p, requester: a, priority: 1, reserved: {gpu: 2}}
  - {pool: q, requester: a}
  - {pool: p, requester: b, priority: 9}
"""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[ShellPools]:
    with shell_pools(tmp_path, CONFIG) as made:
        yield made


def crowded(live: ShellPools) -> None:
    for id, requester, gpu in (
        ("b1", "b", 2),
        ("b2", "b", 2),
        ("a1", "a", 2),
        ("a2", "a", 2),
        ("b3", "b", 4),
    ):
        live.submit(id, requester, gpu)
    assert live.states() == {
        "b1": "allocated", "b2": "preempting", "a1": "allocated", "a2": "queued", "b3": "queued"
    }  # fmt: skip


def test_apply_shows_what_comes_of_it_and_that_comes(live: ShellPools, tmp_path: Path) -> None:
    crowded(live)
    file = tmp_path / "pools.yaml"
    file.write_text(CONFIG.replace("gpu: 4", "gpu: 3") + "  - {pool: q, requester: b, limit: {gpu: 1}}\n")
    before = live.seq()
    dry = live.run("apply", str(file), "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert dry.stdout.splitlines() == [
        "~ pool p: capacity gpu 4 -> 3",
        "+ policy of b on q: priority 0, limit gpu 1",
        "at once:",
        "  b1 of b would be preempted in p for a2",
        "  b3 of b would be rejected (p: exceeds_capacity, q: exceeds_capacity)",
        "nothing was changed (--dry-run)",
    ]
    assert live.seq() == before
    done = live.run("apply", str(file))
    assert done.stdout.splitlines()[-1] == "applied: this is configuration 2"
    live.settle()
    assert live.states() == {
        "b1": "preempting", "b2": "preempting", "a1": "allocated", "a2": "queued", "b3": "rejected"
    }  # fmt: skip


def test_a_second_apply_has_nothing_to_do(live: ShellPools, tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text(CONFIG.replace("grace_s: 60", "grace_s: 5") + "lease: {default_s: 90}\n")
    assert "~ lease: default_s 60 -> 90" in live.run("apply", str(file)).stdout
    before = live.seq()
    again = live.run("apply", str(file))
    assert (again.exit_code, again.stdout) == (0, "nothing to do: configuration 2 is this already\n")
    said = json.loads(live.run("apply", str(file), "--json").stdout)
    assert (said["changes"], said["applied"], said["version"]) == ([], False, 2)
    assert live.seq() == before


BROKEN = (
    ("reserved: {gpu: 2}", "reserved: {gpu: 9}", 5, "at most the pool's capacity 4"),
    ("{pool: q, requester: a}", "{pool: p, requester: a}", 6, "one policy per requester and pool"),
    (
        "requester: b, priority: 9",
        "requester: b, reserved: {gpu: 3}",
        7,
        "at most 2, since others reserve 2 of pool p's capacity 4 before it: a 2",
    ),
    ("requester: b, priority: 9", "requester: b, limit: {tpu: 3}", 7, "a key of pool p: gpu"),
    ("{pool: q, requester: a}", "{pool: z, requester: a}", 6, "the name of a pool: p, q"),
)
"""What stands in the file, what stands there instead, the line, and words of the error."""


def test_a_file_that_breaks_a_rule_changes_nothing_and_says_line_and_rule(
    live: ShellPools, tmp_path: Path
) -> None:
    file, before = tmp_path / "pools.yaml", live.seq()
    for old, new, line, words in BROKEN:
        file.write_text(CONFIG.replace(old, new).replace("grace_s: 60", "grace_s: 5"))
        done = live.run("apply", str(file))
        assert done.exit_code == 2
        assert f"pools.yaml:{line}" in done.stderr
        assert words in done.stderr
        assert "docs/rules.md, section 9" in done.stderr
    assert live.seq() == before


def test_pools_come_by_apply_and_a_pool_that_is_missing_in_the_file_stays(
    live: ShellPools, tmp_path: Path
) -> None:
    file = tmp_path / "pools.yaml"
    more = CONFIG.replace("policies:", "  r: {capacity: {gpu: 1}, placement: none}\npolicies:")
    file.write_text(more + "  - {pool: r, requester: c}\n")
    assert live.run("apply", str(file)).exit_code == 0
    live.submit("c1", "c", 1)
    live.until(c1="allocated")
    file.write_text(CONFIG)
    before = live.seq()
    refused = live.run("apply", str(file))
    assert (refused.exit_code, live.seq()) == (1, before)
    assert "pools pool delete r" in refused.stderr


def test_a_refused_change_leaves_no_actor_behind(live: ShellPools, tmp_path: Path, monkeypatch: Any) -> None:
    """Fault: actors of new pools that nobody knows of, after a change that was refused."""
    monkeypatch.setenv("RAY_POOLS_OPERATOR_KEY", "a-key-of-operators-that-is-long")
    key = json.loads(live.run("key", "new", "--json").stdout)
    live.ask("", op="change", changes=[["operators", {"key_sha256": key["key_sha256"]}]], operator="test")
    file = tmp_path / "pools.yaml"
    file.write_text(CONFIG.replace("policies:", "  r: {capacity: {gpu: 1}, placement: none}\npolicies:"))
    refused = live.run("apply", str(file))
    assert refused.exit_code == 1, refused.output
    assert "ray-pools:pool:r" not in live.shells


def test_a_change_for_another_version_is_refused(live: ShellPools) -> None:
    with live.client() as client, pytest.raises(Refused, match="at 1 by now, not at 0"):
        client.change([["unpolicy", "b", "p"]], since=0)


def test_a_change_that_another_came_before_is_planned_again(live: ShellPools) -> None:
    seen: list[int] = []

    def wanted(running: dict[str, Any]) -> list[list[Any]]:
        seen.append(running["version"])
        return [["unpolicy", "b", "p"]]

    with live.client() as client:
        made = plan(client, wanted)
        client.change([["unpolicy", "a", "q"]])
        assert carry_out(client, made, wanted) == 3
        assert seen == [1, 2]
        left = [(policy["requester"], policy["pool"]) for policy in client.config()["policies"]]
        assert ("b", "p") not in left
        assert ("a", "q") not in left


def test_who_is_always_overtaken_hears_so(live: ShellPools) -> None:
    with live.client() as client:

        def wanted(running: dict[str, Any]) -> list[list[Any]]:
            policies = [policy for policy in running["policies"] if policy["requester"] == "a"]
            if policies:  # another change, each time that this one is planned
                policy = {**policies[0], "priority": policies[0]["priority"] + 1}
                client.change([["policy", policy]])
            return [["unpolicy", "b", "p"]]

        with pytest.raises(Refused, match="all the time"):
            carry_out(client, plan(client, wanted), wanted)


FULL = """\
namespace: pools
pools:
  p:
    capacity: {gpu: 4, licence: 2, mcpu: 9000}
    queueing: strict
    grace_s: 7.5
    starvation_after_s: 10
    min_runtime_s: 3
    placement:
      labels: {kind: "yes"}
      node: {gpu: 2}
      warm: {gpu: 1}
      resources: {memory_mb: none, licence: [LICENCE, 1]}
      provision_timeout_s: 60
      strategy: SPREAD
  "q: it's": {capacity: {}, placement: none}
policies:
  - {pool: p, requester: "null", priority: -3, reserved: {gpu: 2}, limit: {gpu: 3}}
  - {pool: "q: it's", requester: "null"}
lease: {default_s: 90}
prewarm: {linger_s: 2.5}
limits: {waiting_per_requester: 9}
requesters: {"null": {key_sha256: KEY}}
""".replace("KEY", "ab" * 32)


def test_an_export_applies_to_no_change(live: ShellPools, tmp_path: Path) -> None:
    file = tmp_path / "full.yaml"
    file.write_text(FULL.replace("{capacity: {}", "{capacity: {gpu: 1}"))
    for name in ("p", "q"):
        live.ask("", op="change", changes=[["unpool", name]], operator="test")
    live.end_pools("", ["p", "q"])
    assert live.run("apply", str(file)).exit_code == 0
    exported = tmp_path / "exported.yaml"
    assert live.run("export", "-o", str(exported)).exit_code == 0
    again = live.run("apply", str(exported))
    assert (again.exit_code, again.stdout) == (0, "nothing to do: configuration 4 is this already\n")
    assert "grace_s: 7.5" in exported.read_text()
    assert "backfill" not in exported.read_text()  # as by default


# --- warnings


def warnings_of(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "w.yaml"
    file.write_text(text)
    return [said.rpartition("w.yaml:")[2] for said in load_with_warnings(file)[1]]


@pytest.mark.parametrize(
    ("pools", "policies", "wanted"),
    [
        ("p: {capacity: {gpu: 4}}", ["{pool: p, requester: a, reserved: {gpu: 2}}"], []),
        ("p: {capacity: {gpu: 4, step_run: 9}}", ["{pool: p, requester: a}"], []),
        (
            "p: {capacity: {gpu: 4, step_run: 9}}",
            ["{pool: p, requester: a, reserved: {gpu: 2}}"],
            ["2: pool p meters step_run and no policy reserves any; every request asks for one"],
        ),
        (
            "p: {capacity: {gpu: 4, mcpu: 900}}",
            ["{pool: p, requester: a, reserved: {gpu: 2}}"],
            ["2: pool p meters mcpu and no policy reserves any: a request that asks for mcpu is never"],
        ),
        (
            "p: {capacity: {gpu: 4, step_run: 9}}",
            [
                "{pool: p, requester: a, reserved: {gpu: 2, step_run: 1}}",
                "{pool: p, requester: b, reserved: {gpu: 1}}",
            ],
            [
                "5: the share of b on p can't be used: every request asks for one step_run, and none is reserved"
            ],
        ),
        (
            "p: {capacity: {gpu: 4, step_run: 9}}",
            [
                "{pool: p, requester: a, reserved: {gpu: 2, step_run: 1}}",
                "{pool: p, requester: b, reserved: {step_run: 1}}",
                "{pool: p, requester: c, reserved: {gpu: 1}, limit: {step_run: 0}}",
            ],
            [
                "5: the share of b on p can't be used by a request that asks for gpu",
                "6: the share of c on p can't be",
            ],
        ),
        (
            "p: {capacity: {gpu: 4}}\n  q: {capacity: {gpu: 4}}",
            ["{pool: p, requester: a, priority: 2}", "{pool: q, requester: a, reserved: {gpu: 2}}"],
            ["5: a tries pool p first (priority 2) and has no share there, but one on q"],
        ),
    ],
)
def test_what_is_legal_and_surely_not_meant(
    tmp_path: Path, pools: str, policies: list[str], wanted: list[str]
) -> None:
    lines = "".join(f"  - {policy}\n" for policy in policies)
    found = warnings_of(tmp_path, f"pools:\n  {pools}\npolicies:\n{lines}")
    assert len(found) == len(wanted), found
    for said, start in zip(found, wanted, strict=True):
        assert said.startswith(start)


def test_what_is_warned_of_is_true() -> None:
    """A share without `step_run` where it is metered: nothing is in it, and its owner gets nothing back."""
    policies = [PolicyConfig("p", "a", 0, {"gpu": 2}), PolicyConfig("p", "b", 9)]
    for metered, state in (({"gpu": 2}, "preempting@p"), ({"gpu": 2, "step_run": 9}, "allocated@p")):
        world = System({"p": PoolConfig("p", metered)}, policies)
        world.submit("b1", "b", {"gpu": 2, "step_run": 1})
        world.submit("a1", "a", {"gpu": 2, "step_run": 1})
        assert world.states()["b1"] == state


# --- previews


def test_states_of_different_moments_are_not_one_world() -> None:
    """Fault: a pool that has granted what the coordinator's copy knows as not yet taken is shown as one world."""
    world = System({"p": PoolConfig("p", {"gpu": 2})}, [PolicyConfig("p", "a")])

    def pool() -> dict[str, Any]:
        return {"p": {"state": world.pools["p"].state.dump(), "now": world.now, "deadlines": {}}}

    def coordinator() -> dict[str, Any]:
        return {"state": world.coordinator.state.dump(), "now": world.now}

    early_pool, early = pool(), coordinator()
    world.submit("a1", "a", {"gpu": 1, "step_run": 1})
    with pytest.raises(Refused, match="not of one moment"):
        world_of(early, pool())
    with pytest.raises(Refused, match="not of one moment"):
        world_of(coordinator(), early_pool)
    assert world_of(coordinator(), pool()).states() == world.states()


def test_a_preview_of_a_pool_that_does_not_answer_counts_on_the_others() -> None:
    policies = [PolicyConfig("p", "a", 1), PolicyConfig("q", "a")]
    world = System({name: PoolConfig(name, {"gpu": 1}) for name in "pq"}, policies)
    for id in ("a1", "a2", "a3"):
        world.submit(id, "a", {"gpu": 1, "step_run": 1})
    copy = world_of(
        {"state": world.coordinator.state.dump(), "now": 0.0},
        {"q": {"state": world.pools["q"].state.dump(), "now": 0.0, "deadlines": {}}},
    )
    seen = preview(copy, [("pool", PoolConfig("q", {"gpu": 2}), "q#1")])
    assert seen["granted"] == [{"id": "a3", "requester": "a", "pool": "q"}]


CHANGES = ("attach", "detach", "set_capacity", "submit", "cancel", "release")


def copy_of(world: System) -> System:
    return world_of(
        copied(world.coordinator),
        {
            name: {"state": pool.state.dump(), "now": world.now, "deadlines": dict(pool.deadlines)}
            for name, pool in world.pools.items()
        },
    )


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 9))]
)
def test_a_copy_goes_on_as_what_it_is_a_copy_of(block: int) -> None:
    """At each change of a random story: the same states, queues and causes, before and after it."""
    compared = 0
    for seed in range(block * 8, block * 8 + 8):
        case = random_case(seed)
        world = build_world(case, make_world)
        for step in case.steps:
            copy, known = copy_of(world), set(world.states())
            id = str(step.argument.get("id") if isinstance(step.argument, dict) else step.argument)
            over = id in known and id not in copy.states()  # what is over is not copied
            refused = play_step(world, step)
            if over or step.verb not in CHANGES:
                continue
            assert (play_step(copy, step) is None) == (refused is None), f"seed {seed}: {step}"
            live = {id: state for id, state in world.states().items() if id in copy.states()}
            assert copy.states() == live, f"seed {seed}: {step}"
            assert copy.queue() == world.queue(), f"seed {seed}: {step}"
            compared += 1
    assert compared > 50


def test_cordoning_is_seen_before(live: ShellPools) -> None:
    crowded(live)
    with live.client() as client:
        config = client.config()
        world = client.copy()
    pool = PoolConfig.from_wire(config["pools"][0])._replace(state=quota.DRAINING)
    seen = preview(world, [("pool", pool, config["uids"]["p"])])
    assert [each["id"] for each in seen["rejected"]] == ["b3"]
    assert seen["moved"] == []  # a2 was nominated in p, and waits in q from here on
    assert [each["id"] for each in seen["unnominated"]] == ["a2"]


def test_a_changed_store_is_said_to_have_no_effect_yet(live: ShellPools, tmp_path: Path) -> None:
    """Else an operator believes the logs to be where the file says, and backs up the wrong place."""
    file = tmp_path / "pools.yaml"
    file.write_text(f"store: {tmp_path}/elsewhere\n{CONFIG}")
    result = live.run("apply", str(file), "--dry-run")
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        f"warning: store sqlite://{tmp_path}/elsewhere is not used: the pools that run keep"
    )
    assert "until `pools down` and `pools up`" in line
    file.write_text(CONFIG)
    assert live.run("apply", str(file), "--dry-run").stderr == ""
