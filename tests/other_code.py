"""Copies of the package as another release may have it: the same protocol, other code (docs/protocol.md, "Wire").

Each copy is a folder for the PYTHONPATH. Its `ray_pools` is this code with a module that changes what goes over the
wire, in place of edits of its sources: so a copy works as long as `ray_pools.wire` has the functions named here.
"""

from __future__ import annotations

import shutil
from pathlib import Path

TOP = Path(__file__).parent.parent
VERSION = "0.0.1+copy"

LATER = '''
"""A later release: it sends fields and operations that this one has never heard of, and answers with more."""

from . import errors, wire

NEWS = {"in a later release": [{"of": 1}, None, b"bytes"]}


class Unheard(errors.PoolsError):
    """An error that is unknown here."""


def more(value):
    """Every mapping that is an answer or a request's view has a field more."""
    if isinstance(value, list):
        return [more(each) for each in value]
    if isinstance(value, dict) and ({"id", "state"} <= value.keys() or "epoch" in value):
        return {**value, **NEWS}
    return {key: more(each) for key, each in value.items()} if isinstance(value, dict) else value


def with_more(function, place):
    def changed(*args, **kwargs):
        return wire.pack(place(wire.unpack(function(*args, **kwargs))))

    return changed


wire.encode_request = with_more(
    wire.encode_request, lambda sent: {**sent, **NEWS, "ops": [{**op, **NEWS} for op in sent["ops"]]}
)
wire.encode_wait = with_more(wire.encode_wait, lambda sent: {**sent, **NEWS})
wire.encode_response = with_more(
    wire.encode_response, lambda sent: {**sent, **NEWS, "results": more(sent["results"])}
)
wire.encode_changes = with_more(
    wire.encode_changes, lambda sent: {**sent, **NEWS, "changes": more(sent["changes"])}
)
'''

EARLIER = '''
"""The first release: what it did not send, did not look at, did not answer and could not do, is not there."""

from . import wire

NOT_SENT = ("holder", "made_at", "by", "key")
UNKNOWN_OPERATIONS = ("room", "operate", "leave")
NOT_ANSWERED = {
    "view": ("labels", "by", "grace_left_s"),
    "ping": ("lease", "now"),
    "config": ("requesters", "operators", "limits", "timings"),
    "status": ("holders", "trouble"),
}


def kind(value):
    """Which answer it is, by a field that it always had."""
    for key, name in (("retries", "view"), ("protocol", "ping"), ("policies", "config"), ("silent", "status")):
        if key in value:
            return name
    return ""


def less(value):
    if isinstance(value, list):
        return [less(each) for each in value]
    if not isinstance(value, dict):
        return value
    left_out = NOT_ANSWERED.get(kind(value), ())
    return {key: less(each) for key, each in value.items() if key not in left_out}


def unsent(op):
    return op if op["op"] == "exchange" else {key: op[key] for key in op if key not in NOT_SENT}


def changed_encode_request(ops, before=wire.encode_request):
    return before([unsent(op) for op in ops])


def changed_decode_request(data, before=wire.decode_request):
    ops = [unsent(op) for op in before(data)]
    return [{**op, "op": "unknown"} if op["op"] in UNKNOWN_OPERATIONS else op for op in ops]


def changed_decode_wait(data, before=wire.decode_wait):
    return before(data)._replace(ids=())


def changed_encode_response(results, before=wire.encode_response):
    return before(less(list(results)))


def changed_encode_changes(seq, changes, before=wire.encode_changes):
    return before(seq, less(list(changes)))


for name in ("encode_request", "decode_request", "decode_wait", "encode_response", "encode_changes"):
    setattr(wire, name, globals()["changed_" + name])
'''

RELEASES = {"earlier": EARLIER, "later": LATER}


def other_release(folder: Path, which: str) -> Path:
    """Makes the copy "earlier" or "later" in the folder; returns the folder."""
    package = folder / "ray_pools"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(TOP / "pools", package, ignore=ignored)
    shutil.copytree(TOP / "actors", package / "actors", ignore=ignored)
    (package / "_release.py").write_text(RELEASES[which])
    with (package / "__init__.py").open("a") as file:
        file.write(f'\n__version__ = "{VERSION}"\nfrom . import _release  # noqa: E402, F401\n')
    return folder
