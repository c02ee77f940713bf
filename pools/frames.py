"""What goes over a direct connection to an actor: frames with the bytes of docs/protocol.md, "Direct connections".

    hello   b"ray-pools direct 1\\n", then the secret that the actor gave out; the actor answers with the first part
    frame   length of the payload (4 bytes), number of the call (8), kind (1), payload; big-endian

A call's answer comes back under its number, in any order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from .limits import MESSAGE_MAX_BYTES

HELLO = b"ray-pools direct 1\n"
SECRET_BYTES = 32

CALL, WAIT, ANSWER, FAILED = 1, 2, 3, 4
"""Kinds: a request to `call` or to `wait`; its answer; that there is none, with why as text."""

KINDS = {"call": CALL, "wait": WAIT}
METHODS = {kind: method for method, kind in KINDS.items()}

_HEADER = struct.Struct("!IQB")
# an answer may be larger than a request may be: its results and what is around them
_PAYLOAD_MAX_BYTES = 4 * MESSAGE_MAX_BYTES


class BadFrame(Exception):
    """What came is no frame: the connection is of no use any more."""


def frame(number: int, kind: int, payload: bytes) -> bytes:
    """One frame."""
    return _HEADER.pack(len(payload), number, kind) + payload


class Frames:
    """Cuts a stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """(number, kind, payload) of each frame that is whole now. Raises BadFrame."""
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= _HEADER.size:
                length, number, kind = _HEADER.unpack_from(buffer, at)
                if length > _PAYLOAD_MAX_BYTES or not CALL <= kind <= FAILED:
                    raise BadFrame(f"a frame of {length} bytes and kind {kind}")
                end = at + _HEADER.size + length
                if len(buffer) < end:
                    break
                payload = bytes(memoryview(buffer)[at + _HEADER.size : end])
                at = end
                yield number, kind, payload
        finally:
            del buffer[:at]
