"""examples/checkpoint.py loses no work: called back in the middle of an epoch, it trains each epoch exactly once, goes
on with the next in another slot, and leaves nothing waiting at its end (docs/rules.md section 6: what runs is told, and
has its grace). Without Ray: the file itself runs, against a coordinator that calls back when the test says so."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_pools import FakePools

import ray_pools as pools

EXAMPLE = Path(__file__).parent.parent / "examples" / "checkpoint.py"


class GrantsAgain(FakePools):
    """Grants what is submitted and what queues again."""

    def _op_submit(self, op: dict[str, Any]) -> Any:
        super()._op_submit(op)
        self.grant(op["id"])
        return dict(self.views[op["id"]])

    def requeue(self, id: str) -> None:
        super().requeue(id)
        self.grant(id)


@pytest.fixture
def fake() -> GrantsAgain:
    return GrantsAgain()


def paper_ray(trained: list[int], during: Callable[[int], None]) -> ModuleType:
    """As much of Ray as the example uses: a task runs where it is sent off, and `during` it something may happen."""

    class Task:
        def __init__(self, function: Callable[[int], str]) -> None:
            self.function = function

        def options(self, **options: Any) -> Task:
            assert options["scheduling_strategy"] == "DEFAULT"  # it was asked for while the slot stands
            return self

        def remote(self, epoch: int) -> str:
            during(epoch)
            trained.append(epoch)
            return self.function(epoch)

    ray: Any = ModuleType("ray")
    ray.remote = lambda **options: Task
    ray.get = lambda result: result
    return ray  # type: ignore[no-any-return]


@pytest.mark.parametrize("called_back_in", [[], [0], [1], [0, 1, 2]])
def test_no_epoch_is_lost_or_done_twice(
    fake: GrantsAgain,
    client: pools.Client,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    called_back_in: list[int],
) -> None:
    trained: list[int] = []

    def during(epoch: int) -> None:
        if epoch in called_back_in:
            (id,) = fake.views
            fake.preempt(id, grace_s=3600)
            ticket = client._known[id]
            ticket.wait_for("preempting", 30)

    monkeypatch.setitem(sys.modules, "ray", paper_ray(trained, during))
    monkeypatch.setattr("ray_pools.client.connect", lambda: client)
    monkeypatch.setattr(pools, "connect", lambda: client)
    runpy.run_path(str(EXAMPLE))
    assert trained == [0, 1, 2]
    assert {view["state"] for view in fake.views.values()} <= {"released", "cancelled"}
    assert "weights after epoch 2" in capsys.readouterr().out
