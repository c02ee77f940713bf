"""The pages under docs say what the code does.

docs/rules.md: every example in it is a scenario that must hold, on the real core and on the plain reference; what it
stands for is a page of rules that has drifted from what is decided. Docstrings cite sections, which must stay.
docs/log.md: its table of events is the one that logs are read by.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import reference

from ray_pools.core import records, system
from ray_pools.scenario import WorldFactory, run_scenario
from ray_pools.scenario_files import Scenario, parse_scenarios

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "rules.md"
WORLDS: dict[str, WorldFactory] = {"core": system.make_world, "reference": reference.make_world}
_BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SECTION = re.compile(r"^## (\d+)\. ", re.MULTILINE)


def blocks() -> list[tuple[int, str, list[Scenario]]]:
    """(section, where, scenarios) of each example; lines in failures are those of the page."""
    text = PAGE.read_text(encoding="utf-8")
    found = []
    for block in _BLOCK.finditer(text):
        section = [int(one[1]) for one in _SECTION.finditer(text, 0, block.start())][-1]
        line = text.count("\n", 0, block.start(1))
        scenarios = parse_scenarios("\n" * line + block[1], PAGE.name)
        found.append((section, f"{PAGE.name}:{line + 1}", scenarios))
    return found


SCENARIOS = [scenario for _, _, scenarios in blocks() for scenario in scenarios]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: str(scenario.name))
def test_example_holds(scenario: Scenario, world: str) -> None:
    failures = run_scenario(scenario, WORLDS[world])
    assert not failures, "\n".join(failure.text() for failure in failures)


def test_each_rule_has_an_example() -> None:
    sections = {section for section, _, _ in blocks()}
    assert sections >= set(range(2, 10))
    assert len(blocks()) >= 12
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)


def test_sections_keep_their_numbers() -> None:
    """Docstrings cite them."""
    numbers = [int(number) for number in _SECTION.findall(PAGE.read_text(encoding="utf-8"))]
    assert numbers == list(range(1, 12))


def test_the_protocol_keeps_the_headings_that_are_cited() -> None:
    headings = re.findall(r"^## (.+)$", (DOCS / "protocol.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"Links", "Directives", "Bids", "Wire"} <= set(headings)


def test_the_table_of_events_is_that_of_the_code() -> None:
    row = re.compile(r"^\| (\d+) \| `(\w+)` \| [a-z]+ \| ([a-z_0-9, ]+) \|", re.MULTILINE)
    page = (DOCS / "log.md").read_text(encoding="utf-8")
    shown, later = row.findall(page), dict(re.findall(r"`(\w+)`, which is in version (\d+)", page))
    assert len(shown) == len(records.Event.__args__)
    for tag, name, fields in shown:
        cls = getattr(records, name)
        assert tuple(fields.split(", ")) == cls._fields, name
        assert isinstance(records.unpack(records.pack(cls(*range(len(cls._fields))))), cls)
        version = int(later.get(name, 1))
        assert records.pack(cls(*range(len(cls._fields))))[1:3] == bytes([int(tag), version]), name
