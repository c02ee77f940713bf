"""What a waiter, a refused request and a grant are told (docs/rules.md sections 3 to 6), with the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_pools.core import explain
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.system import System, make_world
from ray_pools.errors import BadInput
from ray_pools.scenario import run_files


def world(*policies: PolicyConfig, gpus: int = 8, **options: Any) -> System:
    return System({"datacenter": PoolConfig("datacenter", {"gpu": gpus}, **options)}, policies)


def policy(requester: str, priority: int = 0, reserved: int = 0, limit: int | None = None) -> PolicyConfig:
    limits = {} if limit is None else {"gpu": limit}
    return PolicyConfig("datacenter", requester, priority, {"gpu": reserved} if reserved else {}, limits)


def submit(system: System, id: str, requester: str, gpus: int, preemptible: bool = True) -> None:
    system.submit(id, requester, {"gpu": gpus, "step_run": 1}, preemptible)


def why(system: System, id: str) -> dict[str, Any]:
    pool = system.pools["datacenter"]
    return explain.why(pool, pool.state.attempts[id])


def test_waiting_capacity_names_what_is_needed_and_who_borrows_it() -> None:
    system = world(policy("sandbox"), policy("me", reserved=4))
    submit(system, "s", "sandbox", 3)
    submit(system, "mine", "me", 4)
    submit(system, "w", "me", 3)
    said = why(system, "w")
    assert said["cause"] == "waiting_capacity"
    assert said["numbers"] == {"short": {"gpu": 2}, "borrowed": {"sandbox": 3}, "used": 4, "reserved": 4}
    assert said["text"] == (
        "2 gpu more needed in datacenter; 3 are borrowed by sandbox, none can be reclaimed:"
        " you have 4 of your 4 reserved"
    )
    assert (said["position"], said["waiting"], said["in_share"]) == (1, 1, False)


def test_waiting_capacity_in_the_share_says_that_the_borrower_is_still_shielded() -> None:
    system = world(policy("sandbox"), policy("me", reserved=4), min_runtime_s=60.0)
    submit(system, "s", "sandbox", 8)
    submit(system, "w", "me", 4)
    assert why(system, "w")["text"].endswith("none can be reclaimed yet: it has not run for 60 s")


def test_at_limit_names_use_and_limit() -> None:
    system = world(policy("me", limit=4))
    submit(system, "a", "me", 3)
    submit(system, "b", "me", 2)
    said = why(system, "b")
    assert said["cause"] == "at_limit"
    assert said["numbers"] == {"key": "gpu", "asked": 2, "used": 3, "limit": 4}
    assert said["text"] == "me has 3 of its limit of 4 gpu, and it asks for 2 more"


def test_reserved_in_use_names_the_non_preemptible_work() -> None:
    system = world(policy("me", reserved=4))
    submit(system, "a", "me", 3, preemptible=False)
    submit(system, "b", "me", 2, preemptible=False)
    said = why(system, "b")
    assert said["cause"] == "reserved_in_use"
    assert said["numbers"] == {"key": "gpu", "asked": 2, "used": 3, "reserved": 4}


def test_awaiting_preemption_names_the_victims_and_the_time_they_have() -> None:
    system = world(policy("low"), policy("high", priority=9), grace_s=30.0)
    submit(system, "l", "low", 8)
    submit(system, "h", "high", 4)
    system.advance(10.0)
    said = why(system, "h")
    assert said["cause"] == "awaiting_preemption"
    assert said["numbers"] == {"short": {"gpu": 4}, "stopping": ["l"], "ending": [], "left_s": 20.0}
    victim = why(system, "l")
    assert victim["text"] == "it is being preempted, and has 20 s to stop"


def test_behind_head_names_who_stands_before() -> None:
    system = world(policy("a"), policy("b"), gpus=4, queueing="strict")
    submit(system, "x", "a", 3)
    submit(system, "big", "a", 4)
    submit(system, "small", "b", 1)
    said = why(system, "small")
    assert said["cause"] == "behind_head"
    assert said["numbers"] == {"behind": "big", "its_cause": "waiting_capacity", "its_shortage": {"gpu": 3}}
    assert said["position"] == 2


@pytest.mark.parametrize(
    ("gpus", "borrowed", "takers"),
    [(4, {}, []), (6, {"gpu": 2}, ["boss", "owner"])],
)
def test_a_grant_says_what_is_borrowed_and_who_could_take_it(
    gpus: int, borrowed: dict[str, int], takers: list[str]
) -> None:
    system = world(
        policy("me", 5, reserved=4), policy("owner", 1, reserved=4), policy("boss", 9), policy("equal", 5)
    )
    submit(system, "g", "me", gpus)
    said = why(system, "g")
    assert (said["borrowed"], said["takers"], said["in_share"]) == (borrowed, takers, not borrowed)


def test_of_two_grants_the_newer_is_the_borrowed_one() -> None:
    system = world(policy("me", reserved=3))
    submit(system, "old", "me", 2)
    submit(system, "new", "me", 4)
    assert (why(system, "old")["borrowed"], why(system, "new")["borrowed"]) == ({}, {"gpu": 3})


@pytest.mark.parametrize(
    ("cause", "gpus", "preemptible", "text"),
    [
        ("exceeds_capacity", 10, True, "it asks for 10 gpu; datacenter has 8 in all"),
        ("exceeds_limit", 7, True, "it asks for 7 gpu; the limit of me on datacenter is 6"),
        (
            "exceeds_reserved",
            5,
            False,
            "it is not preemptible and asks for 5 gpu; me has 4 reserved on datacenter",
        ),
    ],
)
def test_a_refusal_names_the_number_that_was_exceeded(
    cause: str, gpus: int, preemptible: bool, text: str
) -> None:
    mine = policy("me", reserved=4, limit=6)
    system = world(mine)
    submit(system, "r", "me", gpus, preemptible)
    assert system.reasons("r") == {"datacenter": cause}
    assert text == explain.admission_text(
        cause, "me", "datacenter", (("gpu", gpus),), preemptible, {"gpu": 8}, mine
    )


@pytest.mark.parametrize("name", ["coordinator", "all"])
def test_a_pool_has_no_name_that_commands_use_for_themselves(name: str) -> None:
    """Else `restart: coordinator` and `pools log coordinator` would mean two things."""
    with pytest.raises(BadInput, match="another name: commands use"):
        System({name: PoolConfig(name, {"gpu": 1})}, [])


def test_a_failing_scenario_says_why(tmp_path: Path) -> None:
    """The sentence that live status gives stands beside what was wanted and what came."""
    file = tmp_path / "policy.yaml"
    file.write_text(
        """
- name: two-that-do-not-get-in
  pools: {p: {capacity: {gpu: 4}}}
  policies: [{pool: p, requester: me, limit: {gpu: 2}}]
  steps:
    - submit: {id: a, requester: me, resources: {gpu: 2}}
    - submit: {id: b, requester: me, resources: {gpu: 1}}
      expect: {b: allocated@p}
    - submit: {id: c, requester: me, resources: {gpu: 3}}
      expect: {c: queued}
"""
    )
    waits, refused = run_files([file], make_world).failures
    assert "why    p: me has 2 of its limit of 2 gpu, and it asks for 1 more" in waits.text()
    assert "why    p: it asks for 3 gpu; the limit of me on p is 2" in refused.text()
