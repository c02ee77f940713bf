"""What all tests share: an environment that no user's own settings reach, and a reader for our errors."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from fake_pools import FakePools
from hypothesis import HealthCheck, settings

import ray_pools as pools
from ray_pools.errors import BadInput

# No deadline: a slow machine is no failure. One's own findings are kept by hypothesis' example database.
settings.register_profile("thorough", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("thorough"), max_examples=40)

# Set before anything imports ray, and inherited by every process that a test starts.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else it depends on what ran on this machine before
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
for _name in ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_POOLS_STORE"):
    os.environ.pop(_name, None)


@pytest.fixture(autouse=True)
def _own_state_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default store is under the user's state directory: never the real one."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state"))


@pytest.fixture(autouse=True)
def _own_cluster() -> Iterator[None]:
    """A command that ran inside the test process may have chosen a cluster: the next test must not join it."""
    before = {name: os.environ.get(name) for name in ("RAY_ADDRESS", "RAY_AUTH_MODE")}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# A shell's background jobs ignore both, and so would every process that a test starts and interrupts.
for _signal in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, signal.default_int_handler if _signal is signal.SIGINT else signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    """The larger tiers try more examples of every property."""
    settings.load_profile("quick" if config.option.markexpr == "not slow" else "thorough")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of the larger tiers have an hour instead of the few minutes that every test has."""
    for item in items:
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(3600))


BadInputReader = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def refuses() -> BadInputReader:
    """`with refuses("gpu_count", "integer", where=...):` the block must raise BadInput for that field, with these
    words in what it expected, and with a message that can be shown in a terminal.
    """

    @contextmanager
    def reader(field: str, *words: str, where: str = "") -> Iterator[None]:
        with pytest.raises(BadInput) as caught:
            yield
        problem = caught.value
        assert problem.field == field
        assert problem.where.endswith(where), f"{problem.where} should end in {where}"
        for word in words:
            assert word in problem.expected, f"{word!r} is not in: {problem.expected}"
        assert str(problem).isprintable()
        assert len(str(problem)) < 1000
        assert problem.exit_code == 2

    return reader


# --- a client without Ray


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakePools:
    """Leases may be short here: nobody is flooded with renewals, and tests are quick."""
    monkeypatch.setattr("ray_pools.limits.LEASE_MIN_S", 0)
    return FakePools()


@pytest.fixture
def client(fake: FakePools) -> Iterator[pools.Client]:
    with fake.client(give_up_s=20.0) as client:
        yield client


@pytest.fixture
def aside() -> Iterator[Callable[..., Any]]:
    """Runs something in another thread; its future's result is the test's to ask for."""
    with ThreadPoolExecutor(4) as executor:
        yield executor.submit


# --- a browser


@pytest.fixture(scope="session")
def chromium() -> str:
    """A Chromium's program; installed where it may be, else whoever asks is skipped with the reason."""
    from browser import find_chromium

    program, why = find_chromium()
    if not program:
        pytest.skip(why)
    return program
