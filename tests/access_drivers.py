"""Drivers that `test_access_live.py` runs, each in a process of its own: all but `BRING_UP` behind `PREAMBLE`."""

from __future__ import annotations

PREAMBLE = """
import ray_pools as pools
from ray_pools import errors

def refused(kind, call):
    try:
        call()
    except kind as problem:
        return problem
    raise AssertionError(f"{kind.__name__} was due")
"""

HOLDERS = """
client, other = pools.connect(namespace="access", quiet=True), pools.connect(namespace="access", quiet=True)
held = client.submit("team", pool_resources={"seat": 1}, id="held")
held.wait()
foreign = {"op": "release", "id": "held", "token": b"not the token of it"}
assert refused(errors.Refused, lambda: other.coordinator(foreign)).code == "wrong_token"
assert refused(errors.Refused, lambda: other.release("held", operator="eve")).code == "not_operator"
assert refused(errors.Refused, other.follow("held").release).code == "wrong_token"
assert client.get("held")["state"] == "allocated"
assert held.release()["state"] == held.release()["state"] == "released"

many = [{"requester": "team", "pool_resources": {"seat": 1}}] * 10_001
problem = refused(errors.Refused, lambda: client.submit_many(many))
assert problem.code == "too_many_waiting" and "10000" in str(problem), problem
assert len(client.list(requester="team")) == 1, "none of them was ever there"

assert refused(errors.Refused, lambda: client.submit("prod", pool_resources={"seat": 1})).code == "wrong_key"
"""

SKEWED = """
client = pools.connect(namespace="access", quiet=True)
ticket = client.submit("team", pool_resources={"seat": 1})
ticket.wait()
from ray_pools import wire
wire.PROTOCOL = 7
for call in (
    lambda: pools.connect(namespace="access", quiet=True),
    lambda: client.submit("team", pool_resources={"seat": 1}),
    lambda: client.submit_many([{"requester": "team", "pool_resources": {"seat": 1}}] * 2),
    lambda: client.submit("team", pool_resources={"seat": 1}).wait(),
    client.status,
    ticket.release,
):
    said = str(refused(errors.ProtocolMismatch, call))
    assert "protocol 7" in said and "speaks 1" in said, said
wire.PROTOCOL = 1
ticket.release()
"""

STATES = """
import ray
from ray_pools import wire

TOKEN = b"the holder's own"
client = pools.connect(namespace="access", quiet=True)

def until(id, **wanted):
    \"\"\"The request as it was pushed, once it is so.\"\"\"
    after = 0
    while True:
        data = wire.encode_wait("nobody", after, 20.0, [id])
        answer = client._transport.start("ray-pools:coordinator", "wait", data).result(60)
        after, changes = wire.decode_changes(answer)
        for view in changes:
            if all(view[key] == value for key, value in wanted.items()):
                return view

def ask(verb, id, token=TOKEN):
    return client.coordinator({"op": verb, "id": id, "token": token})

def end(verb, id, expected):
    \"\"\"Not with another's token; with its own; and the same again.\"\"\"
    assert refused(errors.Refused, lambda: ask(verb, id, b"another client's")).code == "wrong_token"
    for _ in range(2):
        assert ask(verb, id)["state"] == expected, (verb, id, client.get(id))

def asked(id, requester, **what):
    client.submit(requester, id=id, token=TOKEN, **what)
    return id

for verb, held in (("cancel", "cancelled"), ("release", "released")):
    def name(state):
        return f"{verb} {state}"

    # open in two pools, both full
    holders = [asked(name(which), "both", gpus=1) for which in ("one", "other")]
    for id in holders:
        until(id, ready=True)
    id = asked(name("open"), "both", gpus=1)
    assert until(id, state="queued")["pools"] == ["left", "right"]
    end(verb, id, "cancelled")
    # queued in its only pool
    id = asked(name("queued"), "low", gpus=1)
    until(id, state="queued")
    end(verb, id, "cancelled")
    # allocated, where grants only count
    for id in holders:
        end(verb, id, held)
    # preempting, for one that is nominated
    for first in ("nominated", "preempting"):
        low, high = asked(name("holds until " + first), "low", gpus=1), asked(name("takes, " + first), "high", gpus=1)
        until(low, state="preempting"), until(high, nominated=True)
        if first == "nominated":
            end(verb, high, "cancelled")
            end(verb, low, held)
        else:
            end(verb, low, held)
            until(high, ready=True)
            end(verb, high, held)
    # allocated, its group not placed; placed
    id = asked(name("unplaced"), "nowhere", gpus=1)
    assert not until(id, state="allocated")["ready"]
    end(verb, id, held)
    id = asked(name("placed"), "placed", cpus=1)
    until(id, ready=True)
    end(verb, id, held)
    # ending, since it was asked for just before
    id = asked(name("ending"), "placed", cpus=1)
    until(id, ready=True)
    later = {"cancel": "release", "release": "cancel"}[verb]
    for answer in client._caller.call(
        "ray-pools:coordinator", [{"op": op, "id": id, "token": TOKEN} for op in (verb, later)]
    ):
        assert wire.value_of(answer)["state"] == held, answer
    # over, each way
    end(later, id, held)
    end(verb, asked(name("rejected"), "stranger", gpus=1), "rejected")
    id = asked(name("expired"), "low", gpus=1)
    until(id, ready=True)
    client.coordinator({"op": "leave", "items": [[id, TOKEN]]})
    until(id, state="expired")
    end(verb, id, "expired")
    low, high = asked(name("preempted"), "low", gpus=1), asked(name("takes"), "high", gpus=1)
    until(low, state="preempting")
    ask("stopped", low)
    until(low, state="preempted"), until(high, ready=True)
    end(verb, low, "preempted")
    end(verb, high, held)
    assert refused(errors.Refused, lambda: ask(verb, "nobody's")).code == "unknown_id"
groups = ray.util.placement_group_table().values()
assert {group["state"] for group in groups} <= {"REMOVED"}, groups
"""

