"""What `pools run` makes of what happens, in any order, without Ray: its exit code, and what it tells the pools.

Faults it stands for: a command that is run again though it ended by itself, or is not though it was called back; a slot
that is kept, or given back while the command still runs; a word of an old attempt that is taken for one of the next; a
second Ctrl-C that waits; a hang when nobody knows how the command ended.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_pools import FakePools

import ray_pools as pools
from ray_pools.client import Submission, command
from ray_pools.client.attempt import CommandSpec, Ended, Lost, Started, Unread
from ray_pools.client.command import CommandRun
from ray_pools.supervise import Ending


class FakeAttempt:
    """A run whose end the test says."""

    def __init__(self, fake: FakePools, post: Callable[[Any], None]) -> None:
        self.fake, self.post, self.told = fake, post, list[str]()
        post(Started("somewhere"))

    def end(self, returncode: int, failure: str = "") -> None:
        self.post(Ended(Ending(returncode, failure)))

    def terminate(self) -> None:
        self._hear("term")

    def kill(self) -> None:
        self._hear("kill")

    def close(self) -> None:
        self._hear("close")

    def _hear(self, word: str) -> None:
        with self.fake.changed:
            self.told.append(word)
            self.fake.changed.notify_all()


class Run:
    """One `pools run`, in a thread."""

    def __init__(self, fake: FakePools, client: pools.Client, **options: Any) -> None:
        self.fake, self.attempts, self.said = fake, list[FakeAttempt](), list[str]()
        submission = Submission("vision", gpus=1, id="r1", retries=options.pop("retries", 0))
        self.timeout_s = options.pop("timeout_s", None)
        self.run = CommandRun(client, submission, CommandSpec(("true",), {}), say=self.said.append, **options)

    def begin(self, aside: Any) -> None:
        self.ended = aside(self.run.run, self.timeout_s)
        self.fake.until(lambda: "r1" in self.fake.views)

    def start(self, slot: Any, spec: Any, token: bytes, post: Callable[[Any], None]) -> FakeAttempt:
        with self.fake.changed:
            self.attempts.append(FakeAttempt(self.fake, post))
            self.fake.changed.notify_all()
        return self.attempts[-1]

    def granted(self) -> FakeAttempt:
        before = len(self.attempts)
        self.fake.grant("r1")
        self.fake.until(lambda: len(self.attempts) > before)
        return self.attempts[-1]

    def preempted(self, grace_s: float = 3600.0) -> None:
        self.fake.preempt("r1", grace_s=grace_s)
        self.fake.until(lambda: "term" in self.attempts[-1].told)

    def ops(self) -> list[str]:
        """How it ended the request, if it did."""
        return [op["op"] for op in self.fake.calls if op["op"] in ("release", "stopped", "cancel")]


@pytest.fixture
def start(
    fake: FakePools, client: pools.Client, aside: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(**options: Any) -> Run:
        run = Run(fake, client, **options)
        made.append(run)
        monkeypatch.setattr(command, "start_attempt", run.start)
        run.begin(aside)
        return run

    yield make
    for run in made:  # a test that failed leaves no thread
        run.run._events.put(RuntimeError("the test is over"))
        for attempt in run.attempts:
            attempt.end(0)


def test_a_command_that_ends_gives_its_slot_back(start: Callable[..., Run]) -> None:
    run = start(retries=3)
    run.granted().end(7)
    assert run.ended.result(30) == 7
    assert run.ops() == ["release"]
    assert run.attempts[0].told == ["close"]


def test_why_it_could_not_start_is_said_also_by_one_who_says_nothing_else(
    start: Callable[..., Run],
) -> None:
    said: list[str] = []
    run = start(complain=said.append)
    run.granted().end(127, "can't start 'nosuch'")
    assert run.ended.result(30) == 127
    assert said == ["can't start 'nosuch'"]
    assert said[0] not in run.said


def test_one_that_was_called_back_runs_again(start: Callable[..., Run]) -> None:
    """Whatever code it left with; a late word of the first run means nothing."""
    run = start(retries=1)
    first = run.granted()
    run.preempted()
    assert run.ops() == []
    first.end(0)
    run.fake.until(lambda: run.ops() == ["stopped"])
    second = run.granted()
    first.end(9)
    first.post(Lost("late"))
    second.end(0)
    assert run.ended.result(30) == 0
    assert run.ops() == ["stopped", "release"]
    assert [line for line in run.said if "retries" in line] == ["queued again, 0 retries left"]


def test_called_back_without_retries_is_the_end(start: Callable[..., Run]) -> None:
    """Fault: it is cancelled besides, before the pool has said that it is over, and counts as cancelled."""
    run = start()
    first = run.granted()
    run.preempted()
    first.end(-signal.SIGTERM)
    with pytest.raises(pools.SlotPreempted, match="no retries left"):
        run.ended.result(30)
    assert run.ops() == ["stopped"]


def test_one_that_does_not_listen_is_killed_before_the_grace_is_over(start: Callable[..., Run]) -> None:
    run = start(retries=1)
    first = run.granted()
    run.preempted(grace_s=0.2)
    run.fake.until(lambda: first.told == ["term", "kill"])
    assert run.ops() == []
    first.end(-signal.SIGKILL)
    run.fake.until(lambda: run.ops() == ["stopped"])
    run.granted().end(0)
    assert run.ended.result(30) == 0


def test_a_cancelled_slot_ends_the_command_at_once(start: Callable[..., Run]) -> None:
    run = start(retries=1)
    first = run.granted()
    run.fake.finish("r1", "cancelled")
    run.fake.until(lambda: first.told == ["term", "kill"])
    first.end(-signal.SIGKILL)
    with pytest.raises(pools.SlotCancelled):
        run.ended.result(30)


def test_a_signal_is_passed_on_and_a_second_kills(start: Callable[..., Run]) -> None:
    run = start(retries=3, stop_timeout_s=3600)
    first = run.granted()
    run.run.interrupt(signal.SIGINT)
    run.fake.until(lambda: first.told == ["term"])
    run.run.interrupt(signal.SIGINT)
    run.fake.until(lambda: first.told == ["term", "kill"])
    assert run.ops() == []
    first.end(-signal.SIGKILL)
    assert run.ended.result(30) == 137
    assert run.ops() == ["release"]
    with pytest.raises(KeyboardInterrupt):
        run.run.interrupt(signal.SIGINT)


def test_a_signal_while_it_is_called_back_runs_nothing_again(start: Callable[..., Run]) -> None:
    run = start(retries=3)
    first = run.granted()
    run.preempted()
    run.run.interrupt(signal.SIGTERM)
    first.end(-signal.SIGTERM)
    assert run.ended.result(30) == 143
    assert run.ops() == ["release"]


def test_a_signal_while_it_waits_cancels(start: Callable[..., Run]) -> None:
    run = start()
    run.run.interrupt(signal.SIGTERM)
    assert run.ended.result(30) == 143
    assert run.ops() == ["cancel"]
    assert run.said[-1] == "SIGTERM: request 'r1' is cancelled"


def test_a_slot_that_was_just_left_is_no_reason_to_wait(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: "is called back" is said of a command that has ended and queues again: the pools heard of it later."""
    monkeypatch.setattr(command, "LOOK_S", 0.0)
    run = start(retries=1)
    first = run.granted()
    run.preempted()
    run.fake.instead["stopped"] = [lambda op: dict(run.fake.views["r1"])]  # the pool is yet to be told
    first.end(0)
    run.fake.until(lambda: bool(run.fake.ops("stopped")))
    asked = len(run.fake.ops("get"))
    run.fake.until(lambda: len(run.fake.ops("get")) > asked + 1)
    run.fake.requeue("r1")
    run.fake.until(lambda: any("waits: a" in line for line in run.said[-1:]))
    assert not [line for line in run.said if "called back" in line]
    run.granted().end(0)
    assert run.ended.result(30) == 0


