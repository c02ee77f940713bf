"""Turns of an actor that carry out several commands at once (docs/protocol.md, "Persist before you speak").

Fault it stands for: what one command of a turn is to be told can't be said any more after another of the same turn, and
the callers behind it are never answered.
"""

from __future__ import annotations

import asyncio

import pytest
from test_shells import Shells

from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.store.memory import forget


def test_a_pool_that_speaks_in_the_turn_in_which_it_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        shells = Shells(monkeypatch)
        shells.start()
        pool, policy = PoolConfig("p", {"gpu": 2}).to_wire(), PolicyConfig("p", "low").to_wire()
        message = list(shells.pool.core.outgoing())
        results = await asyncio.wait_for(
            asyncio.gather(
                shells.coordinator.command(
                    [{"op": "change", "changes": [["pool", pool, "p#1"], ["policy", policy]]}]
                ),
                shells.coordinator.command([{"op": "exchange", "pool": "p", "message": message}]),
                shells.coordinator.command([{"op": "change", "changes": [["unpool", "p"]]}]),
                shells.coordinator.command([{"op": "config"}]),
            ),
            10.0,
        )
        assert results[0] == [{"version": 1}]
        assert results[2] == [{"version": 2}]
        assert results[3][0]["pools"] == []
        assert shells.coordinator.core.outgoing("p").items == []
        shells.stop()
        forget(shells.address)

    asyncio.run(main())
