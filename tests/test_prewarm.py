"""The wish for nodes: what is in it, how it is capped, how long it lingers, and how it is sent again and again.

Faults: a register that others overwrite, a GCS that is down, a wish with an amount that stops all scaling.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_pools.actors.autoscaler import COORDINATOR, REGISTER, Standing, Wanted, wanted_of
from ray_pools.actors.prewarm import Prewarmer
from ray_pools.core.bundles import Bundle, resource_totals
from ray_pools.core.config_rules import DRAINING, PolicyConfig, PoolConfig
from ray_pools.core.demand import pool_views
from ray_pools.core.feasible import Cluster, NodeType
from ray_pools.core.prewarm import Lingering, PoolView, Wish, clamp, target
from ray_pools.core.system import make_world

WAIT_S = 30.0
A100 = {"labels": {"type": "A100"}, "node": {"gpu": 4}}


def asks(*gpus: int) -> list[tuple[dict[str, int], dict[str, Any]]]:
    return [({"gpu": count, "step_run": 1}, {}) for count in gpus]


def of_gpus(*gpus: float) -> list[Bundle]:
    return [{"CPU": 1.0, "GPU": float(count)} for count in gpus]


def view(**what: Any) -> PoolView:
    return PoolView(
        what.pop("name", "p"), what.pop("capacity", {"gpu": 8}), what.pop("placement", A100), **what
    )


@pytest.mark.parametrize(
    ("pool", "bundles"),
    [
        (view(held=asks(2), nominated=asks(1), waiting=asks(3)), of_gpus(2, 1, 3)),
        (view(held=asks(8)), of_gpus(4, 4)),
        # only what fits the capacity: the 4 do not, the 2 behind them do
        (view(held=asks(4, 2), waiting=asks(4, 2, 1)), of_gpus(4, 2, 2)),
        (view(capacity={"gpu": 8, "step_run": 1}, waiting=asks(1, 1)), of_gpus(1)),
        # a floor is filled up to, not added
        (view(held=asks(3), placement={**A100, "warm": {"gpu": 4}}), of_gpus(3, 1)),
        (view(held=asks(4, 1), placement={**A100, "warm": {"gpu": 4}}), of_gpus(4, 1)),
        (view(placement={**A100, "warm": {"gpu": 6}}), of_gpus(3, 3)),
        # announced capacity comes on top, as much of it as the capacity has room for
        (view(held=asks(4), announced=asks(4, 4)), of_gpus(4, 4)),
        (view(held=asks(6), announced=asks(8)), of_gpus(3, 3, 2)),
        # what can be no group is its requester's trouble
        (view(held=asks(1), waiting=[({"gpu": 2}, {"bundles": [{"gpu": 1}]}), *asks(2)]), of_gpus(1, 2)),
        (view(waiting=[({"gpu": 2}, {"placement": "none"}), *asks(1)]), of_gpus(1)),
    ],
)
def test_what_is_wished(pool: PoolView, bundles: list[Bundle]) -> None:
    (wish,) = target([pool])
    assert wish == Wish("p", bundles, {"type": "A100"}, {"GPU": 8.0})


def test_pools_that_only_count_or_rest_have_no_wish() -> None:
    assert target([view(placement=None, held=asks(1)), view(), view(held=[({"step_run": 1}, {})])]) == []


def test_equal_pools_in_any_order_give_the_same_wish() -> None:
    pools = [view(name=name, held=asks(1)) for name in "cab"]
    assert target(pools) == target(reversed(pools))
    assert [wish.pool for wish in target(pools)] == ["a", "b", "c"]


@given(
    st.integers(0, 20),
    st.lists(st.integers(1, 9), max_size=8),
    st.lists(st.integers(1, 9), max_size=8),
    st.integers(0, 20),
)
def test_never_above_capacity(capacity: int, held: list[int], waiting: list[int], warm: int) -> None:
    placement = {**A100, "warm": {"gpu": min(warm, capacity)}}
    for wish in target(
        [view(capacity={"gpu": capacity}, held=asks(*held), waiting=asks(*waiting), placement=placement)]
    ):
        assert 0 < wish.total("GPU") <= capacity
        assert clamp(wish) == wish


def test_the_clamp_lets_no_amount_through_that_stops_all_scaling() -> None:
    wish = Wish("p", [{"GPU": -1.0}, {"GPU": 4.0, "CPU": 0.0}, {"GPU": 5.0}, {"GPU": 4.0}], {}, {"GPU": 8.0})
    assert clamp(wish).bundles == [{"GPU": 4.0}, {"GPU": 4.0}]


def wish_of(*gpus: float, pool: str = "p") -> Wish:
    return Wish(pool, of_gpus(*gpus), {}, {"GPU": 8.0})


def test_a_wish_that_ended_lingers() -> None:
    lingering = Lingering(30.0)
    assert lingering.update([wish_of(4)], 0.0) == [wish_of(4)]
    assert lingering.update([], 10.0) == [wish_of(4)]
    assert lingering.next_end() == 40.0
    assert lingering.wanted(39.9) == [wish_of(4)]
    assert lingering.wanted(40.0) == []
    assert lingering.next_end() is None


def test_what_lingers_is_the_highest_total_not_the_sum() -> None:
    lingering = Lingering(30.0)
    lingering.update([wish_of(4, 2)], 0.0)
    assert lingering.update([wish_of(3)], 5.0)[0].total("GPU") == 6
    assert lingering.update([wish_of(2, 2)], 10.0)[0].total("GPU") == 6
    assert lingering.update([wish_of(4, 4)], 15.0) == [wish_of(4, 4)]
    assert lingering.update([], 50.0)[0].total("GPU") == 8
    assert lingering.update([wish_of(1, pool="q")], 60.0) == [wish_of(4, 4), wish_of(1, pool="q")]
    assert lingering.wanted(80.0) == [wish_of(1, pool="q")]


def test_without_linger_nothing_stays() -> None:
    lingering = Lingering(0.0)
    lingering.update([wish_of(4)], 0.0)
    assert lingering.update([wish_of(1)], 1.0) == [wish_of(1)]
    assert lingering.update([], 1.0) == []


@given(st.lists(st.tuples(st.lists(st.integers(1, 4), max_size=3), st.floats(0, 20)), max_size=12))
def test_lingering_is_the_most_of_the_last_while(steps: list[tuple[list[int], float]]) -> None:
    lingering, now, history = Lingering(30.0), 0.0, []
    for gpus, pause_s in steps:
        total = sum(wish.total("GPU") for wish in lingering.update([wish_of(*gpus)] if gpus else [], now))
        for index, (_, ended_at) in enumerate(history):
            if ended_at is None and history[index][0] != gpus:
                history[index] = (history[index][0], now)
        if not history or history[-1][0] != gpus or history[-1][1] is not None:
            history.append((gpus, None))
        lately = [sum(past) for past, ended_at in history if ended_at is None or ended_at + 30.0 > now]
        assert total == max(lately)
        now += pause_s


class Register:
    """The autoscaler's register: takes the last wish, and says that one came. What else lives there, a test says."""

    def __init__(self, *, v1: bool = False) -> None:
        self.calls: queue.Queue[tuple[list[Bundle], list[dict[str, str]]]] = queue.Queue()
        self.down = 0
        self.open = threading.Event()
        self.open.set()
        self.v1 = v1
        self.known: Cluster | None = None
        self.stands: Wanted = Counter()
        self.others: Wanted = Counter()
        self.refuses = False
        self.coordinator = False
        self.looks = 0
        self.written: queue.Queue[Wanted] = queue.Queue()

    def send(self, bundles: Sequence[Bundle], selectors: Sequence[Mapping[str, str]], again: bool) -> str:
        assert self.open.wait(WAIT_S)
        if self.down:
            self.down -= 1
            raise ConnectionError("the GCS is down")
        ours = wanted_of(bundles, selectors, not self.v1)
        self.stands = self.others + ours if self.coordinator else ours
        self.calls.put((list(bundles), [dict(each) for each in selectors]))
        return COORDINATOR if self.coordinator else REGISTER

    def write(self, bundles: Sequence[Bundle], selectors: Sequence[Mapping[str, str]]) -> None:
        self.stands = wanted_of(bundles, selectors)
        self.others = Counter()
        self.written.put(self.stands)

    def version(self) -> str:
        return "v1" if self.v1 else "v2"

    def cluster(self) -> Cluster | None:
        return self.known

    def standing(self) -> Standing:
        self.looks += 1
        return Standing(self.stands, self.stands if self.refuses else Counter())

    def has_coordinator(self) -> bool:
        return self.coordinator

    def starting(self) -> dict[str, int]:
        return {}

    def next_gpus(self) -> float:
        return resource_totals(self.calls.get(timeout=WAIT_S)[0]).get("GPU", 0.0)


