"""Leases' times and those of prewarming, changed where a coordinator runs (docs/operations.md, "Holders that die").

Faults it stands for: an edited `lease:` that `pools up` calls done and nobody goes by; one that is gone after a
restart; a time out of all bounds that gets past `pools up`.
"""

from __future__ import annotations

from typing import Any

import pytest
from test_shells import Play, Shells, play  # noqa: F401 - a fixture

from ray_pools.actors.deploy import timings_difference
from ray_pools.config import Config
from ray_pools.core import records as ev
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.errors import BadInput
from ray_pools.log_words import words
from ray_pools.store import open_reader

MADE_WITH = {
    "lease_default_s": 60.0,
    "lease_renew_s": 10.0,
    "prewarm_period_s": 10.0,
    "prewarm_linger_s": 30.0,
}


async def change(shells: Shells, options: dict[str, Any]) -> list[list[Any]]:
    """What `pools up` does with a file that says so."""
    changes = timings_difference(await shells.ask("config"), options)
    if changes:
        await shells.ask("change", changes=changes)
    return changes


def test_other_times_reach_who_connects_and_outlive_a_restart(play: Play) -> None:  # noqa: F811
    async def story(shells: Shells) -> None:
        shells.coordinator.options.update(MADE_WITH)
        assert (await shells.ask("ping"))["lease"] == {"default_s": 60.0, "renew_s": 10.0}
        assert await change(shells, MADE_WITH) == []
        wanted = {**MADE_WITH, "lease_default_s": 20, "lease_renew_s": 2, "prewarm_linger_s": 5}
        assert await change(shells, wanted) == [
            ["lease", {"default_s": 20.0, "renew_s": 2.0}],
            ["prewarm", {"period_s": 10.0, "linger_s": 5.0}],
        ]
        assert await change(shells, wanted) == []
        shells.start()
        assert (await shells.ask("ping"))["lease"] == {"default_s": 20.0, "renew_s": 2.0}
        # a coordinator that is made anew from another file goes by the log until it is changed
        shells.coordinator.options.update(MADE_WITH)
        assert len(await change(shells, MADE_WITH)) == 2
        assert (await shells.ask("ping"))["lease"] == {"default_s": 60.0, "renew_s": 10.0}
        state = shells.coordinator.state
        assert CoordinatorState.load(state.dump()).digest() == state.digest()
        reader = open_reader(shells.address, "coordinator")
        said = [words(event) for row in reader.read() if isinstance(event := ev.unpack(row.body), ev.Changed)]
        reader.close()
        assert said[1:] == [
            "configuration 2: lease: default_s 20, renew_s 2; prewarm: period_s 10, linger_s 5",
            "configuration 3: lease: default_s 60, renew_s 10; prewarm: period_s 10, linger_s 30",
        ]

    play(story)


def test_bad_times_change_nothing(play: Play) -> None:  # noqa: F811
    async def story(shells: Shells) -> None:
        before = await shells.ask("config")
        for section, values, field in (
            ("lease", {"default_s": 10, "renew_s": 6}, "lease.renew_s"),
            ("lease", {"default_s": 10, "renew_s": 0}, "lease.renew_s"),
            ("lease", {"default_s": "10"}, "lease.default_s"),
            ("lease", {"default_s": -1}, "lease.default_s"),
            ("lease", {"renew": 1}, "lease.renew"),
            ("prewarm", {"period_s": 0}, "prewarm.period_s"),
            ("prewarm", {"linger_s": float("nan")}, "prewarm.linger_s"),
        ):
            with pytest.raises(BadInput) as caught:
                await shells.ask("change", changes=[["unpolicy", "high", "p"], [section, values]])
            assert caught.value.field == field
        assert await shells.ask("config") == before

    play(story)


def test_an_older_coordinator_keeps_the_times_that_it_was_made_with() -> None:
    assert timings_difference({"pools": []}, MADE_WITH) == []


def test_an_actor_made_without_times_is_left_alone_by_who_names_none() -> None:
    assert timings_difference({"timings": {"lease": {}, "prewarm": {}}}, {"prewarm": False}) == []


def test_a_configuration_names_them_as_the_coordinator_takes_them() -> None:
    sections = Config(pools={}).timings()
    assert {
        f"{at}_{name}": value for at, values in sections.items() for name, value in values.items()
    } == MADE_WITH
