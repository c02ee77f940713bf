"""Which part of the wish for nodes a cluster can ever provide, as a pure function of its node types.

Ray's autoscaler v2 takes a wish whole or not at all: one bundle too many, too large, or with a label that no node type
has, and no node comes up for anybody. So what can't be had is cut before sending. Bundles are laid on nodes as the
autoscaler would: on those that are there, then on new ones, at most `max_workers` of each type and of all. Pools take
turns, bundle by bundle, each in its own order (held first), so that no pool's queue leaves another nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .bundles import Bundle
from .prewarm import Wish

MARKED = 0.001
"""So much of a type's own resource a bundle asks for, where labels are not looked at."""

_SLACK = 1e-6


class NodeType(NamedTuple):
    """A kind of node that the autoscaler can start. `most`: of it at a time."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    most: int


class Node(NamedTuple):
    """A node that is there. `type`: "" where nobody knows."""

    type: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    is_head: bool = False


class Cluster(NamedTuple):
    """What the autoscaler can make of the cluster. `most`: workers of all types; None: as their types allow."""

    types: Sequence[NodeType]
    most: int | None = None
    nodes: Sequence[Node] = ()


class Cut(NamedTuple):
    """What is left out of a pool's wish, and why."""

    bundles: int
    gpus: float
    why: str


class Feasible(NamedTuple):
    """`wishes`: what can be had. `cuts`: pool to what can't. `nodes`: pool to how many nodes its wish takes."""

    wishes: list[Wish]
    cuts: dict[str, Cut]
    nodes: dict[str, int]


def selector_parts(said: str) -> tuple[bool, tuple[str, ...]]:
    """A label selector of Ray, which is a value, `in(a, b)`, or either behind a `!`: is it negated, and its values."""
    negated, said = said.startswith("!"), said.removeprefix("!")
    values = said[3:-1].split(",") if said.startswith("in(") and said.endswith(")") else [said]
    return negated, tuple(sorted(value.strip() for value in values))


def selects(said: str, label: str | None) -> bool:
    """The selector takes a node with this label; None: with no such label."""
    negated, values = selector_parts(said)
    return (label in values) != negated


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """A node with these labels will do."""
    return all(selects(said, labels.get(key)) for key, said in selector.items())


class _Bin:
    """A node, there or to come, and what is left of it."""

    __slots__ = ("labels", "left", "pools")

    def __init__(self, resources: Mapping[str, float], labels: Mapping[str, str]) -> None:
        self.left, self.labels = dict(resources), labels
        self.pools: set[str] = set()

    def fits(self, bundle: Bundle) -> bool:
        return all(self.left.get(name, 0.0) + _SLACK >= amount for name, amount in bundle.items())

    def put(self, pool: str, bundle: Bundle) -> None:
        for name, amount in bundle.items():
            self.left[name] -= amount
        self.pools.add(pool)


class _Packing:
    def __init__(self, cluster: Cluster, grows: bool) -> None:
        self.bins = [_Bin(node.resources, node.labels) for node in cluster.nodes]
        self.types = list(cluster.types) if grows else []
        self.room = {kind.name: kind.most for kind in cluster.types}
        workers = 0
        for node in cluster.nodes:
            workers += not node.is_head
            if node.type in self.room:
                self.room[node.type] -= 1
        self.workers_left = None if cluster.most is None else cluster.most - workers
        # what is left of a bin only shrinks: where one shape did not fit, it never will
        self._from: dict[Any, int] = {}
        self._never: dict[Any, str] = {}

    def place(self, wish: Wish, bundle: Bundle) -> str:
        """Lays the bundle on a node. "" or why there is none for it."""
        shape = (*sorted(wish.selector.items()), None, *sorted(bundle.items()))
        if shape in self._never:
            return self._never[shape]
        for index in range(self._from.get(shape, 0), len(self.bins)):
            found = self.bins[index]
            if found.fits(bundle) and matches(wish.selector, found.labels):
                self._from[shape] = index
                found.put(wish.pool, bundle)
                return ""
        self._from[shape] = len(self.bins)
        fitting = [
            kind
            for kind in self.types
            if matches(wish.selector, kind.labels) and _Bin(kind.resources, kind.labels).fits(bundle)
        ]
        kind = min((k for k in fitting if self.room[k.name] > 0), key=_size, default=None)
        if kind is None or self.workers_left == 0:
            self._never[shape] = self._why(wish, bundle, fitting)
            return self._never[shape]
        self.room[kind.name] -= 1
        if self.workers_left is not None:
            self.workers_left -= 1
        self.bins.append(_Bin(kind.resources, kind.labels))
        self.bins[-1].put(wish.pool, bundle)
        return ""

    def _why(self, wish: Wish, bundle: Bundle, fitting: Sequence[NodeType]) -> str:
        if not self.types:
            return "the node types can't be read, and the autoscaler calls the whole infeasible"
        if not fitting:
            amounts = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
            labels = ", ".join(f"{key}={value}" for key, value in wish.selector.items())
            return f"no node type has {amounts}" + (f" and labels {labels}" if labels else "")
        if self.workers_left == 0 and any(self.room[kind.name] > 0 for kind in fitting):
            return "max_workers of the cluster"
        return "max_workers " + ", ".join(f"{kind.most} of {kind.name}" for kind in fitting)