def prewarmer(register: Register, period_s: float = 1000.0, linger_s: float = 0.0) -> Prewarmer:
    return Prewarmer(register, period_s, linger_s)


def test_a_wish_is_sent_with_its_selectors_and_taken_back() -> None:
    register = Register()
    warm = prewarmer(register)
    warm.update([Wish("p", of_gpus(4, 4), {"type": "A100"}), Wish("q", of_gpus(1), {})])
    bundles, selectors = register.calls.get(timeout=WAIT_S)
    assert bundles == of_gpus(4, 4, 1)
    assert selectors == [{"type": "A100"}, {"type": "A100"}, {}]
    warm.update([])
    assert register.next_gpus() == 0
    warm.close()


def test_the_first_empty_wish_is_sent_since_a_predecessors_may_stand() -> None:
    register = Register()
    warm = prewarmer(register)
    warm.update([])
    assert register.next_gpus() == 0
    warm.update([])
    warm.close()
    assert register.calls.empty()


def test_what_changes_during_a_call_goes_into_the_next_one() -> None:
    register = Register()
    register.open.clear()
    warm = prewarmer(register)
    for count in (1, 2, 3, 4, 3, 2, 8):
        warm.update([wish_of(count)])
    register.open.set()
    sent = [register.next_gpus()]
    while sent[-1] != 8:
        sent.append(register.next_gpus())
    assert len(sent) <= 2
    warm.close()


