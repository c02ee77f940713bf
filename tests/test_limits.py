"""docs/limits.md says of every limit in the code what it is: a page that is right today stays so."""

from __future__ import annotations

import re
from pathlib import Path

from ray_pools import limits
from ray_pools.core.access import LIMITS

PAGE = (Path(__file__).parent.parent / "docs" / "limits.md").read_text()


def test_every_limit_is_in_the_table_with_its_value() -> None:
    told = {
        name: int(value.replace(",", ""))
        for name, value in re.findall(r"^\| `([A-Z_]+)` \| ([\d,]+) \|", PAGE, re.MULTILINE)
    }
    assert told == {
        name: value for name, value in vars(limits).items() if name.isupper() and isinstance(value, int)
    }


def test_the_limits_that_a_configuration_sets_are_told_with_their_defaults() -> None:
    for name, (default, _) in LIMITS.items():
        assert f"{name}: {default}\n" in PAGE
