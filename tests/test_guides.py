"""The guides (docs/admins.md, authors.md, coming-from.md, troubleshooting.md): every command in them runs in its order
and prints what is shown, every snippet runs, every link leads somewhere.

The commands run at actors without Ray, where pools only count, and what they print is compared (`...` stands for
anything). The slow tests run them in a terminal against a live cluster, which takes its time and so may be at another
point.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from shell_pools import ShellPools, shell_pools
from test_readme import ROOT, Shell, pools_up

from ray_pools.cli.app import COMMANDS
from ray_pools.config import PoolModel
from ray_pools.core import quota

DOCS = ROOT / "docs"
PAGES = ("admins", "authors", "coming-from", "troubleshooting")
CONFIG = (ROOT / "examples" / "pools.yaml").read_text()


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text()


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[tuple[str, str]]:
    """Each command with what it prints."""
    found: list[tuple[str, str]] = []
    for block in blocks(page, "console"):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), ""))
            else:
                command, shown = found[-1]
                found[-1] = command, shown + line + "\n"
    return found


def matches(shown: str, printed: str) -> bool:
    pattern = re.escape(shown.strip()).replace(re.escape("..."), ".*")
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


# --- without a cluster


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_of_a_kind_that_is_checked_here(page: str) -> None:
    kinds = re.findall(r"^```(\w*)$", text_of(page), re.MULTILINE)
    assert {kind for kind in kinds if kind} <= {"console", "python"}


@pytest.mark.parametrize("page", [*PAGES, "prewarming", "configuration"])
def test_links_lead_to_files_and_their_headings(page: str) -> None:
    for link, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", text_of(page)):
        target = (DOCS / link).resolve() if link else DOCS / f"{page}.md"
        assert target.exists(), link
        if anchor:
            heads = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, f"{link}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_are_named_in_the_text_exist(page: str) -> None:
    for name in re.findall(r"`pools ([a-z][a-z-]*)", text_of(page)):
        assert name in COMMANDS, name


def test_troubleshooting_knows_every_cause() -> None:
    causes = {value for name, value in vars(quota).items() if name.isupper() and isinstance(value, str)}
    causes |= {"no_capacity_for_key", "exceeds_capacity", "exceeds_limit", "exceeds_reserved"}
    page = text_of("troubleshooting")
    assert {cause for cause in causes - {"nominated"} if f"`{cause}`" not in page} == set()


def nothing_placed(model: PoolModel, name: str) -> Any:
    return CORE(model, name)._replace(placement=None)


CORE = PoolModel.core


@contextmanager
def terminal(folder: Path) -> Iterator[ShellPools]:
    """The pools of the README, which only count, in a folder with the examples."""
    (folder / "examples").symlink_to(ROOT / "examples")
    before = Path.cwd()
    with mock.patch.object(PoolModel, "core", nothing_placed), shell_pools(folder, CONFIG) as live:
        os.chdir(folder)
        try:
            yield live
        finally:
            os.chdir(before)


def prepare(live: ShellPools, page: str) -> None:
    """Requests that the page speaks of as there."""
    if page != "troubleshooting":
        return
    for id, requester, gpus in (("victim", "research", 6), ("other", "language", 4), ("train", "vision", 4)):
        live.submit(id, requester, gpus)
    live.ask("", op="stopped", id="victim", token=b"")
    live.until(victim="preempted", other="allocated", train="allocated")
    live.submit("spot", "research", 6)
    live.submit("waits", "research", 6)
    live.submit("toolarge", "research", 64)


@pytest.mark.parametrize(
    "page", [pytest.param("admins", marks=pytest.mark.slow), "coming-from", "troubleshooting"]
)
def test_commands_print_what_is_shown(page: str, tmp_path: Path) -> None:
    with terminal(tmp_path) as live:
        prepare(live, page)
        for command, shown in commands(page):
            words = shlex.split(command)
            if command.startswith(("pools up", "pools down")):
                continue  # what starts and stops a cluster: the live test below
            if words[0] == "pools":
                result = live.run(*words[1:])
                assert result.exit_code == 0, f"$ {command}\n{result.output}"
                printed = result.stdout
                live.settle()
            else:
                printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
            assert matches(shown, printed), f"$ {command}\n{printed}\nis not\n{shown}"


# --- live


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with pools_up(tmp_path_factory.mktemp("guides")) as shell:
        yield shell


def snippets() -> list[Any]:
    found = []
    for page in PAGES:
        for number, text in enumerate(blocks(page, "python"), 1):
            if "/var/lib" not in text:  # a place on an admin's machine: below
                found.append(pytest.param(text, id=f"{page}-{number}"))
    return found


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("text", snippets())
def test_snippets_run(text: str, shell: Shell) -> None:
    (shell.folder / "work" / "snippet.py").write_text(text)
    shell.run("python snippet.py")


@pytest.mark.slow
def test_the_callback_of_the_admins_guide_runs(tmp_path: Path) -> None:
    (text,) = blocks("admins", "python")
    with terminal(tmp_path) as live:
        text = text.replace("sqlite:///var/lib/ray-pools", live.store).replace(
            "/var/lib/ray-pools", str(tmp_path)
        )
        subprocess.run([sys.executable, "-c", text], check=True)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("page", ["authors", "coming-from", "admins"])  # the last takes the pools down
def test_commands_run_in_a_terminal(page: str, shell: Shell) -> None:
    for command, _ in commands(page):
        shell.run(command)
