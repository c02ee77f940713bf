"""`pools run`, `pools job submit` and `current_slot` without a cluster: what they refuse, and what they pass on.

Faults it stands for: bad input that is found only in a job's logs, or after a slot was taken; an option that the job's
`pools run` does not get; a shell that reads what was a command's argument; a worker's own variables in a command's
environment; a token in a list of processes.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shlex
import stat
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import ray_pools as pools_api
from ray_pools.cli import job as job_module
from ray_pools.cli import run as run_module
from ray_pools.cli.app import pools
from ray_pools.cli.connection import keep_job_client_quiet
from ray_pools.client.attempt import thread_environment
from ray_pools.client.current import place_of_group
from ray_pools.client.job import _Shown, stop_timeout_s
from ray_pools.client.runner import command_environment, working_folder, write_secret
from ray_pools.errors import Unreachable
from ray_pools.settings import ResourceSettings

COMMANDS = (("run",), ("job", "submit"))


def called(*arguments: str) -> Result:
    return CliRunner().invoke(pools, arguments, prog_name="pools")


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes as far as a cluster gets no further."""

    def none(*_: object, **__: object) -> None:
        raise Unreachable("a cluster was asked for")

    for module in (run_module, job_module):
        monkeypatch.setattr(module, "use_cluster", none)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("-g", "1"), "requester"),
        (("-r", "team", "-g", "-1"), "gpus = -1"),
        (("-r", "team", "--memory", "much"), "memory = 'much'"),
        (("-r", "team", "--resource", "seat"), "--resource = 'seat'"),
        (("-r", "team", "--bundle", "gpus"), "--bundle = 'gpus'"),
        (("-r", "team", "--bundle", "gpus=1,gpus=1"), "gpus once"),
        (("-r", "team", "--retries", "-1"), "retries = -1"),
        (("-r", "team", "--timeout", "-1"), "--timeout = -1.0"),
        (("-r", "team", "--stop-timeout", "inf"), "--stop-timeout = inf"),
        (("-r", "team", "--env", "NO_SUCH_VARIABLE"), "--env = 'NO_SUCH_VARIABLE'"),
        (("-r", "team", "--env", "RAY_POOLS_POOL=x"), "another name"),
        (("-r", "team", "--working-dir", "/no/such"), "--working-dir = '/no/such'"),
        (("-r", "team", "--runtime-env", "/no/such"), "--runtime-env = '/no/such'"),
        (("-r", "team", "--runtime-env-json", "{"), "--runtime-env-json = '{'"),
        (("-r", "team", "--runtime-env-json", "[]"), "--runtime-env-json = []"),
        (("-r", "team", "--runtime-env-json", "{}", "--runtime-env", "x"), "exclude each other"),
        (("-r", "team", "--strategy", "TOGETHER"), "strategy"),
        (("-r", "team", "--env", "A B=1"), "--env = 'A B=1': NAME=VALUE"),
        (("-r", "team", "--env", "1A=1"), "does not begin with a digit"),
        (
            ("-r", "team", "--bundle", "gpus=1", "--bundle", "gpus=-1"),
            "--bundle gpus = '-1': a whole number, 0 or",
        ),
        (("-r", "team", "--bundle", "cpus=1e-9"), "bundles[0].cpus = '1e-9'"),
        (("-r", "team", "--cpus", "1e-9"), "cpus = '1e-9': a finite number of CPUs"),
        (("-r", "team", "--cpus", "1e-9"), "no exponent"),
        (("-r", "team", "--lease", "0.01"), "--lease = 0.01: 1 s or more, or 0 for no lease"),
    ],
)
def test_wrong_use_is_said_before_a_cluster_is_asked_for(
    command: tuple[str, ...], options: tuple[str, ...], named: str
) -> None:
    done = called(*command, *options, "--", "true")
    assert (done.exit_code, named in done.output) == (2, True), done.output


