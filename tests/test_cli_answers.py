"""What commands answer, without a cluster: options that are looked at before anything is done, exit codes, words.

Faults it stands for: an option that is refused after the request was submitted, so that its GPUs are held by nobody;
two commands that take the same option otherwise; a script that can't tell a wrong name from an empty answer.
"""

from __future__ import annotations

import pytest
from click.testing import CliRunner, Result

from ray_pools.cli.app import pools


def called(*arguments: str) -> Result:
    return CliRunner().invoke(pools, arguments, prog_name="pools")


def error_of(result: Result) -> str:
    """The one line on stderr."""
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("pools: error: ")
    return line.removeprefix("pools: error: ")


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes as far as the cluster fails the test."""

    def touched(*_: object, **__: object) -> None:
        raise AssertionError("the cluster was asked")

    for module in ("requests", "run", "pool_config"):
        monkeypatch.setattr(f"ray_pools.cli.{module}.connect", touched, raising=False)
    monkeypatch.setattr("ray_pools.cli.run.use_cluster", touched)
    monkeypatch.setattr("ray_pools.cli.pool_config.operator", touched)


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize("timeout", ["-5", "nan", "inf", "1e12"])
@pytest.mark.parametrize(
    "command",
    [
        ("submit", "-r", "team", "-g", "1", "--id", "ghost", "--wait", "--timeout"),
        ("run", "-r", "team", "-g", "1", "--timeout"),
        ("run", "-r", "team", "-g", "1", "--stop-timeout"),
        ("job", "submit", "-r", "team", "-g", "1", "--timeout"),
        ("pool", "delete", "a", "--yes", "--timeout"),
    ],
)
def test_a_time_that_can_not_be_one_is_refused_before_anything_is_asked_for(
    command: tuple[str, ...], timeout: str
) -> None:
    more = ("--", "true") if command[0] in ("run", "job") else ()
    result = called(*command, timeout, *more)
    assert result.exit_code == 2
    assert error_of(result).startswith(f"{command[-1]} = {float(timeout)}: seconds, a number from 0 to ")