FULL = """
client = pools.connect(namespace="access", quiet=True)
one = {"requester": "team", "pool_resources": {"seat": 1}}
holding = [client.submit(**one) for _ in range(2)]
for ticket in holding:
    ticket.wait()
waiting = client.submit_many([one] * 9_999)
last = client.submit(**one)
for call in (lambda: client.submit(**one), lambda: client.submit_many([one] * 2)):
    problem = refused(errors.Refused, call)
    assert problem.code == "too_many_waiting" and "10000" in str(problem), problem
last.cancel()
again = client.submit(**one)
assert refused(errors.Refused, lambda: client.submit(**one)).code == "too_many_waiting"
items = [[ticket.id, ticket._token] for ticket in waiting]
assert client.coordinator({"op": "leave", "items": items}) == {"ended": 9_999}
again.cancel()
for ticket in holding:
    assert ticket.release()["state"] == "released"
"""

RAY_CLIENT = """
import ray
ray.init("ray://127.0.0.1:%d", logging_level="ERROR")
problem = refused(errors.BadInput, lambda: pools.connect(namespace="access"))
assert problem.field == "address" and "in a Ray task" in str(problem) and "\\n" not in str(problem), problem

@ray.remote(num_cpus=0)
def inside():
    with pools.connect(namespace="access") as client, client.slot("team", pool_resources={"seat": 1}) as slot:
        return slot.pool

assert ray.get(inside.remote()) == "counted"
"""

OTHER_CODE = """
import ray_pools
assert ray_pools.__version__ == "0.0.1+copy", ray_pools.__version__
client = pools.connect(namespace="access", quiet=True)
assert client.ping()["version"] != ray_pools.__version__
with client.slot("team", pool_resources={"seat": 1}) as slot:
    assert slot.pool == "counted"
first, second = client.submit_many([{"requester": "team", "pool_resources": {"seat": 1}}] * 2)
first.release(), second.cancel()
problem = refused(errors.BadInput, lambda: client.coordinator({"op": "from-the-future"}))
assert problem.field == "op" and "submit" in problem.expected
"""

BRING_UP = """
import sys
from ray_pools.actors import deploy
from ray_pools.client import connect_ray
from ray_pools.config import load_config

# from the folder of this script, which Ray puts on the actors' path: what lies there is the code that they run
config = load_config(sys.argv[1])
connect_ray(quiet=True)
deploy.up(config.core_pools(), config.core_policies(), namespace=config.namespace, store=config.store, options={})
"""

OTHER_ACTORS = """
import sys, ray_pools
name = sys.argv[1]
client, other = pools.connect(namespace=name, quiet=True), pools.connect(namespace=name, quiet=True)
assert client.ping()["version"] == client.pool("seats", {"op": "ping"})["version"] == "0.0.1+copy"
assert ray_pools.__version__ != "0.0.1+copy"
asks = {"requester": "team", "pool_resources": {"seat": 1}}
with client.slot(**asks) as slot:
    assert slot.pool == "seats"
first, second, third = client.submit_many([asks] * 3)
first.wait(), second.wait()
assert third.explain()["seats"]["cause"] == "waiting_capacity"
followed = other.follow(third.id)
assert refused(errors.Refused, followed.release).code == "wrong_token"
second.release()
third.wait()
assert other.release(third.id)["state"] == "released"  # an operator's word
for ticket in followed, third:
    ticket.wait_for("released")
    refused(errors.SlotOver, ticket.wait)
followed = other.follow(first.id)
assert first.release()["state"] == first.release()["state"] == "released"
followed.wait_for("released")  # of an actor that tells nobody else, it is asked after 20 s
assert refused(errors.Refused, lambda: client.release("nobody's")).code == "unknown_id"
assert list(client.map(lambda each: 2 * each, [1, 2], **asks)) == [2, 4]
assert client.list(requester="team") and client.status()["pools"]["seats"] and client.config()["pools"]
"""
