"""Section 2 of docs/rules.md: settings become exact integer amounts, and what can't be one is refused by name."""

from __future__ import annotations

import dataclasses
import pickle
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from conftest import BadInputReader
from hypothesis import given
from hypothesis import strategies as st

from ray_pools.errors import BadInput, LeaseExpired, ProtocolMismatch, Refused, SlotRejected, shown
from ray_pools.limits import AMOUNT_MAX, KEYS_MAX, NAME_MAX_CHARS, check_name
from ray_pools.settings import (
    ResourceSettings,
    amounts_from_resources,
    amounts_from_settings,
    parse_mcpu,
    parse_memory_mb,
)


@pytest.mark.parametrize(
    ("settings", "amounts"),
    [
        ({}, {"step_run": 1}),
        ({"gpu_count": 2}, {"gpu": 2, "step_run": 1}),
        ({"gpu_count": 0, "cpu_count": 0, "memory": 0}, {"step_run": 1}),
        ({"gpu_count": None, "cpu_count": None, "memory": None, "pool_resources": None}, {"step_run": 1}),
        # a typed field wins over the same key, but 0 or none overrides nothing
        ({"gpu_count": 3, "pool_resources": {"gpu": 7}}, {"gpu": 3, "step_run": 1}),
        ({"gpu_count": 0, "pool_resources": {"gpu": 7}}, {"gpu": 7, "step_run": 1}),
        ({"cpu_count": 0.0, "pool_resources": {"mcpu": 7}}, {"mcpu": 7, "step_run": 1}),
        ({"memory": "0GB", "pool_resources": {"memory_mb": 7}}, {"memory_mb": 7, "step_run": 1}),
        ({"pool_resources": {"licence": 0, "step_run": 9}}, {"licence": 0, "step_run": 1}),
        ({"cpu_count": 4, "memory": "16GiB"}, {"mcpu": 4000, "memory_mb": 17180, "step_run": 1}),
    ],
)
def test_settings_become_amounts(settings: dict[str, Any], amounts: dict[str, int]) -> None:
    assert amounts_from_settings(settings) == amounts
    assert amounts_from_settings(ResourceSettings(**settings)) == amounts


