"""The command line without a cluster: what it prints, what it ends with, and that bad input reaches no cluster.

Faults it stands for: a traceback before a user, an error that does not say where, a wrong exit code for a script, a
command that waits for a cluster that is not there, output of others among the JSON, one broken command that takes the
others with it, `pools --help` that starts Ray.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from ray_pools.cli import app, connection
from ray_pools.cli.app import pools
from ray_pools.cli.requests import state_text
from ray_pools.cli.status import pool_rows, prewarm_text
from ray_pools.cli.tokens import token_of
from ray_pools.errors import PoolsError, Refused

SCENARIO = """
- name: {name}
  pools: {{shared: {{capacity: {{gpu: 2}}}}}}
  policies: [{{pool: shared, requester: team}}]
  steps:
    - submit: {{id: a, requester: team, resources: {{gpu: 2}}}}
      expect: {{a: {wanted}}}
"""

CONFIG = """
namespace: here
pools:
  a100: {capacity: {gpu: 8}}
policies:
  - {pool: a100, requester: vision, reserved: {gpu: 4}}
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(pools, arguments, prog_name="pools")


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes as far as a cluster fails the test."""

    def touched(*_: object, **__: object) -> None:
        raise AssertionError("a cluster was touched")

    for name in ("find_local", "use_cluster", "connect_ray"):
        monkeypatch.setattr(f"ray_pools.cli.lifecycle.{name}", touched)


@pytest.fixture
def closed_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return f"127.0.0.1:{port}"


def error_line(result: Result) -> str:
    """The one line that says what was wrong."""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("pools: error: ")
    assert result.stdout == ""
    return lines[0]


# --- the group


def test_help_loads_no_command_and_no_ray() -> None:
    code = (
        "import sys; from ray_pools.cli.app import pools; pools.main(['--help'], standalone_mode=False);"
        "print([m for m in ('ray', 'rich', 'ray_pools.client', 'ray_pools.cli.status') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for command in app.COMMANDS:
        assert f"  {command} " in done.stdout


def test_started_as_a_module_it_loads_nothing_from_the_working_directory(tmp_path: Path) -> None:
    for name in ("click", "pydantic", "yaml", "actors", "pools"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a module of the user was imported')")
    file = tmp_path / "s.yaml"
    file.write_text(SCENARIO.format(name="one", wanted="allocated"))
    command = [sys.executable, "-m", "ray_pools.cli", "scenario", str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_version_and_an_unknown_command() -> None:
    assert run("--version").stdout.startswith("pools, version ")
    assert run("nonsense").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nonsense",), "no such option '--nonsense' (see `pools --help`)"),
        (("nonsense",), "no such command 'nonsense' (see `pools --help`)"),
        (("job", "nonsense"), "no such command 'nonsense' (see `pools job --help`)"),
        (("run", "-r", "team"), "missing argument 'COMMAND...' (see `pools run --help`)"),
        (("run", "-r", "team", "-g", "x", "true"), "'x' is not a valid integer (see `pools run --help`)"),
        (("log", "--verify", "--at", "1"), "--verify and --at don't go together (see `pools log --help`)"),
        (("submit",), "missing option '--requester' / '-r' (see `pools submit --help`)"),
    ],
)
def test_wrong_use_is_one_line_with_a_hint(arguments: tuple[str, ...], said: str) -> None:
    """Fault: four lines of usage, of which one matters; a script that greps for `pools: error:`."""
    result = run(*arguments)
    assert result.exit_code == 2
    # click's own words differ between its versions in small things
    assert error_line(result).lower().replace("option: ", "option ").endswith(said.lower())


@pytest.mark.parametrize("group", [(), ("job",), ("key",), ("pool",)])
def test_a_group_alone_shows_its_help(group: tuple[str, ...]) -> None:
    assert "Commands:" in run(*group).output


def test_a_command_that_can_not_be_loaded_does_not_break_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(app.COMMANDS, "demo", ("ray_pools.cli.no_such_module:demo", "never"))
    assert run("--help").exit_code == 0
    broken = run("demo")
    assert broken.exit_code == 1
    assert "no_such_module" in error_line(broken)


@pytest.mark.parametrize(
    ("problem", "exit_code", "words"),
    [
        (Refused("held", "grants are held"), 1, "grants are held"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ValueError("first\nsecond"), 1, "unexpected: ValueError: first (please report"),
        (ZeroDivisionError(), 1, "unexpected: ZeroDivisionError"),
    ],
)
def test_whatever_a_command_raises_is_one_line(
    monkeypatch: pytest.MonkeyPatch, problem: BaseException, exit_code: int, words: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr("ray_pools.scenario.run_files", broken)
    result = run("scenario", "x.yaml")
    assert result.exit_code == exit_code
    assert words in error_line(result)
    debug = run("--debug", "scenario", "x.yaml")
    if isinstance(problem, KeyboardInterrupt):
        assert debug.exit_code == 130
    else:
        assert debug.exception is problem


# --- scenario


def test_scenarios_that_hold(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(SCENARIO.format(name="one", wanted="allocated"))
    result = run("scenario", str(file), str(file))
    assert (result.exit_code, result.stdout) == (0, "2 scenarios, 2 steps: all hold\n")


def test_a_scenario_that_does_not_hold_says_what_was_wanted_and_what_came(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(
        SCENARIO.format(name="good", wanted="allocated") + SCENARIO.format(name="bad", wanted="queued")
    )
    result = run("scenario", str(file))
    assert result.exit_code == 1
    for words in (
        "bad, step 1",
        "expect.a",
        "wanted queued",
        "got    allocated@shared",
        "2 scenarios, 2 steps: 1 failed, 1 expectation did not hold",
    ):
        assert words in result.stdout
    assert "good" not in result.stdout
    assert run("scenario", str(file), "--select", "go*").exit_code == 0
    assert run("scenario", str(file), "--select", "none").exit_code == 2


def test_a_trace_is_all_that_is_on_stdout(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(SCENARIO.format(name="one", wanted="queued"))
    result = run("scenario", "--trace", str(file))
    assert result.exit_code == 1
    assert [json.loads(line)["usage"] for line in result.stdout.splitlines()] == [{"shared": {"gpu": 2}}]
    assert "wanted queued" in result.stderr


# --- a configuration that can't be right


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("gpu: 8", "gpu: 2"), ("policies[0].reserved.gpu = 4", "capacity 2", ":6")),
        (("capacity", "capcity"), ("pools.a100.capcity", "capacity", ":4")),
        (("gpu: 8", "gpu: many"), ("pools.a100.capacity.gpu = 'many'", "an integer", ":4")),
        (("  a100:", '  "":'), ("''", "a name of 1 to 200", ":4")),
        (("  a100:", f"  {'x' * 10_240}:"), ("(10240 characters)", "a name of 1 to 200", ":4")),
        (("  a100:", '  "a\\e[31m":'), ("\\x1b", "no control characters", ":4")),
        (("pool: a100", "pool: b200"), ("policies[0].pool = 'b200'", ":6")),
        (("namespace: here", "namespace: [here"), (":",)),
        (("namespace: here", 'namespace: ""'), ("namespace = ''", "a name of 1 to 200", ":2")),
    ],
)
@pytest.mark.parametrize("local", [(), ("--local",)])
def test_a_wrong_configuration_touches_no_cluster(
    tmp_path: Path, change: tuple[str, str], words: tuple[str, ...], local: tuple[str, ...]
) -> None:
    file = tmp_path / "pools.yaml"
    assert change[0] in CONFIG
    file.write_text(CONFIG.replace(*change))
    result = run("up", str(file), *local)
    assert result.exit_code == 2
    line = error_line(result)
    assert line.isprintable()
    assert len(line) < 1000
    assert "pools.yaml" in line
    for word in words:
        assert word in line


@pytest.mark.usefixtures("no_cluster")
def test_a_missing_configuration_and_options_that_exclude_each_other(tmp_path: Path) -> None:
    missing = run("up", str(tmp_path / "none.yaml"))
    assert missing.exit_code == 2
    assert "none.yaml" in error_line(missing)
    file = tmp_path / "pools.yaml"
    file.write_text(CONFIG)
    assert run("up", str(file), "--local", "--address", "127.0.0.1:6379").exit_code == 2
    assert run("up", str(file), "--cluster", "cluster.yaml").exit_code == 2


# --- no cluster


@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("down",),
        ("requests",),
        ("submit", "-r", "team", "-g", "1"),
        ("release", "a"),
        ("cancel", "a"),
    ],
)
def test_a_missing_cluster_is_said_at_once(closed_port: str, arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "--address", closed_port)
    assert result.exit_code == 3
    assert f"no Ray cluster answers at '{closed_port}'" in error_line(result)


def test_up_without_a_cluster(closed_port: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text(CONFIG)
    monkeypatch.setenv("RAY_ADDRESS", closed_port)
    before = Path.cwd()
    result = run("up", str(file))
    assert result.exit_code == 3
    assert closed_port in error_line(result)
    assert Path.cwd() == before


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("licence", "licence"),
        ("licence=-1", "licence=-1"),
        ("licence=", "licence="),
    ],
)
def test_a_resource_that_can_not_be_read(closed_port: str, option: str, words: str) -> None:
    result = run("submit", "-r", "team", "--resource", option, "--address", closed_port)
    assert result.exit_code == 2
    assert words in error_line(result)


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "nonsense", "local"])
def test_an_address_that_can_not_be_right(address: str) -> None:
    result = run("status", "--address", address)
    assert result.exit_code == 2
    assert "address" in error_line(result).lower()


# --- output


def test_ray_s_own_threads_do_not_reach_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    stream = connection._WithoutRay(sys.stdout)
    for name in ("ray_listen_error_messages", "replay"):
        writer: Callable[[str], int] = stream.write
        thread = threading.Thread(target=writer, args=(f"{name} says so\n",), name=name)
        thread.start()
        thread.join()
    assert capsys.readouterr().out == "replay says so\n"


def test_a_pool_s_rows() -> None:
    said = {
        "capacity": {"cpu": 10, "gpu": 8},
        "held": {"cpu": 0, "gpu": 7},
        "nominated": ["x"],
        "waiting": 3,
        "requesters": {
            "a": {"booked": {"gpu": 6, "cpu": 0}, "borrowed": {"gpu": 2, "cpu": 0}},
            "b": {"booked": {"gpu": 1, "cpu": 0}, "borrowed": {"gpu": 1, "cpu": 0}},
        },
    }
    assert pool_rows("a100", said) == [
        ("a100", "cpu", 10, 0, 0, 0, 1, 3),
        ("", "gpu", 8, 7, 4, 3, "", ""),
    ]


def test_words_for_states_and_prewarming() -> None:
    view = {"state": "allocated", "pool": "a100", "pools": ["a100"], "ready": False, "causes": {}}
    assert state_text(view) == "allocated in a100, placing"
    assert (
        state_text({**view, "state": "rejected", "causes": {"b": "x", "a": "y"}}) == "rejected (a: y, b: x)"
    )
    assert state_text({**view, "state": "queued", "pool": ""}) == "queued in a100"
    assert state_text({**view, "state": "released"}) == "released"
    assert prewarm_text(None) == "prewarming: off"
    assert "failing: no GCS" in prewarm_text({"error": "no GCS"})
    wanted = {"error": "", "wanted": {"a100": {"bundles": 1, "gpus": 2.0}}, "autoscaler": "v2"}
    assert prewarm_text(wanted) == "prewarming: a100 2 GPUs (autoscaler: v2)"


# --- which local cluster


class _Cluster:
    def __init__(self, directory: Path, namespaces: list[str] | None) -> None:
        directory.mkdir()
        self.directory, self.name = directory, directory.name
        if namespaces is not None:
            connection.note_namespaces(self, namespaces)  # type: ignore[arg-type]


def test_the_local_cluster_of_a_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = _Cluster(tmp_path / "demo", None)
    clusters = [demo]
    monkeypatch.setattr("ray_pools.local_cluster.find_local_clusters", lambda: clusters)
    assert connection.find_local("pools") is None  # a demo's is not ours to use or stop
    one = _Cluster(tmp_path / "one", ["pools", "lab"])
    clusters.append(one)
    assert connection.find_local("lab") is connection.find_local("other") is one
    two = _Cluster(tmp_path / "two", ["lab2"])
    clusters.append(two)
    assert connection.find_local("lab2") is two
    with pytest.raises(PoolsError) as caught:
        connection.find_local("other")
    assert "one, two" in str(caught.value)
    assert caught.value.exit_code == 2


# --- which pool, which request


class _Client:
    """As `connect` gives it: no requests, pools a and b."""

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self) -> dict[str, object]:
        return {"coordinator": self.coordinator({"op": "status"})}

    def coordinator(self, op: dict[str, object]) -> dict[str, object]:
        assert op == {"op": "status"}, op
        return {"pools": ["a", "b"], "trouble": {}}

    def list(self, **_: object) -> list[object]:
        return []


@pytest.mark.parametrize("arguments", [("requests", "--pool", "zz"), ("pool", "declare-lost", "zz", "--yes")])
def test_a_pool_that_there_is_not_is_wrong_use(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """As `pools log zz` has it (docs/commands.md); one that is there and has no requests is an empty answer."""
    for module in ("requests", "pool"):
        monkeypatch.setattr(f"ray_pools.cli.{module}.connect", lambda *_, **__: _Client())
    result = run(*arguments)
    assert result.exit_code == 2
    assert "= 'zz': one of a, b" in error_line(result)
    assert run("requests", "--pool", "a", "--json").stdout == "[]\n"


class _Interrupted(_Client):
    """Somebody presses Ctrl-C while it waits."""

    id, state, view = "r1", "queued", MappingProxyType({"id": "r1", "state": "queued"})

    def __init__(self, interrupt: BaseException) -> None:
        self.interrupt = interrupt

    def submit(self, *_: object, **__: object) -> _Interrupted:
        return self

    def wait(self, *_: object, **__: object) -> None:
        raise self.interrupt


@pytest.mark.parametrize(
    ("interrupt", "lease", "code", "said"),
    [
        (KeyboardInterrupt(), "0", 130, "interrupted: request r1 waits on: `pools cancel r1` ends it"),
        (
            connection.Terminated(),
            "30",
            143,
            "terminated: request r1 waits on for 30 s: `pools cancel r1` ends it",
        ),
    ],
)
def test_who_stops_waiting_hears_that_the_request_waits_on(
    monkeypatch: pytest.MonkeyPatch, interrupt: BaseException, lease: str, code: int, said: str
) -> None:
    monkeypatch.setattr("ray_pools.cli.requests.connect", lambda *_, **__: _Interrupted(interrupt))
    result = run("submit", "-r", "team", "-g", "1", "--lease", lease, "--wait")
    assert result.exit_code == code
    assert error_line(result) == f"pools: error: {said}"


# --- tokens


def test_a_user_s_token_is_the_same_again_and_nobody_else_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POOLS_STATE_DIR", str(tmp_path / "one"))
    first = token_of("pools", "a")
    assert first is not None
    assert token_of("pools", "a") == first
    assert len({first, token_of("pools", "b"), token_of("lab", "a")}) == 3
    (key,) = (tmp_path / "one").glob("token.key*")
    assert key.stat().st_mode & 0o077 == 0
    key.write_bytes(b"torn")
    assert token_of("pools", "a") not in (None, first)
    monkeypatch.setenv("POOLS_STATE_DIR", str(tmp_path / "two"))
    assert token_of("pools", "a") != first


@pytest.mark.parametrize(
    ("here", "outcome"),
    [
        ({"10.0.0.1:1"}, (3, "but those of a demo, replay or scenario")),
        ({"10.0.0.1:1", "10.0.0.1:2", "10.0.0.1:3"}, (2, "one of the clusters that run here: 10.0.0.1:2")),
    ],
)
def test_a_command_never_joins_the_cluster_of_a_demo_or_replay(
    here: set[str], outcome: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself would take any cluster that it finds on the machine."""
    private = SimpleNamespace(address="10.0.0.1:1", name="10.0.0.1:1", directory=Path("nowhere"))
    monkeypatch.setattr("ray_pools.cli.connection._local_clusters", lambda: [private])
    monkeypatch.setattr("ray_pools.client.clusters_here", lambda: here)
    result = CliRunner().invoke(pools, ["status"])
    assert (result.exit_code, outcome[1] in result.output) == (outcome[0], True), result.output
