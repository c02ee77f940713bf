"""Seeded days full of faults (`fault_simulation`; the fault model stands in `fault_processes`), and what a broken core
looks like there.

Faults it stands for: something acknowledged that is lost, a grant in two pools or twice, room that stays booked for
nobody, a request that waits for ever, a log that gives another state than its actor had (docs/rules.md 10.1 to 10.3,
10.6, 10.7). A seed that fails is told by `python tests/fault_simulation.py --seed N --trace`.
"""

from __future__ import annotations

from collections import Counter

import pytest
from fault_mutants import MUTANTS
from fault_processes import digest_of
from fault_simulation import STEPS, caught, play
from fault_world import World

SEEDS_PER_BLOCK = 200

# What a day must bring, or it shows nothing.
_HAPPENS = (
    *(
        "lost",
        "repeated",
        "replaced",
        "killed",
        "process ends",
        "bad disk",
        "failed turn",
        "clock set",
        "silent",
    ),
    *(
        "group lost",
        "crash in a turn",
        "snapshot",
        "forget",
        "refused",
        "Nominated",
        "Taken",
        "Opened",
        "Changed",
    ),
    *("log lost", "DeclaredLost", "BegunAnew"),
    *("Endedreturned", "Endedstopped", "Endedexpired", "Askedgive", "Askedyield", "id_in_use for submit"),
)

# Mutant -> at least one of the first so many seeds notices it. Not here: R2, without which a request goes in circles
# for as long as its messages are late, which at the end of these days they are no more (`explorer.py` finds it).
# And the link's check for gaps: what was acknowledged before was durable or without effect, so that nothing is
# missed by it.
_CAUGHT_WITHIN = {
    "reply before sync": 20,
    "log not fenced": 20,
    "grant without Taken": 20,
    "booking not undone on close": 20,
    "cancel does not fence": 10,
    "k+1 opens before k has ended": 100,
    "granted attempt given back": 40,
    "taken is granted unjudged": 40,
    "R1": 40,
    "R3": 600,
    "R7": 40,
    "zombies are heard": 1000,
    "groups of a lost pool stay": 40,
    "a lost pool keeps its uid": 40,
    "a shorter log is heard": 60,
}


def blocks(first: int, seeds: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first, first + seeds):
        seen += play(seed).seen
    return seen


@pytest.mark.parametrize("block", range(10))
def test_whatever_goes_wrong_no_promise_is_broken(block: int) -> None:
    seen = blocks(block * SEEDS_PER_BLOCK, SEEDS_PER_BLOCK)
    rare = {what: seen[what] for what in _HAPPENS if seen[what] < 3}
    assert not rare, f"these days hardly have: {rare}"


def test_a_seed_gives_the_same_day_again() -> None:
    """Fault: a failure's seed does not reproduce it."""

    def logs(world: World) -> dict[str, str]:
        return {who: digest_of(disk.rows) for who, disk in world.disks.items()}

    for seed in range(5):
        assert logs(play(seed)) == logs(play(seed, traced=True))


def noticed_within(mutant: str, seeds: int) -> bool:
    return any(caught(mutant, [seed]) for seed in range(seeds))


@pytest.mark.parametrize(
    "mutant",
    ["reply before sync", "log not fenced", "cancel does not fence", "R7", "groups of a lost pool stay"],
)
def test_a_broken_core_is_noticed(mutant: str) -> None:
    """Fault: the checks look away."""
    assert noticed_within(mutant, _CAUGHT_WITHIN[mutant])


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("mutant", _CAUGHT_WITHIN)
def test_every_mutant_that_can_be_noticed_is(mutant: str) -> None:
    assert mutant in MUTANTS
    assert noticed_within(mutant, _CAUGHT_WITHIN[mutant])


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("block", range(20))
def test_more_and_longer_days(block: int) -> None:
    """20,000 seeds beyond those of every day; and some days that are ten times as long."""
    blocks(10_000 + block * 1000, 1000)
    for seed in range(10):
        play(100_000 + block * 10 + seed, 10 * STEPS)