@pytest.mark.parametrize(
    ("cpu_count", "mcpu"),
    [
        (0.069, 69),
        (0.0015, 2),
        ("1.0001", 1001),
        (Decimal("0.1"), 100),
        (1e-05, 1),
        (1.1, 1100),
        (Decimal("1e-999999999"), 1),
        (AMOUNT_MAX // 1000, AMOUNT_MAX // 1000 * 1000),
    ],
)
def test_cpus_are_counted_in_exact_decimals(cpu_count: Any, mcpu: int) -> None:
    assert parse_mcpu(cpu_count) == mcpu


@given(st.integers(0, 10**9))
def test_a_whole_number_of_thousandths_is_never_rounded_up(thousandths: int) -> None:
    assert parse_mcpu(thousandths / 1000) == thousandths


_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_UNITS |= {f"{unit}i": 1024 ** (index + 1) for index, unit in enumerate("kmgtp")}


@given(
    st.integers(0, 5000),
    st.integers(0, 999),
    st.sampled_from([*_UNITS, ""]),
    st.sampled_from(["", "b"]),
    st.booleans(),
)
def test_memory_is_bytes_in_mb_rounded_up(whole: int, part: int, unit: str, b: str, upper: bool) -> None:
    text = f"{whole}.{part:03}{unit}{b if unit else ''}"
    exact = (Fraction(whole) + Fraction(part, 1000)) * _UNITS.get(unit, 1) / 10**6
    amount = parse_memory_mb(text.upper() if upper else text)
    assert amount - 1 < exact <= amount


@pytest.mark.parametrize(
    ("memory", "memory_mb"),
    [
        ("16GiB", 17180),
        ("8GB", 8000),
        ("8g", 8000),
        ("1.5 GiB", 1611),
        (500, 1),
        ("500", 1),
        (1_000_000, 1),
        (1_000_001, 2),
        ("1KiB", 1),
        ("0", 0),
        ("1pI", 1_125_899_907),
    ],
)
def test_memory_units(memory: Any, memory_mb: int) -> None:
    assert parse_memory_mb(memory) == memory_mb


_BAD_SETTINGS: list[tuple[str, Any, str]] = [
    *[
        ("gpu_count", value, "integer")
        for value in (True, 1.0, -1, "1", AMOUNT_MAX + 1, 10**5000, [], float("nan"))
    ],
    *[
        ("cpu_count", value, "CPUs")
        for value in (
            True,
            -1,
            -0.5,
            float("nan"),
            float("inf"),
            "",
            "1e3",
            "-1",
            "x",
            "\u0661",
            [],
            10**5000,
            1e300,
        )
    ],
    *[("cpu_count", Decimal(text), "CPUs") for text in ("sNaN", "-1", "1e999999999")],
    *[
        ("memory", value, "16GiB")
        for value in (
            True,
            1.5,
            -1,
            "-1GB",
            "16XB",
            "16GiBB",
            "5B",
            "GB",
            "",
            "1e9",
            "1_000",
            "\uff11",
            b"1",
            10**5000,
        )
    ],
    ("memory", "9" * 10_000, "16GiB"),
    ("memory", "9" * 40 + "PiB", "16GiB"),
    ("pool_resources", [1], "mapping"),
    ("pool_resources.x", -1, "integer"),
    ("pool_resources.x", True, "integer"),
    ("pool_resources.x", 1.0, "integer"),
    ("pool_resources.step_run", -1, "integer"),
]


@pytest.mark.parametrize(("field", "value", "word"), _BAD_SETTINGS, ids=lambda value: shown(value, 40))
def test_a_wrong_setting_is_refused_by_name(
    field: str, value: Any, word: str, refuses: BadInputReader
) -> None:
    name, _, key = field.partition(".")
    settings = {name: {key: value} if key else value}
    with refuses(field, word):
        ResourceSettings(**settings)
    with refuses(f"settings.{field}", word):
        amounts_from_settings(settings)


def test_settings_hold_what_was_checked(refuses: BadInputReader) -> None:
    theirs = {"licence": 1}
    settings = ResourceSettings(gpu_count=1, pool_resources=theirs)
    theirs["licence"] = -5
    assert settings.amounts() == {"gpu": 1, "licence": 1, "step_run": 1}
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.gpu_count = -1  # type: ignore[misc]
    with refuses("preemptible", "true or false"):
        ResourceSettings(preemptible="no")  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_an_unknown_setting_is_told_with_the_closest(refuses: BadInputReader) -> None:
    with refuses("settings.gpu_cuont", "did you mean gpu_count?"):
        amounts_from_settings({"gpu_cuont": 1})
    with refuses("settings", "mapping"):
        amounts_from_settings([1])  # type: ignore[arg-type]


def test_raw_resources_are_taken_as_they_are(refuses: BadInputReader) -> None:
    assert amounts_from_resources({"gpu": 0, "b": 2, "a": 1}) == {"a": 1, "b": 2, "gpu": 0, "step_run": 1}
    assert list(amounts_from_resources({"z": 1, "a": 1})) == [
        "a",
        "step_run",
        "z",
    ]  # the same content packs the same
    assert amounts_from_resources({"step_run": 0}) == {"step_run": 1}
    for value in (True, 1.0, -1, "1", None):
        with refuses("resources.gpu", "integer"):
            amounts_from_resources({"gpu": value})
    with refuses("resources", "at most"):
        amounts_from_resources({f"k{index}": 1 for index in range(KEYS_MAX)})


@pytest.mark.parametrize(
    "name", ["", " a", "a ", "a\nb", "a\x00", "x" * 10_000, "a\u2028b", "\ud800", "a\x1b[31m", None, 7, b"a"]
)
def test_what_no_name_can_be(name: Any, refuses: BadInputReader) -> None:
    with refuses("pool", "printable characters"):
        check_name("pool", name)
    with refuses("resources (a key)", "printable characters"):
        amounts_from_resources({name: 1})


@pytest.mark.parametrize("name", ["a", "team a", "x" * NAME_MAX_CHARS, "équipe-東京", "a/b:c@d"])
def test_what_a_name_can_be(name: str) -> None:
    assert check_name("pool", name) == name


@pytest.mark.parametrize(
    "error",
    [
        BadInput("gpu", "x", "an integer", "demo.yaml:3"),
        Refused("unknown_id", "no such request", {"id": "a"}),
        ProtocolMismatch(1, 2),
        LeaseExpired("a", "not renewed for 60 s"),
        SlotRejected("a", {"p": "no_policy"}),
    ],
)
def test_errors_survive_pickling(error: Exception) -> None:
    # a task inside a slot may raise one, and Ray pickles it to its caller
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_a_value_is_shown_short_and_printable() -> None:
    assert shown("a\x1b[31m\n") == r"'a\x1b[31m\n'"
    for value in ("x" * 10**6, b"x" * 10**6, 10**5000, ["x"] * 10**4, "\x00" * 10**6):
        assert len(shown(value)) < 120
