"""Every state that the real core can reach in small worlds (explorer.py), and every rule of the protocol left out.

Faults it stands for: whatever messages that are lost, repeated and overtaken, crashes, zombies, full disks, cancels
and changes can do to coordinator and pools between any two steps. docs/protocol.md is what must hold.
"""

from __future__ import annotations

from array import array

import explorer
import pytest
from explorer_cores import ASIDE, KEY
from explorer_mutants import MUTANTS, Mutant

from ray_pools.core.coordinator import Coordinator
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.link import Link
from ray_pools.core.pool import Pool
from ray_pools.core.pool_state import PoolState

pytestmark = pytest.mark.faults


def _lines(table: str) -> list[str]:
    return [line for line in table.splitlines() if line]


def _holds(line: str) -> None:
    config, limit, _ = explorer.parsed(line)
    result = explorer.explore(config, limit)
    assert not result.violation, "\n".join([result.violation, *result.path])
    assert result.complete, f"{result.states} states, and not all"
    assert result.ends, "nothing is ever settled"


@pytest.mark.parametrize("line", _lines(explorer.TABLE))
def test_all_states_hold(line: str) -> None:
    _holds(line)


@pytest.mark.slow
@pytest.mark.parametrize("line", _lines(explorer.DEEP))
def test_all_states_hold_in_larger_worlds(line: str) -> None:
    _holds(line)


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_rule_left_out_is_caught(mutant: Mutant) -> None:
    config, limit, _ = explorer.parsed(f"{mutant.configuration} mutant={mutant.name}")
    result = explorer.explore(config, limit)
    assert mutant.caught_by in result.violation, result
    assert result.violation, f"all {result.states} states hold"
    assert result.path, "there is a way to it"


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", sorted({m.configuration for m in MUTANTS} - set(_lines(explorer.TABLE + explorer.DEEP)))
)
def test_without_the_mutant_the_same_world_holds(line: str) -> None:
    _holds(line)


def test_the_shortest_way_is_told_step_by_step() -> None:
    config, limit, _ = explorer.parsed("AB 11 mutant=grant-without-taken")
    assert [step[: len("A 1 message of C")] for step in explorer.explore(config, limit).path] == [
        "C 1 submit 0",
        "A 1 message of C",
    ]


def test_nothing_that_a_core_remembers_is_overlooked() -> None:
    """Two cores count as one state when they are alike in these: a new attribute must be one of them, or left aside."""
    cores = (Pool("A", PoolState(), 1, 0.0), Coordinator(CoordinatorState(), 1, 0.0), Link("", "A"))
    for core in cores:
        assert set(vars(core)) == {*KEY[type(core)].split(), *ASIDE[type(core)].split()}


def test_fair_steps_in_circles_are_seen() -> None:
    assert explorer.in_circles(3, array("i", [0, 1]), array("i", [1, 2])) is None
    assert explorer.in_circles(3, array("i", [0, 1, 2]), array("i", [1, 2, 1])) == 1
