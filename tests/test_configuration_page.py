"""docs/configuration.md has every key of the configuration, under its place, with the default that the code has.

Fault: a key that nobody can find but in the source, or a page that says another default than what is taken.
"""

from __future__ import annotations

import re
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from test_readme import ROOT

from ray_pools.config import Config, PlacementModel
from ray_pools.core.config_rules import QUEUEINGS, RESERVED_NAMES, STRATEGIES
from ray_pools.limits import (
    AMOUNT_MAX,
    KEYS_MAX,
    LABELS_MAX,
    LIVE_REQUESTS_MAX,
    NAME_MAX_CHARS,
    POLICIES_MAX,
    POOLS_MAX,
    PRIORITY_ABS_MAX,
    REQUESTERS_MAX,
    SECONDS_MAX,
)

PAGE = (ROOT / "docs" / "configuration.md").read_text()


def tables() -> dict[str, dict[str, list[str]]]:
    """Heading to key to its row's other cells."""
    found: dict[str, dict[str, list[str]]] = {}
    for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", text, re.MULTILINE)
        found[heading] = {key: [cell.strip() for cell in rest.split(" | ")] for key, rest in rows}
    return found


def models(model: type[BaseModel], path: str) -> dict[str, type[BaseModel]]:
    """Each model below, by its place in the file."""
    found = {path or "The file": model}
    for name, field in model.model_fields.items():
        inner, many = _model_in(field.annotation, "")
        if inner is not None:
            found |= models(inner, f"{path}.{name}{many}" if path else f"{name}{many}")
    return found


def _model_in(annotation: Any, many: str) -> tuple[type[BaseModel] | None, str]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, many
    kind = {dict: ".NAME", list: "[]"}.get(getattr(annotation, "__origin__", None), "")
    for part in get_args(annotation):
        inner, more = _model_in(part, many + kind)
        if inner is not None:
            return inner, more
    return None, ""


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "as below"
    if isinstance(value, str):
        return f"`{value}`" if value else "none"
    return (
        f"{value:,g}"
        if isinstance(value, (int, float)) and value < 1e5
        else f"{value:,}"
        if value
        else "none"
    )


def test_every_key_is_on_the_page_with_its_default() -> None:
    shown = tables()
    wanted = models(Config, "")
    assert shown.keys() == wanted.keys()
    for place, model in wanted.items():
        assert list(shown[place]) == list(model.model_fields), place
        for name, field in model.model_fields.items():
            if (place, name) == ("pools.NAME.placement", "resources"):
                continue  # below
            assert shown[place][name][1] == default_of(field), f"{place}: {name}"
    said = shown["pools.NAME.placement"]["resources"][1]
    for key, (resource, divisor) in PlacementModel().resources.items():
        assert f"`{key}: [{resource}, {divisor:f}]`".replace(".000000", "") in said


def test_the_limits_on_the_page_are_those_of_the_code() -> None:
    for amount in (NAME_MAX_CHARS, AMOUNT_MAX, KEYS_MAX, SECONDS_MAX):
        assert f"{amount:,}" in PAGE.partition("## ")[0]
    shown = tables()
    for place, key, words in (
        ("The file", "pools", f"{POOLS_MAX:,}"),
        ("The file", "policies", f"{POLICIES_MAX:,}"),
        ("The file", "requesters", f"{REQUESTERS_MAX:,}"),
        ("pools.NAME", "queueing", ", ".join(f"`{each}`" for each in QUEUEINGS)),
        ("pools.NAME.placement", "strategy", ", ".join(f"`{each}`" for each in STRATEGIES)),
        ("pools.NAME.placement", "labels", f"{LABELS_MAX}"),
        ("policies[]", "priority", f"{PRIORITY_ABS_MAX:,}"),
        ("limits", "live_requests", f"{LIVE_REQUESTS_MAX:,}"),
        ("limits", "waiting_per_requester", f"{LIVE_REQUESTS_MAX:,}"),
    ):
        assert words in shown[place][key][2], (place, key)
    for name in RESERVED_NAMES:
        assert f"`{name}`" in PAGE