@pytest.mark.parametrize("command", COMMANDS)
def test_right_use_asks_for_a_cluster(command: tuple[str, ...]) -> None:
    done = called(*command, "-r", "team", "-g", "1", "python", "train.py", "--gpus", "7")
    assert (done.exit_code, done.output) == (3, "pools: error: a cluster was asked for\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_is_wrong_use(command: tuple[str, ...]) -> None:
    assert called(*command, "-r", "team", "-g", "1").exit_code == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_a_lease_of_zero_is_none(command: tuple[str, ...]) -> None:
    assert called(*command, "-r", "team", "-g", "1", "--lease", "0", "--", "true").exit_code == 3
    assert "0: never" in " ".join(called(*command, "--help").output.split())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("key", "guess"), [("foo", ""), ("working_dirs", "did you mean working_dir? ")])
def test_a_runtime_environment_with_a_key_that_ray_would_leave_out_is_refused(
    command: tuple[str, ...], key: str, guess: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: `pips` for `pip`, and a job that runs without its packages."""
    for module in (run_module, job_module):
        monkeypatch.setattr(module, "use_cluster", lambda *_: None)
    arguments = (*command, "--address", "127.0.0.1:1", "-r", "team", "-g", "1", "--runtime-env-json")
    given = json.dumps({"env_vars": {"A": "1"}, key: 1})
    done = called(*arguments, given, "--", "true")
    assert done.exit_code == 2, done.output
    assert done.output.startswith(f"pools: error: runtime_env.{key} = 1: unknown key; {guess}known: conda, ")
    assert done.output.count("\n") == 1
    monkeypatch.setenv("RAY_RUNTIME_ENV_PLUGINS", '[{"class": "a.Plugin"}]')
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert called(*arguments, given, "--", "true").exit_code == 3  # as far as a cluster


@pytest.mark.parametrize(
    ("option", "is_left"), [((), "http://wrong:1"), (("--address", "http://right:1"), None)]
)
def test_an_address_that_was_typed_counts_more_than_ray_s_variable(
    option: tuple[str, ...], is_left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the job runs in another cluster than the one that was named."""
    seen: list[str | None] = []

    def look(*_: object) -> None:
        seen.append(os.environ.get("RAY_API_SERVER_ADDRESS"))
        raise Unreachable("seen")

    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://wrong:1")
    monkeypatch.setattr(job_module, "use_cluster", look)
    assert called("job", "submit", *option, "-r", "team", "-g", "1", "--", "true").exit_code == 3
    assert seen == [is_left]


def test_ray_s_job_client_says_nothing_of_its_sockets() -> None:
    """Its module sets its own level when it is imported."""
    from ray.dashboard.modules.job import sdk

    logger = sdk.logger
    level = logger.level
    try:
        for debug, enabled in ((True, True), (False, False)):
            logger.setLevel("INFO")
            context = click.Context(pools)
            context.params["debug"] = debug
            with context:
                keep_job_client_quiet()
            assert logger.isEnabledFor(logging.INFO) == enabled
    finally:
        logger.setLevel(level)


@pytest.mark.parametrize("given", ["team", "=x", "ray_pools.pool=x"])
def test_metadata_have_a_key_that_is_not_ours(given: str) -> None:
    done = called("job", "submit", "-r", "team", "--metadata", given, "--", "true")
    assert done.exit_code == 2
    assert "--metadata" in done.output


@pytest.mark.parametrize("given", ["b/c", "a?b", "#", "50%", "a\\b"])
def test_an_id_of_a_job_that_ray_could_not_find_again_is_refused(given: str) -> None:
    """Fault: Ray takes the job, and no command of it ever reaches it."""
    done = called("job", "submit", "-r", "team", "--submission-id", given, "--", "true")
    assert done.exit_code == 2
    assert "--submission-id" in done.output


def test_a_job_runs_the_same_request_and_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its entrypoint, read by `pools run` again, is what was asked for; a shell must not read the command."""
    options = [
        *("-r", "team", "--retries", "3", "--lease", "30", "--id", "a b"),
        *("--bundle", "gpus=2,cpus=0.5,seat=1", "--bundle", "gpus=1,memory=2GiB", "--strategy", "SPREAD"),
        *("--non-preemptible", "--timeout", "60", "--stop-timeout", "1.5"),
    ]
    command = ("sh", "-c", "echo $HOME; 'x y' \"*\"", "--retries", "9")
    found: dict[str, Any] = {}

    def submission(given: dict[str, Any]) -> None:
        found.update(given)
        raise Unreachable("seen")

    monkeypatch.setattr(job_module, "_entrypoint", lambda given, *_: found.update(job=given) or "")
    called("job", "submit", *options, "--", *command)
    monkeypatch.undo()
    wanted = found.pop("job")
    entrypoint = job_module._entrypoint(wanted, "ns", command, {})
    assert entrypoint.startswith(f"P={sys.executable}; ")
    words = shlex.split(entrypoint.partition("exec ")[2])
    assert words[:4] == ["$P", "-m", "ray_pools.cli", "run"]
    monkeypatch.setattr(run_module, "submission", submission)
    assert called(*words[3:]).exit_code == 3
    assert {name: found[name] for name in found} == {name: wanted[name] for name in found}
    assert tuple(words[words.index("--") + 1 :]) == command
    with_own = job_module._entrypoint(wanted, "ns", command, {"pip": ["x"]})
    assert with_own.startswith("exec python -m ray_pools.cli run ")


def test_a_command_has_nothing_of_the_worker() -> None:
    worker = {
        "PATH": "/usr/bin",
        "RAY_JOB_ID": "01",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HOME": "/h",
    }
    found = command_environment(worker)
    own = os.path.dirname(sys.executable)
    assert found == {"PATH": f"{own}:/usr/bin", "HOME": "/h", "PYTHONUNBUFFERED": "1"}
    assert command_environment(found)["PATH"] == found["PATH"]


def test_a_command_has_as_many_threads_as_whole_cpus_were_asked_for() -> None:
    def threads(cpus: str) -> dict[str, str]:
        return thread_environment(ResourceSettings(gpu_count=1, cpu_count=cpus).amounts())

    assert threads("2.5") == {"OMP_NUM_THREADS": "2"}
    assert threads("0.5") == threads("0") == {}


def test_a_folder_that_was_made_anew_is_entered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: Ray replaces a job's working directory under a worker, for another node of the same machine."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        working_folder()
    folder.mkdir()
    assert working_folder() == str(folder)


def test_a_token_is_for_its_user_only() -> None:
    path = Path(write_secret(b"secret"))
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert bytes.fromhex(path.read_text()) == b"secret"
    finally:
        path.unlink()


def test_a_placement_group_names_its_attempt() -> None:
    found = place_of_group("ray-pools/my%20ns/a%2Fb/id%2F1/3")
    assert found is not None
    assert (found.namespace, found.request_id, found.k) == ("my ns", "id/1", 3)
    for other in ("", "mine", "ray-pools/ns/pool/id", "ray-pools/ns/pool/id/x", "other/ns/pool/id/1"):
        assert place_of_group(other) is None


def test_outside_of_a_slot() -> None:
    assert pools_api.current_slot(required=False) is None
    with pytest.raises(pools_api.NoSlot, match="runs in no slot"):
        pools_api.current_slot()


def test_logs_that_start_anew_are_shown_once() -> None:
    out = io.StringIO()
    shown = _Shown(out)
    end = shown.add(shown.add(0, "one\n"), "two\n")
    assert end == 8
    assert shown.add(shown.add(0, "one\ntw"), "o\nthree\n") == 14
    assert out.getvalue() == "one\ntwo\nthree\n"


def test_a_jobs_command_is_gone_before_ray_kills_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stop_timeout_s(10.0) == 10.0
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"metadata": {"job_submission_id": "a"}}')
    assert stop_timeout_s(10.0) == 2.0
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "1")
    assert stop_timeout_s(10.0) == 0.5
