"""What commands answer, without a cluster: options that are looked at before anything is done, exit codes, words.

Faults it stands for: an option that is refused after the request was submitted, so that its GPUs are held by nobody;
two commands that take the same option otherwise; a script that can't tell a wrong name from an empty answer.
"""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from ray_pools.cli.app import pools
from ray_pools.cli.output import print_table
from ray_pools.config_difference import store_note
from ray_pools.simulate import kueue


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


# --- tables


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [40, 60, 80, 120, 300])
@pytest.mark.parametrize("team", ["vision", "a-team-whose-name-is-rather-long"])
def test_a_table_is_never_wider_than_the_terminal_and_names_never_vanish(
    monkeypatch: pytest.MonkeyPatch, width: int, team: str
) -> None:
    """Numbers are not cut, so it was the name that lost its room, down to nothing."""
    out = _Terminal()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    numbers = [f"#figure {n}" for n in range(10)]
    print_table(("team", *numbers), [(team, *range(100_000, 100_010)), ("all", *range(10))], "of all")
    lines = click.unstyle(out.getvalue()).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    parts = sum(line.startswith("team") for line in lines)
    assert sum(line.startswith(team[:16]) for line in lines) == parts
    assert sum(line.startswith("all ") for line in lines) == parts
    assert parts == 1 or width < 300
    for number in range(100_000, 100_010):
        assert sum(str(number) in line for line in lines) == 1


# --- questions, and commands of their own


@pytest.mark.parametrize(
    ("stops", "code", "said"),
    [
        (
            EOFError,
            1,
            "pools: error: nobody answered the question, so nothing has changed (--yes is the answer)",
        ),
        (KeyboardInterrupt, 130, "pools: error: interrupted"),
    ],
)
def test_a_question_that_nobody_answers_is_one_line(
    monkeypatch: pytest.MonkeyPatch, stops: type[BaseException], code: int, said: str
) -> None:
    """A script has no terminal: `Aborted!` says neither what was asked for, nor what became of it."""

    def asked(*_: object) -> str:
        raise stops

    def question(*_: object, **__: object) -> None:
        with monkeypatch.context() as inside:  # the runner has one of its own there
            inside.setattr("click.termui.visible_prompt_func", asked)
            click.confirm("Go on?", err=True)

    monkeypatch.setattr("ray_pools.cli.requests.connect", question)
    result = called("cancel", "x")
    assert result.exit_code == code
    assert result.stderr.splitlines()[-1] == said


def test_a_command_of_its_own_says_errors_alike() -> None:
    for arguments in ([], ["--cohorts", "0", "x"], ["--nonsense"]):
        result = CliRunner().invoke(kueue.main, arguments, prog_name="kueue")
        assert result.exit_code == 2
        assert error_of(result).endswith("(see `kueue --help`)")


def test_help_says_what_force_does() -> None:
    """Who reads it decides by it about work that runs (docs/operations.md)."""
    said = " ".join(called("down", "--help").stdout.split())
    assert "their placement groups are removed, and what runs in them is killed" in said


# --- how it ends


_ENDS = """
import atexit, os, signal, sys
from ray_pools.cli import connection, main

def at_exit():
    for _ in range(TIMES):
        os.kill(os.getpid(), signal.SIGTERM)
    print("all was put away", flush=True)

atexit.register(at_exit)
connection._end_on_sigterm()
sys.argv = ["pools", "--version"]
main()
"""


@pytest.mark.parametrize(("times", "code", "said"), [(1, 0, ["all was put away"]), (2, 143, [])])
def test_a_signal_while_it_ends_is_no_traceback(times: int, code: int, said: list[str]) -> None:
    """As `timeout` sends it: an exit handler that is cut short leaves slots behind, and says so in a traceback."""
    done = subprocess.run(
        [sys.executable, "-c", _ENDS.replace("TIMES", str(times))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.splitlines()[1:] == said


@pytest.mark.parametrize(("more", "namespace"), [((), "theirs"), (("-n", "mine"), "mine")])
def test_the_doctor_looks_at_the_namespace_of_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: tuple[str, ...], namespace: str
) -> None:
    """Else it says of pools that run that none do."""
    config = tmp_path / "pools.yaml"
    config.write_text("namespace: theirs\nstore: logs\npools: {a: {capacity: {gpu: 1}}}\n")
    looked: list[str] = []

    def look(found: object, address: str | None, there: str) -> bool:
        looked.append(there)
        return True

    monkeypatch.setattr("ray_pools.cli.maintenance._look_at_cluster", look)
    called("doctor", "--config", str(config), "--no-sync", *more)
    assert looked == [namespace]


def test_another_store_is_said_to_have_no_effect_yet() -> None:
    assert store_note({"store": "sqlite:///a"}, "sqlite:///a") == ""
    assert store_note({}, "sqlite:///a") == ""  # a coordinator of before does not say it
    assert store_note({"store": "sqlite:///a"}, "sqlite:///b") == (
        "store sqlite:///b is not used: the pools that run keep their logs at sqlite:///a until `pools down`"
        " and `pools up`"
    )
    assert "word" not in store_note({"store": "redis://:word@h:1/0"}, "redis://:word@h:2/0")


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("run", "-r", "team", "-g", "1", "--lease", "-1", "true"), "--lease = -1.0: "),
        (("run", "-r", "team", "--cpus", "1e-9", "true"), "--cpus = '1e-9': "),
        (("run", "-r", "team", "-g", "1", "--retries", "-1", "true"), "--retries = -1: "),
    ],
)
def test_errors_name_the_option_that_was_typed(command: tuple[str, ...], said: str) -> None:
    """Not the argument of a function behind it, which nobody typed."""
    result = called(*command)
    assert result.exit_code == 2
    assert error_of(result).startswith(said)