def test_a_wait_that_is_too_long_cancels(start: Callable[..., Run]) -> None:
    run = start(timeout_s=0.05)
    with pytest.raises(pools.WaitTimeout, match=r"within 0\.05 s"):
        run.ended.result(30)
    assert run.ops() == ["cancel"]


def test_a_rejected_request_runs_nothing(start: Callable[..., Run]) -> None:
    run = start()
    run.fake.finish("r1", "rejected", causes={"a": "too_large"})
    with pytest.raises(pools.SlotRejected, match="too_large"):
        run.ended.result(30)
    assert run.attempts == []


def test_a_lost_command_is_waited_for_until_its_fate_is_known(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its group was taken away: it queues again. Nobody took it: it failed with its node."""
    run = start(retries=1)
    run.granted().post(Lost("its worker died"))
    run.fake.preempt("r1", grace_s=0.0)
    run.fake.until(lambda: run.ops() == ["stopped"])
    monkeypatch.setattr(command, "_FATE_KNOWN_WITHIN_S", 0.05)
    run.granted().post(Lost("its node died"))
    assert run.ended.result(30) == 137
    assert "was lost with its node or its supervisor: its node died" in run.said


def test_one_that_can_not_be_started_there(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_FATE_KNOWN_WITHIN_S", 0.05)
    run = start()
    run.granted().post(Lost("RuntimeEnvSetupError", began=False))
    assert run.ended.result(30) == 126


def test_nobody_hangs_on_one_that_does_not_die(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_KILLED_WITHIN_S", 0.05)
    run = start(stop_timeout_s=0.0)
    run.granted()
    run.run.interrupt(signal.SIGTERM)
    assert run.ended.result(30) == 137
    assert run.ops() == ["release"]


def test_a_reader_that_is_gone_ends_the_command(start: Callable[..., Run]) -> None:
    """`pools run ... | head`."""
    run = start(retries=3)
    first = run.granted()
    first.post(Unread())
    run.fake.until(lambda: first.told == ["term"])
    first.end(-signal.SIGTERM)
    assert run.ended.result(30) == 143


@pytest.mark.parametrize(
    ("bundles", "said"),
    [
        ([{"GPU": 4.0}], ""),
        (
            [{"GPU": 3.0}, {"GPU": 3.0}],
            "2 bundles, and the command sees 3 GPUs of 6, those of the first bundle",
        ),
        ([{"GPU": 1.0}, {"GPU": 1.0}], "the command sees 1 GPU of 2"),
        ([{"CPU": 8.0}, {"CPU": 8.0}], "2 bundles, and the command has the first"),
    ],
)
def test_a_request_that_was_split_is_said_to_be(
    start: Callable[..., Run], bundles: list[dict[str, float]], said: str
) -> None:
    """Fault: a training that was given six GPUs runs on three, and nobody says so."""
    run = start()
    run.fake.grant("r1", placement={"pg": "", "bundles": bundles})
    run.fake.until(lambda: bool(run.attempts))
    run.attempts[-1].end(0)
    assert run.ended.result(30) == 0
    lines = [line for line in run.said if line.startswith("it is more than a node has")]
    assert [said in line for line in lines] == ([True] if said else [])
