"""The order that a pool keeps of those who wait (docs/rules.md section 5), through changes that come together.

Fault it stands for: an attempt takes the place of one of the same request in the same turn, and the place of the wrong
one is given up: the pool then looks at a kind that nobody waits in, and the request waits for ever.
"""

from __future__ import annotations

from typing import Any

import pytest

from ray_pools.core import records as ev
from ray_pools.core import walk
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.pool_state import PoolState


def configured(version: int) -> ev.Configured:
    return ev.Configured(
        version, "p#1", PoolConfig("p", {"gpu": 2}).to_wire(), [PolicyConfig("p", "t").to_wire()]
    )


def queued(id: str, k: int, age: int, *, owned: bool) -> ev.Queued:
    return ev.Queued(id, k, owned, "t", [["gpu", 2]], True, age, 0.0, 0.0, {})


@pytest.mark.parametrize("owned_at_last", [True, False])
def test_an_attempt_that_replaces_another_of_its_request_stands_in_its_place(owned_at_last: bool) -> None:
    state = PoolState()

    def happens(*events: Any) -> None:
        for event in events:
            state.apply(event, 0.0)

    def first() -> str | None:
        attempt, _ = walk.first(state, 0.0)
        return attempt and attempt.id

    # both kinds are known, the one that is needed at last for longer
    happens(configured(1), queued("a", 1, 1, owned=owned_at_last), ev.Ended("a", 1, "withdrawn", ""))
    happens(queued("r", 1, 2, owned=not owned_at_last))
    assert first() == "r"
    happens(configured(2), ev.Ended("r", 1, "withdrawn", ""), queued("r", 2, 2, owned=owned_at_last))
    assert first() == "r"
    happens(ev.Ended("r", 2, "withdrawn", ""))
    assert first() is None
    assert state.queue.ordered(state.ledger) == []
