"""The wire between clients and actors: every error arrives as the class and words that left, every message of
another version, shape or size is refused with a clear line (fault: two processes of different code meet)."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from ray_pools import errors, wire
from ray_pools.limits import MESSAGE_MAX_BYTES


def over_the_wire(problem: BaseException) -> errors.PoolsError:
    sent = msgpack.unpackb(msgpack.packb(wire.error_to_wire(problem)))
    return wire.error_from_wire(sent)


@pytest.mark.parametrize(
    "problem",
    [
        errors.BadInput("gpu_count", -1, "an integer", "a.yaml:3"),
        errors.BadInput("requester", "x" * 10_000, "a name"),
        errors.BadInput("requester", "\x1b[31m\udc80", "a name"),
        errors.BadInput("pool", errors.MISSING, "a name"),
        errors.BadInput("amount", 2**200, "an integer"),
        errors.BadInput("amount", {"a": {1, 2}}, "a mapping"),
        errors.BadInput("amount", None, "an integer"),
        errors.Refused("unknown_id", "there is no request 'x'", {"id": "x"}),
        errors.Refused("odd", "odd", {"id": {1}, "n": 2**70}),
        errors.Unreachable("no pools here"),
        errors.WaitTimeout("too long"),
        errors.SlotPreempted("r1", "for r2"),
        errors.SlotCancelled("r1"),
        errors.LeaseExpired("r1"),
        errors.SlotLost("r1", "node died"),
        errors.SlotOver("r1"),
        errors.SlotRejected("r1", {"a": "no_policy", "b": "exceeds_limit"}),
        errors.PoolsError("some other"),
    ],
    ids=lambda problem: type(problem).__name__,
)
def test_an_error_arrives_as_it_left(problem: errors.PoolsError) -> None:
    back = over_the_wire(problem)
    if not isinstance(problem, errors.WaitTimeout):  # only ever raised on the client's side
        assert type(back) is type(problem)
    assert str(back) == str(problem)
    for name in ("field", "expected", "where", "code", "causes", "request_id", "cause"):
        assert getattr(back, name, None) == getattr(problem, name, None), name


def test_an_exception_that_is_not_ours_keeps_its_class_and_text() -> None:
    back = over_the_wire(KeyError("gone"))
    assert type(back) is errors.PoolsError
    assert "KeyError" in str(back)
    assert "gone" in str(back)


def test_an_error_of_newer_code_is_still_one_line() -> None:
    assert str(wire.error_from_wire({"type": "novel", "message": "who knows"})) == "who knows"


def test_operations_and_results_keep_their_order() -> None:
    ops = [{"op": "get", "ids": ["a"]}, {"op": "ping"}, {"op": "submit", "token": b"\x00\xff"}]
    assert wire.decode_request(wire.encode_request(ops)) == ops
    sent = wire.encode_response([wire.ok(1), wire.failed(errors.Refused("no", "no")), wire.ok(None)])
    first, second, third = wire.decode_response(sent, 3)
    assert [wire.value_of(first), wire.value_of(third)] == [1, None]
    with pytest.raises(errors.Refused):
        wire.value_of(second)


def test_the_wait_comes_back_as_it_went() -> None:
    assert wire.decode_wait(wire.encode_wait("c1", 7, 20)) == wire.Wait("c1", 7, 20.0)
    assert wire.decode_wait(wire.encode_wait("c1", 7, 20, ["r1"])).ids == ("r1",)
    assert wire.decode_changes(wire.encode_changes(9, [{"id": "a"}])) == (9, [{"id": "a"}])


@pytest.mark.parametrize("version", [0, 2, "1", None, True])
def test_another_version_is_named_on_both_sides(version: Any) -> None:
    with pytest.raises(errors.ProtocolMismatch, match="protocol 1"):
        wire.decode_request(msgpack.packb({"v": version, "ops": [{"op": "ping"}]}))
    with pytest.raises(errors.ProtocolMismatch):
        wire.decode_wait(msgpack.packb({"v": version, "client": "c", "after": 0, "timeout_s": 1}))
    with pytest.raises(errors.ProtocolMismatch, match="the coordinator"):
        wire.decode_response(msgpack.packb({"v": version, "results": []}), 0, "the coordinator")


def test_an_actor_of_another_version_says_which() -> None:
    """A protocol error is understood whatever version it comes in; ours and theirs change places on the way."""
    answer = {"v": 2, "error": {"type": "protocol", "message": "", "details": {"ours": 2, "theirs": 1}}}
    with pytest.raises(errors.ProtocolMismatch) as caught:
        wire.decode_response(msgpack.packb(answer), 1, "the coordinator")
    assert (caught.value.ours, caught.value.theirs, caught.value.exit_code) == (1, 2, 2)
    with pytest.raises(errors.ProtocolMismatch):
        wire.decode_changes(msgpack.packb(answer))


def test_a_failure_for_all_is_raised() -> None:
    data = wire.encode_failure(errors.BadInput("ops", 1, "a list"))
    with pytest.raises(errors.BadInput):
        wire.decode_response(data, 5)
    with pytest.raises(errors.BadInput):
        wire.decode_changes(data)


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\xff" * 10, msgpack.packb([1]), msgpack.packb("x"), b"\x91" * 5000, b"\x81\xa1v"]
)
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(errors.BadInput):
        wire.decode_request(data)
    with pytest.raises(errors.BadInput):
        wire.decode_wait(data)


@pytest.mark.parametrize("ops", [None, [], {}, [1], [{}], [{"op": 3}], [{"op": "ping"}] * 10_001])
def test_operations_of_another_shape_are_refused(ops: Any) -> None:
    with pytest.raises(errors.BadInput):
        wire.decode_request(msgpack.packb({"v": 1, "ops": ops}))


def test_a_message_over_the_limit_is_refused_before_it_is_sent_and_when_it_comes() -> None:
    large = b"x" * (MESSAGE_MAX_BYTES + 1)
    with pytest.raises(errors.BadInput, match="bytes"):
        wire.encode_request([{"op": "submit", "token": large}])
    with pytest.raises(errors.BadInput, match="bytes"):
        wire.decode_request(large)


@pytest.mark.parametrize("value", [2**64, object(), {1, 2}, "\ud800"])
def test_what_the_wire_cant_carry_is_refused_before_it_is_sent(value: object) -> None:
    with pytest.raises(errors.BadInput):
        wire.encode_request([{"op": "submit", "options": {"x": value}}])