def test_another_period_holds_from_the_change_on() -> None:
    register = Register()
    warm = prewarmer(register)
    warm.update([wish_of(3)])
    assert register.next_gpus() == 3
    warm.go_by(0.01, 0.0)  # while it waits for the end of the longer one
    assert register.next_gpus() == 3
    warm.close()


def test_the_wish_is_sent_again_for_somebody_may_have_overwritten_it() -> None:
    register = Register()
    warm = prewarmer(register, period_s=0.01)
    warm.update([wish_of(4)])
    assert [register.next_gpus() for _ in range(3)] == [4, 4, 4]
    warm.clear()
    while register.next_gpus():
        pass
    warm.close()
    assert register.calls.empty(), "an empty wish is not repeated: others may use the register"


def test_a_gcs_that_is_down_is_told_and_tried_again() -> None:
    register = Register()
    register.down = 2
    warm = prewarmer(register)
    warm.update([wish_of(4)])
    assert register.next_gpus() == 4
    warm.close()
    status = warm.status()
    assert status["wanted"] == {"p": {"bundles": 1, "gpus": 4.0}}
    assert (status["gpus"], status["error"], status["autoscaler"]) == (4.0, "", "v2")


def test_the_error_is_shown() -> None:
    register = Register()
    register.down = 1_000_000
    warm = prewarmer(register)
    warm.update([wish_of(4)])
    warm.close()
    assert warm.status()["error"] == "ConnectionError: 'the GCS is down'"
    assert warm.status()["wanted"] == {}


def test_a_wish_that_lingers_ends_by_itself_and_clear_ends_it_at_once() -> None:
    register = Register()
    warm = prewarmer(register, linger_s=0.05)
    warm.update([wish_of(4)])
    assert register.next_gpus() == 4
    warm.update([])
    while register.next_gpus():
        pass
    warm.close()

    register = Register()
    warm = prewarmer(register, linger_s=1000.0)
    warm.update([wish_of(4)])
    assert register.next_gpus() == 4
    warm.update([])
    warm.clear()
    while register.next_gpus():
        pass
    warm.close()
    assert warm.status()["wanted"] == {}


def test_close_right_after_clear_leaves_nothing_behind() -> None:
    register = Register()
    warm = prewarmer(register)
    warm.update([wish_of(4)])
    assert register.next_gpus() == 4
    warm.clear()
    warm.close()
    assert register.next_gpus() == 0


def test_what_the_node_types_can_not_provide_is_cut_before_sending_and_shown() -> None:
    register = Register()
    kind = NodeType("a", {"CPU": 8.0, "GPU": 4.0}, {"kind": "a"}, 1)
    register.known = Cluster([kind])
    warm = prewarmer(register)
    warm.update([Wish("absent", of_gpus(4), {"kind": "b"}), Wish("p", of_gpus(4, 4), {"kind": "a"})])
    assert register.next_gpus() == 4
    warm.close()
    status = warm.status()
    assert status["wanted"] == {"p": {"bundles": 1, "gpus": 4.0}}
    assert status["cut"]["p"] == {"bundles": 1, "gpus": 4.0, "why": "max_workers 1 of a"}
    assert status["cut"]["absent"]["why"] == "no node type has CPU 1, GPU 4 and labels kind=b"
    assert status["nodes_wanted"] == {"absent": 0, "p": 1}


