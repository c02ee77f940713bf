"""The suite catches every rule that is broken on purpose (mutations.py has the list, and runs alone too)."""

from __future__ import annotations

import pytest
from mutations import MUTANTS, TOP, Mutant, survives


def test_every_mutant_has_one_place() -> None:
    for mutant in MUTANTS:
        assert (TOP / "pools" / mutant.file).read_text().count(mutant.old) == 1, mutant.name
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_is_caught(mutant: Mutant) -> None:
    assert survives(mutant) is None
