"""Amounts to Ray bundles: splitting over nodes, gangs, what is only counted, and every wrong option (section 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_pools.core.bundles import (
    bundles_for,
    resource_totals,
    selector_for,
    strategy_for,
    validate_options,
)
from ray_pools.errors import BadInput
from ray_pools.limits import BUNDLES_MAX

NODE4 = {"node": {"gpu": 4}}
MB = 1_000_000.0


@pytest.mark.parametrize(
    ("amounts", "placement", "options", "bundles"),
    [
        ({"gpu": 1, "step_run": 1}, {}, {}, [{"CPU": 1, "GPU": 1}]),
        ({"gpu": 8, "step_run": 1}, {}, {}, [{"CPU": 1, "GPU": 8}]),
        ({"gpu": 8}, NODE4, {}, [{"CPU": 1, "GPU": 4}, {"CPU": 1, "GPU": 4}]),
        ({"gpu": 6}, NODE4, {}, [{"CPU": 1, "GPU": 3}, {"CPU": 1, "GPU": 3}]),
        ({"gpu": 7}, NODE4, {}, [{"CPU": 1, "GPU": 4}, {"CPU": 1, "GPU": 3}]),
        ({"gpu": 4}, NODE4, {}, [{"CPU": 1, "GPU": 4}]),
        # the key that needs most nodes decides, the others are spread: 3 + 3 + 2 GPUs, no remainder lost
        (
            {"gpu": 8, "memory_mb": 250},
            {"node": {"gpu": 4, "memory_mb": 100}},
            {},
            [
                {"CPU": 1, "GPU": 3, "memory": 84 * MB},
                {"CPU": 1, "GPU": 3, "memory": 83 * MB},
                {"CPU": 1, "GPU": 2, "memory": 83 * MB},
            ],
        ),
        ({"gpu": 1, "mcpu": 2500}, {}, {}, [{"CPU": 2.5, "GPU": 1}]),
        ({"mcpu": 69}, {}, {}, [{"CPU": 0.069}]),
        ({"memory_mb": 1}, {}, {}, [{"CPU": 1, "memory": MB}]),
        # only counted: no group at all
        ({"step_run": 1, "licence": 3}, {}, {}, []),
        ({"gpu": 0, "step_run": 1}, {}, {}, []),
        ({"gpu": 2}, None, {}, []),
        ({"gpu": 2}, {}, {"placement": "none"}, []),
        ({"gpu": 2, "mcpu": 1000}, {"resources": {"mcpu": ["CPU", 1000]}}, {}, [{"CPU": 1}]),
        # keys of the pool's own, and two keys on one resource
        ({"slice": 3}, {"resources": {"slice": ["GPU", 4]}}, {}, [{"CPU": 1, "GPU": 0.75}]),
        ({"a": 1, "b": 2}, {"resources": {"a": ["disk", 1], "b": ["disk", 1]}}, {}, [{"CPU": 1, "disk": 3}]),
        # gangs
        (
            {"gpu": 3, "step_run": 1},
            NODE4,
            {"bundles": [{"gpu": 1}, {"gpu": 2}]},
            [{"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 2}],
        ),
        (
            {"gpu": 2, "mcpu": 3000},
            {},
            {"bundles": [{"gpu": 1}, {"gpu": 1}]},
            [{"CPU": 1.5, "GPU": 1}, {"CPU": 1.5, "GPU": 1}],
        ),
        ({"gpu": 1, "mcpu": 500}, {}, {"bundles": [{"gpu": 1}, {"mcpu": 500}]}, [{"CPU": 1, "GPU": 1}, {"CPU": 0.5}]),
    ],
)  # fmt: skip
def test_bundles(
    amounts: dict[str, int], placement: Any, options: dict[str, Any], bundles: list[dict[str, float]]
) -> None:
    assert bundles_for(amounts, placement, options) == bundles


def test_memory_of_many_megabytes_is_whole_bytes() -> None:
    """The divisor 0.000001 is no binary fraction: bytes must not come out as 16383999999.999998."""
    (bundle,) = bundles_for({"memory_mb": 16_384}, {"resources": {"memory_mb": ["memory", 0.000001]}}, {})
    assert bundle["memory"] == 16_384_000_000


@given(
    amounts=st.dictionaries(st.sampled_from(["gpu", "mcpu", "memory_mb"]), st.integers(1, 300), min_size=1),
    node=st.dictionaries(st.sampled_from(["gpu", "mcpu", "memory_mb"]), st.integers(1, 50)),
)
def test_bundles_sum_up_to_the_request_and_fit_a_node(amounts: dict[str, int], node: dict[str, int]) -> None:
    pairs = {"gpu": ("GPU", 1), "mcpu": ("CPU", 1000), "memory_mb": ("memory", 0.000001)}
    bundles = bundles_for(amounts, {"node": node}, {})
    totals = resource_totals(bundles)
    for key, amount in amounts.items():
        resource, divisor = pairs[key]
        if resource == "CPU":  # some are nobody's: parts of the request with none of it get one
            assert totals[resource] >= amount / divisor - 1e-6
        else:
            assert totals[resource] == pytest.approx(amount / divisor)
        parts = [round(bundle.get(resource, 0) * divisor) for bundle in bundles]
        if resource != "CPU":
            assert max(parts) - min(parts) <= 1
        assert all(part <= node.get(key, amount) for part in parts if resource != "CPU")
    fewest = max([-(-amount // node[key]) for key, amount in amounts.items() if key in node] or [1])
    assert len(bundles) == fewest


@pytest.mark.parametrize(
    ("amounts", "options", "field", "word"),
    [
        ({"gpu": 2}, {"strategy": "NEAR"}, "strategy", "STRICT_SPREAD"),
        ({"gpu": 2}, {"placement": "maybe"}, "placement", "none"),
        ({"gpu": 2}, {"bundles": []}, "bundles", "a list of 1"),
        ({"gpu": 2}, {"bundles": "gpu"}, "bundles", "a list of 1"),
        ({"gpu": 2}, {"bundles": [3]}, "bundles[0]", "mapping"),
        ({"gpu": 2}, {"bundles": [{"gpu": 2}, {}]}, "bundles[1]", "mapping"),
        ({"gpu": 2}, {"bundles": [{"gpu": 2}, {"gpu": 0}]}, "bundles[1]", "above 0"),
        ({"gpu": 2}, {"bundles": [{"gpu": 1}, {"gpu": 2}]}, "bundles", "request's 2 (not 3)"),
        ({"gpu": 2}, {"bundles": [{"gpu": 2, "mcpu": 5}]}, "bundles[0].mcpu", "asks for"),
        ({"gpu": 2}, {"bundles": [{"gpu": -2}, {"gpu": 4}]}, "bundles[0].gpu", "integer from 0"),
        ({"gpu": 2}, {"bundles": [{"gpu": 1.0}, {"gpu": 1}]}, "bundles[0].gpu", "integer"),
        ({"gpu": 2}, {"bundles": [{"gpu": True}, {"gpu": 1}]}, "bundles[0].gpu", "integer"),
        ({"gpu": 2}, {"bundles": [{"g\npu": 2}]}, "bundles[0] (a key)", "printable"),
        ({"gpu": 2000}, {"bundles": [{"gpu": 1}] * 2000}, "bundles", str(BUNDLES_MAX)),
        ({"gpu": 2}, {"placement": "none", "bundles": [{"gpu": 2}]}, "bundles", "left out"),
    ],
)
def test_wrong_options_are_named(
    refuses: Callable[..., Any], amounts: dict[str, int], options: dict[str, Any], field: str, word: str
) -> None:
    with refuses(field, word):
        validate_options(amounts, options)


def test_right_options_pass() -> None:
    validate_options({"gpu": 2}, None)
    validate_options({"gpu": 2}, {"other": object()})
    validate_options({"gpu": 2, "step_run": 1}, {"strategy": "SPREAD", "bundles": [{"gpu": 1}, {"gpu": 1}]})


def test_what_ray_could_never_hand_out_is_refused(refuses: Callable[..., Any]) -> None:
    with refuses("GPU", "whole ones"):
        bundles_for({"slice": 6}, {"resources": {"slice": ["GPU", 4]}}, {})
    with refuses("gpu", "at most 1000"):
        bundles_for({"gpu": 1001}, {"node": {"gpu": 1}}, {})
    with pytest.raises(BadInput):
        bundles_for({"gpu": 3}, {}, {"bundles": [{"gpu": 1}]})


def test_strategy_and_selector() -> None:
    assert strategy_for(None) == "PACK"
    assert strategy_for({"strategy": "SPREAD"}, {}) == "SPREAD"
    assert strategy_for({"strategy": "SPREAD"}, {"strategy": "STRICT_PACK"}) == "STRICT_PACK"
    assert selector_for({"labels": {"b": "2", "a": "in(1,3)"}}) == {"a": "in(1,3)", "b": "2"}
    assert selector_for(None) == {}
