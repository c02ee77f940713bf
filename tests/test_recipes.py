"""The recipes and the examples of docs/functions.md: the pages show the files as they are, and every file runs on live
Ray with the README's configuration."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_readme import ROOT, Shell, pools_up

PAGES = ("functions.md", "recipes.md")
NEEDS = {
    "tune_inside": "pyarrow",
    "train_beside": "pyarrow",
    "data_beside": "pyarrow",
    "serve_replicas": "fastapi",
}


def shown(page: str) -> dict[str, str]:
    """The files of examples/ that a page shows, by the first line of each block."""
    text = (ROOT / "docs" / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    found = {}
    for block in blocks:
        said = re.match(r'"""(examples/[\w./]+)', block)
        assert said is not None, block
        found[said[1]] = block
    return found


FILES = sorted(path for page in PAGES for path in shown(page))


def marked(path: str) -> object:
    name = Path(path).stem
    marks = [pytest.mark.ray, pytest.mark.slow]
    needed = NEEDS.get(name)
    if needed is not None:
        missing = importlib.util.find_spec(needed) is None
        marks.append(pytest.mark.skipif(missing, reason=f"{needed} is not installed: pip install .[recipes]"))
    return pytest.param(path, marks=marks, id=name)


@pytest.mark.parametrize("page", PAGES)
def test_the_page_shows_the_files_as_they_are(page: str) -> None:
    for path, text in shown(page).items():
        assert (ROOT / path).read_text() == text


def test_no_recipe_is_left_out() -> None:
    assert {f"examples/recipes/{path.name}" for path in (ROOT / "examples" / "recipes").iterdir()} <= {*FILES}


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with pools_up(tmp_path_factory.mktemp("recipes")) as shell:
        yield shell


@pytest.mark.parametrize("path", [marked(path) for path in FILES])
def test_it_runs(path: str, shell: Shell) -> None:
    assert shell.run(f"python {path}")
    held = json.loads(shell.run("pools status --json"))["pools"]
    assert all(not any(pool["held"].values()) for pool in held.values()), "it gave back what it had"