def _size(kind: NodeType) -> tuple[float, float, str]:
    """The smallest that will do: of accelerators first."""
    return kind.resources.get("GPU", 0.0), kind.resources.get("CPU", 0.0), kind.name


def feasible(
    wishes: Sequence[Wish], cluster: Cluster, grows: bool = True, others: Sequence[Wish] = ()
) -> Feasible:
    """What of the wishes the cluster can provide. grows: False for nodes that are there alone. `others`: wishes that
    come after all of these, such as those of who asks for nodes beside the pools.
    """
    turns = [*_in_turns(wishes), *_in_turns(others)]
    wishes = [*wishes, *others]
    cut: dict[str, list[tuple[Bundle, str]]] = {}
    by_turns = True
    while True:  # in the autoscaler's own order what is left must fit, too
        packing, kept = _Packing(cluster, grows), []
        for wish, index in turns:
            if why := packing.place(wish, wish.bundles[index]):
                cut.setdefault(wish.pool, []).append((wish.bundles[index], why))
            else:
                kept.append((wish, index))
        if len(kept) == len(turns) and not by_turns:
            break
        turns, by_turns = sorted(kept, key=_autoscalers_order, reverse=True), False
    indices: dict[str, list[int]] = {}
    for wish, index in turns:
        indices.setdefault(wish.pool, []).append(index)
    return Feasible(
        [
            wish._replace(bundles=[wish.bundles[index] for index in sorted(indices[wish.pool])])
            for wish in wishes
            if wish.pool in indices
        ],
        {pool: _cut(left_out) for pool, left_out in sorted(cut.items())},
        {wish.pool: sum(wish.pool in each.pools for each in packing.bins) for wish in wishes},
    )


def _in_turns(wishes: Sequence[Wish]) -> list[tuple[Wish, int]]:
    """Each one's first bundle, then each one's second, ..."""
    return [
        (wish, index)
        for row in itertools.zip_longest(*(range(len(wish.bundles)) for wish in wishes))
        for wish, index in zip(wishes, row, strict=True)
        if index is not None
    ]


def _autoscalers_order(turn: tuple[Wish, int]) -> tuple[int, int, float]:
    wish, index = turn
    bundle = wish.bundles[index]
    return len(wish.selector), len(bundle), sum(bundle.values())


def _cut(left_out: Sequence[tuple[Bundle, str]]) -> Cut:
    gpus = sum(bundle.get("GPU", 0.0) for bundle, _ in left_out)
    return Cut(len(left_out), gpus, "; ".join(dict.fromkeys(why for _, why in left_out)))


def marker(selector: Mapping[str, str], types: Iterable[NodeType]) -> str | None:
    """A resource that all node types which the selector means have, and no other: by it an autoscaler that does not
    look at labels takes the right type. "" where there is nothing to tell apart, None where nothing does.
    """
    types = list(types)
    meant = [kind for kind in types if matches(selector, kind.labels)]
    others = [kind for kind in types if not matches(selector, kind.labels)]
    if not meant or not others:
        return ""
    common = set.intersection(*({name for name, n in kind.resources.items() if n > 0} for kind in meant))
    own = common - {name for kind in others for name, n in kind.resources.items() if n > 0}
    return min(own, default=None)


def marked(wish: Wish, types: Iterable[NodeType]) -> Wish:
    """The wish with its marker in each bundle."""
    name = marker(wish.selector, types)
    if not name:
        return wish
    return wish._replace(bundles=[{**bundle, name: bundle.get(name, MARKED)} for bundle in wish.bundles])
