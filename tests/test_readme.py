"""The README keeps its word: every configuration in it loads, every example and every command in it runs, in its order,
against one local cluster, which the README's own `pools up` starts and its own `pools down` stops."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from ray_pools.config import load_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TIMEOUT_S = 240


class Block(NamedTuple):
    """A fenced block: its language, the line where it starts, and its text."""

    kind: str
    line: int
    text: str


def blocks() -> list[Block]:
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [Block(each[1], README[: each.start()].count("\n") + 1, each[2]) for each in found]


BLOCKS = blocks()
RUN = [block for block in BLOCKS if block.kind in ("python", "console")]


def is_file_of(block: Block) -> Path | None:
    """The file of examples/ that a block shows, as its first line says."""
    said = re.match(r'(?:# |""")(examples/[\w.]+)', block.text)
    return ROOT / said[1] if said else None


def commands_of(block: Block) -> list[str]:
    return [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]


# --- without a cluster


def test_every_block_is_of_a_kind_that_is_checked_here() -> None:
    assert {block.kind for block in BLOCKS} == {"sh", "console", "python", "yaml"}
    assert README.count("\n```") == 2 * len(BLOCKS)
    assert README.count("\n") <= 280


def test_the_configuration_loads_and_is_the_example(tmp_path: Path) -> None:
    (config,) = [b for b in BLOCKS if b.kind == "yaml" and is_file_of(b) is None]
    (tmp_path / "pools.yaml").write_text(config.text)
    assert list(load_config(tmp_path / "pools.yaml").pools) == ["reserved", "spot"]
    assert config.text == (ROOT / "examples" / "pools.yaml").read_text()


def test_blocks_that_show_a_file_show_it_as_it_is() -> None:
    shown = {path: block.text for block in BLOCKS if (path := is_file_of(block)) is not None}
    assert {path.name for path in shown} == {"train.py", "checkpoint.py", "policy_test.yaml"}
    for path, text in shown.items():
        assert path.read_text() == text


def test_make_knows_the_targets() -> None:
    (block,) = [b for b in BLOCKS if b.kind == "sh"]
    for line in block.text.splitlines():
        target = line.split("#")[0].split()[1]
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line


def test_links_lead_to_files() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link


# --- with one cluster for all


class Shell:
    """A user's terminal in a folder with the examples, in an environment of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "work").mkdir()
        shutil.copytree(ROOT / "examples", folder / "work" / "examples")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        bin_folder = str(Path(sys.executable).parent)
        self.env = {
            **kept,
            "PATH": os.pathsep.join([bin_folder, os.environ["PATH"]]),
            "XDG_STATE_HOME": str(folder / "state"),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder / "work",
            env=self.env,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@contextmanager
def pools_up(folder: Path) -> Iterator[Shell]:
    """The README's pools, as its first command brings them up, and the line exported that it prints."""
    shell = Shell(folder)
    try:
        shell.env.update(json.loads(shell.run("pools up examples/pools.yaml --local --json"))["env"])
        yield shell
    finally:
        # the README's last block did it already, unless a test before it failed
        subprocess.run(
            ["bash", "-c", "pools down --force --local"],
            cwd=shell.folder,
            env=shell.env,
            capture_output=True,
            check=False,
        )


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with pools_up(tmp_path_factory.mktemp("readme")) as shell:
        yield shell


@pytest.mark.ray
@pytest.mark.parametrize("block", RUN, ids=[f"line {block.line}" for block in RUN])
def test_it_runs(block: Block, shell: Shell) -> None:
    if block.kind == "console":
        commands = commands_of(block)
        assert commands, "a console block without a command"
        for command in commands:
            shell.run(command)
    elif is_file_of(block) is None:  # a file is run by the command that names it
        (shell.folder / "work" / "driver.py").write_text(block.text)
        shell.run("python driver.py")
