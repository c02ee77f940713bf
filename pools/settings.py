"""From what a user writes to integer amounts per resource key (docs/rules.md section 2).

All arithmetic is exact: a cpu count goes through its decimal text, never through binary fractions, so 0.069
is 69 thousandths and not 70. Nothing here knows pools; whether anyone can grant the amounts is admission.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from .errors import BadInput
from .limits import AMOUNT_MAX, KEYS_MAX, check_integer, check_name

GPU, MCPU, MEMORY_MB, STEP_RUN = "gpu", "mcpu", "memory_mb", "step_run"

AMOUNT_SETTINGS = ("gpu_count", "cpu_count", "memory", "pool_resources")

_MEMORY_TEXT = re.compile(r"([0-9]{1,40}(?:\.[0-9]{1,40})?) ?(?:([kmgtp])(i?)b?)?", re.IGNORECASE | re.ASCII)
_CPU_TEXT = re.compile(r"[0-9]{1,40}(\.[0-9]{1,40})?", re.ASCII)
_MEMORY_EXPECTED = (
    'bytes as an integer, or text like "16GiB", "1.5GB" or "500M" '
    "(units K M G T P, with or without B, and Ki Mi Gi Ti Pi likewise; without a unit: bytes)"
)
_CPU_EXPECTED = (
    f'a finite number of CPUs from 0 to {AMOUNT_MAX // 1000}, such as 4, 0.5 or "0.069"; in text only digits and a'
    " point, no exponent"
)


@dataclass(frozen=True)
class ResourceSettings:
    """What one request asks for, as its user writes it. Checked when made: BadInput names the field.

    gpu_count: whole GPUs. cpu_count: CPUs, fractions allowed, rounded up to a thousandth. memory: "16GiB",
    "8GB", or bytes as an integer. pool_resources: further keys with integer amounts (licences, sessions);
    a typed field wins over the same key. preemptible: whether the pools may stop it for others.
    0 or None in the first three asks for nothing and overrides nothing.
    """

    gpu_count: int | None = None
    cpu_count: int | float | str | Decimal | None = None
    memory: int | str | None = None
    pool_resources: Mapping[str, int] | None = None
    preemptible: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.preemptible, bool):
            raise BadInput("preemptible", self.preemptible, "true or false")
        if self.pool_resources is not None:
            # a copy: what was checked is what is sent, whatever the caller does to its own mapping
            object.__setattr__(
                self, "pool_resources", _checked_amounts("pool_resources", self.pool_resources)
            )
        self.amounts()

    def amounts(self) -> dict[str, int]:
        """Integer amounts per key, by key; `step_run` is always 1."""
        found = dict(self.pool_resources or {})
        typed = {
            GPU: 0 if self.gpu_count is None else check_integer("gpu_count", self.gpu_count),
            MCPU: parse_mcpu(self.cpu_count),
            MEMORY_MB: parse_memory_mb(self.memory),
        }
        found.update({key: amount for key, amount in typed.items() if amount > 0})
        return _with_step_run(found, "pool_resources")


def amounts_from_settings(
    settings: Mapping[str, Any] | ResourceSettings, field: str = "settings"
) -> dict[str, int]:
    """The amounts of settings, typed or as a mapping of gpu_count, cpu_count, memory, pool_resources.

    BadInput names `field` and the key. `preemptible` is no amount: it stands beside the mapping, not in it.
    """
    if isinstance(settings, ResourceSettings):
        return settings.amounts()
    if not isinstance(settings, Mapping):
        raise BadInput(field, settings, f"a mapping with any of {', '.join(AMOUNT_SETTINGS)}")
    for key in settings:
        if key not in AMOUNT_SETTINGS:
            raise BadInput(f"{field}.{_key_text(key)}", settings[key], unknown_key(key, AMOUNT_SETTINGS))
    try:
        return ResourceSettings(**settings).amounts()
    except BadInput as problem:
        raise BadInput(f"{field}.{problem.field}", problem.value, problem.expected) from None


def amounts_from_resources(resources: Mapping[str, Any], field: str = "resources") -> dict[str, int]:
    """Raw amounts as they are, zeros included, by key; only `step_run` is 1 whatever was written."""
    return _with_step_run(_checked_amounts(field, resources), field)


def parse_mcpu(value: object, field: str = "cpu_count") -> int:
    """ceil(cpus * 1000), exact. None is 0."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        raise BadInput(field, value, _CPU_EXPECTED)
    if isinstance(value, str) and not _CPU_TEXT.fullmatch(value):
        raise BadInput(field, value, _CPU_EXPECTED)
    # a float's text is the shortest decimal that means it: what the user wrote
    cpus = Decimal(str(value)) if isinstance(value, (float, str)) else Decimal(value)
    if not cpus.is_finite() or cpus < 0 or cpus > AMOUNT_MAX // 1000:
        raise BadInput(field, value, _CPU_EXPECTED)
    if 0 < cpus < Decimal("0.001"):
        return 1  # before Fraction, which would write 1E-999999999 out in full
    return math.ceil(Fraction(cpus) * 1000)


def parse_memory_mb(value: object, field: str = "memory") -> int:
    """Bytes / 10^6, rounded up, exact. None is 0. Text may have a unit; a number is bytes."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise BadInput(field, value, _MEMORY_EXPECTED)
    if isinstance(value, int):
        count, power, base = Fraction(value), 0, 1000
    else:
        match = _MEMORY_TEXT.fullmatch(value.strip())
        if match is None:
            raise BadInput(field, value, _MEMORY_EXPECTED)
        unit = (match[2] or "").lower()
        count = Fraction(match[1])
        power = "kmgtp".index(unit) + 1 if unit else 0
        base = 1024 if match[3] else 1000
    amount_mb: int = math.ceil(count * base**power / 1_000_000)
    if count < 0 or amount_mb > AMOUNT_MAX:
        raise BadInput(field, value, f"{_MEMORY_EXPECTED}, from 0 to {AMOUNT_MAX} MB")
    return amount_mb


def unknown_key(key: object, known: tuple[str, ...] | list[str]) -> str:
    """What would be right in place of an unknown key: the closest known one first, then all."""
    close = difflib.get_close_matches(str(key)[:100], known, n=1)
    guess = f"did you mean {close[0]}? " if close else ""
    return f"unknown key; {guess}known: {', '.join(known)}"


def _checked_amounts(field: str, resources: object) -> dict[str, int]:
    if not isinstance(resources, Mapping):
        raise BadInput(field, resources, "a mapping of resource keys to integer amounts")
    if len(resources) > KEYS_MAX:
        raise BadInput(field, f"{len(resources)} keys", f"at most {KEYS_MAX} keys")
    found = {}
    for key, amount in resources.items():
        check_name(f"{field} (a key)", key)
        found[key] = check_integer(f"{field}.{_key_text(key)}", amount)
    return dict(sorted(found.items()))


def _with_step_run(amounts: dict[str, int], field: str) -> dict[str, int]:
    """Adds the one slot that every request takes, however it was written."""
    found = dict(sorted({**amounts, STEP_RUN: 1}.items()))
    if len(found) > KEYS_MAX:
        raise BadInput(field, f"{len(found)} keys", f"at most {KEYS_MAX} keys, step_run among them")
    return found


def _key_text(key: object) -> str:
    """A key inside a field's path: short and printable, whatever it is."""
    text = str(key)[:40] if isinstance(key, str) else repr(key)[:40]
    return text if text.isprintable() else ascii(text)
