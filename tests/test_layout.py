"""The layout rules: the project keeps them, and the check that says so catches each way of breaking them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOP = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def layout() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_layout", TOP / ".ci" / "check_layout.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_project_keeps_its_rules(layout: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert layout.main(TOP) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("pools/core/quota.py", "import ray"),
        ("pools/core/quota.py", "import time"),
        ("pools/core/quota.py", "from random import Random"),
        ("pools/core/quota.py", "import os.path"),
        ("pools/core/quota.py", "def f():\n    import threading"),
        ("pools/core/quota.py", "from io import StringIO"),
        ("pools/core/quota.py", "import uuid, math"),
        ("pools/core/quota.py", "import datetime as math"),
        ("pools/core/quota.py", "from ..store import memory"),
        ("pools/core/quota.py", "from ray_pools.config import Config"),
        ("pools/core/quota.py", "from .. import store"),
        ("pools/core/quota.py", "text = open('x').read()"),
        ("pools/core/quota.py", "__import__('time')"),
        ("pools/core/quota.py", "order = sorted([], key=hash(1))"),
        ("pools/config.py", "import ray"),
        ("pools/config.py", "def f():\n    from ray.util import placement_group"),
        ("pools/cli/up.py", "def f():\n    import ray"),
        ("pools/clients.py", "import ray"),
        ("pools/client/slot.py", "from ray_pools.actors import shell"),
        ("pools/client/slot.py", "from ..actors.shell import PoolActor"),
        ("pools/client/slot.py", "def f():\n    from .. import actors"),
        ("pools/cli/up.py", "from ..actors import shell"),
        ("pools/cli/up.py", "def f():\n    import actors"),
        ("actors/shell.py", "from pools import core"),
        ("actors/utils.py", "X = 1"),
        ("pools/utils/__init__.py", ""),
        ("tests/test_x.py", "X = 1\n" * 501),
        ("pools/config.py", "def f():\n" + "    x = 1\n" * 70),
        ("actors/shell.py", "class A:\n    async def f(self):\n" + "        x = 1\n" * 70),
        ("pools/config.py", "def f(:"),
    ],
)
def test_an_offence_is_found(layout: ModuleType, name: str, code: str) -> None:
    found = layout.check_file(name, f'"""A module."""\n{code}\n' if code else "")
    assert len(found) == 1, found
    assert found[0].startswith(f"{name}:")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        (
            "pools/core/quota.py",
            "import math\nfrom collections.abc import Mapping\nfrom ..limits import AMOUNT_MAX",
        ),
        ("pools/core/quota.py", "from .records import Granted\nfrom ray_pools.core import records"),
        ("pools/client/slot.py", "import ray\nfrom ray.util import placement_group"),
        ("pools/client.py", "import ray"),
        ("pools/config.py", "import os, time, rayon"),
        (
            "pools/cli/up.py",
            "def f():\n    from ray_pools.actors import shell\n    from ..actors import shell",
        ),
        ("actors/shell.py", "import ray, time\nfrom ray_pools.core import quota"),
        ("pools/config.py", "def f():\n" + "    x = 1\n" * 69),
        ("pools/core/__init__.py", ""),
    ],
)
def test_what_is_allowed_passes(layout: ModuleType, name: str, code: str) -> None:
    assert layout.check_file(name, f'"""A module."""\n{code}\n' if code else "") == []


def test_a_module_says_what_lives_in_it(layout: ModuleType) -> None:
    assert len(layout.check_file("pools/config.py", "X = 1\n")) == 1


def test_a_package_that_is_not_listed_is_found(layout: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "pools" / "core").mkdir(parents=True)
    (tmp_path / "actors").mkdir()
    for folder in ("pools", "pools/core", "actors"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text(
        '[tool.setuptools]\npackages = ["ray_pools", "ray_pools.actors", "ray_pools.gone"]\npackage-data = {}\n'
    )
    found = layout.check_packages(tmp_path)
    assert ["ray_pools.core" in found[0], "ray_pools.gone" in found[1], len(found)] == [True, True, 2]


def test_a_file_that_an_installed_copy_would_lack_is_found(layout: ModuleType, tmp_path: Path) -> None:
    for name in ("pools/page/static/a.js", "pools/page/static/a.py", "pools/page/b.css", "actors/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = layout.check_data(tmp_path, {"ray_pools.page": ["static/*"], "ray_pools.actors": ["c.*"]})
    assert found == ["pyproject.toml:1: pools/page/b.css is in no pattern of package-data"]
