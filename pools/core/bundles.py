"""From a request's amounts to Ray bundles: what its placement group asks Ray for (docs/rules.md section 2).

Only keys that the pool maps to a Ray resource become part of a bundle; the others (`step_run`, a licence) are
only counted. A request with no mapped amount needs no group and gives no bundle. Amounts stay integers until the
very end, so the bundles always sum up to the request exactly. The prewarmer asks for nodes in the same bundles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import BadInput
from ..limits import AMOUNT_MAX, BUNDLES_MAX, KEYS_MAX, integer_problem, name_problem
from .config_rules import DEFAULT_RESOURCES, STRATEGIES

TASK_CPU = 1.0
"""A bundle without CPU fits no default task (it asks for 1 CPU), so each carries one that nobody pays for."""

UNIT_RESOURCES = ("GPU", "TPU", "NPU")
"""Ray hands these out by device: below one a share of one device, from one on whole devices only."""

COUNTED = "none"

Bundle = dict[str, float]


def bundles_for(
    amounts: Mapping[str, int], placement: Mapping[str, Any] | None, options: Mapping[str, Any] | None = None
) -> list[Bundle]:
    """The bundles of one request in a pool with this placement; empty when its grant only counts.

    A request beyond the pool's `node` is split into the fewest bundles that fit, as equal as can be. The
    request's own `bundles` win over that: a key that they name must add up to the request (BadInput), a
    mapped key that none of them names is spread over all of them.
    """
    options = options or {}
    if placement is None or options.get("placement") == COUNTED:
        return []
    mapping = mapping_of(placement)
    mapped = {key: amount for key, amount in amounts.items() if key in mapping and amount > 0}
    if not mapped:
        return []
    gang = options.get("bundles")
    if gang:
        _check_gang(amounts, gang)
        shares = _gang_shares(mapped, gang)
    else:
        shares = _even_shares(mapped, bundle_count(mapped, _mapping(placement.get("node"))))
    return [_ray_bundle(share, mapping) for share in shares]


def bundle_count(amounts: Mapping[str, int], node: Mapping[str, int]) -> int:
    """The fewest bundles of which none is larger than `node` in any key that it names."""
    count = max((-(-amount // node[key]) for key, amount in amounts.items() if node.get(key)), default=1)
    if count > BUNDLES_MAX:
        key = max((key for key in amounts if node.get(key)), key=lambda each: amounts[each] / node[each])
        most = BUNDLES_MAX * node[key]
        raise BadInput(
            key, amounts[key], f"at most {most}: {BUNDLES_MAX} bundles of {node[key]}, the most of one node"
        )
    return max(count, 1)


def strategy_for(placement: Mapping[str, Any] | None, options: Mapping[str, Any] | None = None) -> str:
    """How the bundles lie on nodes: the request's own word, else the pool's, else PACK."""
    return str((options or {}).get("strategy") or (placement or {}).get("strategy") or "PACK")


def selector_for(placement: Mapping[str, Any] | None) -> dict[str, str]:
    """Ray's label selector of each bundle: the pool's labels."""
    return dict(sorted(_mapping((placement or {}).get("labels")).items()))


def validate_options(amounts: Mapping[str, int], options: Mapping[str, Any] | None) -> None:
    """What a request may say about its placement, whatever its pool: BadInput names the option. Others pass."""
    options = options or {}
    strategy = options.get("strategy")
    if strategy is not None and strategy not in STRATEGIES:
        raise BadInput("strategy", strategy, f"one of {', '.join(STRATEGIES)}")
    placement = options.get("placement")
    if placement is not None and placement != COUNTED:
        raise BadInput("placement", placement, f"{COUNTED} (the grant only counts), or left out")
    gang = options.get("bundles")
    if gang is not None:
        if placement == COUNTED:
            raise BadInput("bundles", gang, f"left out: with placement {COUNTED} there is no group")
        _check_gang(amounts, gang)


def resource_totals(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sum of bundles per Ray resource."""
    totals: dict[str, float] = {}
    for bundle in bundles:
        for resource, amount in bundle.items():
            totals[resource] = totals.get(resource, 0.0) + amount
    return totals


def ray_amount(amount: int, divisor: float) -> float:
    """An amount in Ray's units. Ray keeps four decimals; a divisor such as 0.000001 must not leave 999999.9999."""
    exact = amount / divisor
    return round(exact, 4) or 0.0001


def _check_gang(amounts: Mapping[str, int], gang: Any) -> None:
    if not isinstance(gang, (list, tuple)) or not 0 < len(gang) <= BUNDLES_MAX:
        raise BadInput("bundles", gang, f"a list of 1 to {BUNDLES_MAX} mappings of resource keys to integers")
    sums: dict[str, int] = {}
    for index, part in enumerate(gang):
        field = f"bundles[{index}]"
        if not isinstance(part, Mapping) or not 0 < len(part) <= KEYS_MAX:
            raise BadInput(field, part, f"a mapping of 1 to {KEYS_MAX} resource keys to integers")
        for key, amount in part.items():
            expected = name_problem(key)
            if expected:
                raise BadInput(f"{field} (a key)", key, expected)
            shown_key = f"{field}.{key[:40]}"
            expected = integer_problem(amount, 0, AMOUNT_MAX)
            if expected:
                raise BadInput(shown_key, amount, expected)
            if key not in amounts:
                raise BadInput(shown_key, amount, "only keys that the request asks for")
            sums[key] = sums.get(key, 0) + amount
        if not any(part.values()):
            raise BadInput(field, dict(part), "at least one amount above 0")
    for key, total in sums.items():
        if total != amounts[key]:
            raise BadInput(
                "bundles",
                list(gang),
                f"bundles whose {key} sums up to the request's {amounts[key]} (not {total})",
            )


def _gang_shares(mapped: Mapping[str, int], gang: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    named = {key for part in gang for key in part}
    spread = _even_shares({key: n for key, n in mapped.items() if key not in named}, len(gang))
    return [
        {**{key: n for key, n in part.items() if key in mapped and n > 0}, **rest}
        for part, rest in zip(gang, spread, strict=True)
    ]


def _even_shares(amounts: Mapping[str, int], count: int) -> list[dict[str, int]]:
    """Near-equal integer parts, the larger ones first; what a part has nothing of it does not name."""
    shares: list[dict[str, int]] = [{} for _ in range(count)]
    for key, amount in amounts.items():
        base, extra = divmod(amount, count)
        for index, share in enumerate(shares):
            part = base + (index < extra)
            if part:
                share[key] = part
    return shares


def _ray_bundle(share: Mapping[str, int], mapping: Mapping[str, tuple[str, float]]) -> Bundle:
    bundle: Bundle = {}
    for key, amount in share.items():
        resource, divisor = mapping[key]
        bundle[resource] = bundle.get(resource, 0.0) + ray_amount(amount, divisor)
    for resource in UNIT_RESOURCES:
        amount_wanted = bundle.get(resource, 0.0)
        if amount_wanted > 1 and amount_wanted != int(amount_wanted):
            raise BadInput(
                resource, amount_wanted, f"a share of one {resource}, or whole ones, in each bundle"
            )
    bundle.setdefault("CPU", TASK_CPU)
    return dict(sorted(bundle.items()))


def mapping_of(placement: Mapping[str, Any] | None) -> dict[str, tuple[str, float]]:
    """Key to Ray's resource and how many of the key's units one of it is, as the pool says; else by default."""
    resources = (placement or {}).get("resources")
    pairs = DEFAULT_RESOURCES if resources is None else resources
    return {key: (str(resource), float(divisor)) for key, (resource, divisor) in pairs.items()}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
