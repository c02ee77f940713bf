"""What a team got, read from the logs (docs/rules.md sections 1, 4 and 6).

Faults it stands for: time in a share that was another at the time, a grant that is being stopped counted as the team's
own share, a wait or a preemption counted for the wrong team, a quantile that is off by one.
"""

from __future__ import annotations

import itertools

from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.system import System
from ray_pools.log_usage import quantile, team_usage
from ray_pools.store import open_store

_labels = itertools.count()


def kept(world: System) -> str:
    address = f"memory:replay-{next(_labels)}"
    for name, rows in world.logs.items():
        store = open_store(address, name if name == "coordinator" else f"pool:{name}")
        store.open()
        store.append(rows, 0)
        store.close()
    return address


def test_time_is_split_at_the_reserved_share_as_it_was_at_each_moment() -> None:
    pools = {"a": PoolConfig("a", {"gpu": 8}, grace_s=5.0)}
    world = System(pools, [PolicyConfig("a", "ml", 1, {"gpu": 2}), PolicyConfig("a", "ops", 1, {"gpu": 6})])
    world.submit("one", "ml", {"gpu": 2})
    world.submit("two", "ml", {"gpu": 6}, retries=1)
    world.advance(10.0)  # ml: 2 in share, 6 borrowed
    world.submit("mine", "ops", {"gpu": 6})
    world.advance(5.0)  # `two` is preempted and holds for its grace; `mine` waits
    world.advance(10.0)  # ml 2 in share, ops 6 in share
    world.attach(PolicyConfig("a", "ops", 1, {"gpu": 1}))
    world.advance(10.0)  # ops: 1 in share, 5 borrowed
    for id in ("one", "mine", "two"):
        world.release(id)
    usage = team_usage(kept(world), ["a"])
    assert (usage["ml"].in_share_s, usage["ml"].borrowed_s) == (2 * 35.0, 6 * 15.0)
    assert (usage["ops"].in_share_s, usage["ops"].borrowed_s) == (6 * 10.0 + 1 * 10.0, 5 * 10.0)
    assert (usage["ml"].suffered, usage["ml"].caused) == (1, 0)
    assert (usage["ops"].suffered, usage["ops"].caused) == (0, 1)
    assert usage["ops"].waits_s == [5.0]
    assert usage["ml"].waits_s == [0.0, 0.0]
    later = team_usage(kept(world), ["a"], since_s=30.0)
    assert later["ml"].in_share_s == 2 * 5.0
    assert later["ops"].waits_s == []


def test_quantiles() -> None:
    assert quantile([], 0.5) is None
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert [quantile([float(n) for n in range(1, 101)], share) for share in (0.5, 0.95, 1.0)] == [50, 95, 100]