def test_where_the_types_are_unknown_what_the_autoscaler_refuses_is_cut_to_the_nodes_that_are_there() -> None:
    register = Register()
    register.refuses = True
    warm = prewarmer(register, period_s=0.05)
    warm.update([wish_of(4)])
    while register.next_gpus():
        pass
    warm.close()
    assert "infeasible" in warm.status()["cut"]["p"]["why"]


def test_where_labels_are_not_looked_at_a_type_is_asked_for_by_a_resource_of_its_own() -> None:
    register = Register(v1=True)
    has = {"CPU": 8.0, "GPU": 4.0}
    register.known = Cluster(
        [NodeType("a", {**has, "a_node": 1.0}, {"kind": "a"}, 1), NodeType("b", has, {"kind": "b"}, 1)]
    )
    warm = prewarmer(register)
    warm.update([Wish("p", of_gpus(4), {"kind": "a"}), Wish("q", of_gpus(4), {"kind": "b"})])
    assert register.calls.get(timeout=WAIT_S)[0] == [{"CPU": 1.0, "GPU": 4.0, "a_node": 0.001}, *of_gpus(4)]
    warm.close()
    assert warm.status()["labels_ignored"] == ["q"]


def test_a_wish_that_somebody_wrote_over_is_put_right_and_told() -> None:
    register = Register()
    warm = prewarmer(register, period_s=1.0)
    warm.update([wish_of(4)])
    assert register.next_gpus() == 4
    register.stands = wanted_of([{"CPU": 7.0}], [{}])
    assert register.next_gpus() == 4
    warm.close()
    status = warm.status()
    assert (status["overwritten"], status["overwritten_by"]) == (1, "CPU 7")
    assert status["overwritten_s_ago"] >= 0


def test_a_wish_that_stands_is_no_news() -> None:
    register = Register()
    warm = prewarmer(register, period_s=0.02)
    warm.update([wish_of(4)])
    for _ in range(4):
        assert register.next_gpus() == 4
    warm.close()
    assert register.looks > 0
    assert warm.status()["overwritten"] == 0


def test_once_rays_own_actor_lives_the_wish_is_registered_there_beside_others() -> None:
    """Fault: two who write over each other's wishes for ever."""
    register = Register()
    warm = prewarmer(register, period_s=2.0)
    warm.update([wish_of(4)])
    assert register.next_gpus() == 4
    register.others = wanted_of([{"CPU": 7.0}], [{}])
    register.coordinator = True
    assert register.next_gpus() == 4
    assert register.next_gpus() == 4, "the period's, which looks what stands"
    warm.close()
    status = warm.status()
    assert (status["through"], status["overwritten"]) == (COORDINATOR, 0)
    assert register.others <= register.stands


def test_what_others_ask_for_beyond_the_cluster_is_cut_so_that_ours_can_be_had() -> None:
    """Fault: Ray Data asks for more than there can be, and the autoscaler brings up nothing for anybody."""
    register = Register()
    register.known = Cluster([NodeType("a", {"CPU": 8.0, "GPU": 4.0}, {"kind": "a"}, 2)])
    register.coordinator = True
    register.others = wanted_of([{"CPU": 1.0}] * 20 + [{"GPU": 9.0}], [{}] * 20 + [{"kind": "!b"}])
    warm = prewarmer(register, period_s=2.0)
    warm.update([Wish("p", of_gpus(4), {"kind": "a"})])
    ours = wanted_of(of_gpus(4), [{"kind": "a"}])
    assert register.written.get(timeout=WAIT_S) == ours + wanted_of([{"CPU": 1.0}] * 15, [{}] * 15)
    warm.close()
    status = warm.status()
    assert (status["others_cut"]["bundles"], status["others_cut"]["gpus"]) == (6, 9.0)
    assert (status["overwritten"], status["cut"]) == (0, {})


def test_who_holds_elsewhere_is_still_counted_once_a_pool_of_its_order_is_deleted() -> None:
    """Fault: a wish that can't be worked out, and so is never sent again, until that holder ends."""
    pools = {name: PoolConfig(name, {"gpu": 2}) for name in ("p", "q")}
    world = make_world(pools, [PolicyConfig("p", "a", priority=2), PolicyConfig("q", "a", priority=1)])
    for id in ("a1", "a2"):
        world.submit(id, "a", {"gpu": 2})
    assert world.states() == {"a1": "allocated@p", "a2": "allocated@q"}
    world.cordon("p", DRAINING)
    world.release("a1")
    world.change([["unpool", "p"]])
    assert [(each.name, len(each.held)) for each in pool_views(world.coordinator.state)] == [("q", 1)]
