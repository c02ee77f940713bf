"""On a live cluster with Ray's token authentication: who is let in, who may do what, which versions talk.

Faults it stands for: a command or driver that works only without authentication, or that hangs where it is refused; a
key, token or operator that is checked in the core and not on the way there; a driver of another version or of other
code that gets a traceback, or a wrong answer (docs/protocol.md, "Who may do what" and "Wire").
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from access_drivers import (
    BRING_UP,
    FULL,
    HOLDERS,
    OTHER_ACTORS,
    OTHER_CODE,
    PREAMBLE,
    RAY_CLIENT,
    SKEWED,
    STATES,
)
from other_code import RELEASES, VERSION, other_release
from test_cli_live import Place

from ray_pools import keys, local_processes
from ray_pools.core.access import key_hash

pytestmark = [pytest.mark.ray, pytest.mark.slow]

RULES = Path(__file__).parent / "scenarios" / "rules.yaml"
KEY, OPERATOR_KEY = keys.new_key(), keys.new_key()

CONFIG = f"""
namespace: access
store: store
pools:
  counted: {{capacity: {{seat: 2}}, placement: none}}
  left: {{capacity: {{gpu: 1}}, placement: none, grace_s: 600}}
  right: {{capacity: {{gpu: 1}}, placement: none}}
  placed: {{capacity: {{cpu: 1}}}}
  nowhere: {{capacity: {{gpu: 1}}, placement: {{labels: {{no.such/label: here}}, provision_timeout_s: 3600}}}}
policies:
  - {{pool: left, requester: low}}
  - {{pool: left, requester: high, priority: 9}}
  - {{pool: left, requester: both}}
  - {{pool: right, requester: both}}
  - {{pool: placed, requester: placed}}
  - {{pool: nowhere, requester: nowhere}}
  - {{pool: counted, requester: team}}
  - {{pool: counted, requester: prod}}
requesters:
  prod: {{key_sha256: {key_hash(KEY)}}}
operators: {{key_sha256: {key_hash(OPERATOR_KEY)}}}
prewarm: {{linger_s: 0}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Pools in a cluster with authentication, brought up by the command line with a home of its own."""
    base = tmp_path_factory.mktemp("access")
    (base / "pools.yaml").write_text(CONFIG)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"HOME": str(base), "POOLS_STATE_DIR": str(base / "state"), "RAY_POOLS_NAMESPACE": "access"}
    made = Place(base, {**env, "RAY_AUTH_MODE": "token"})
    up = made.json("up", "pools.yaml", "--local")
    (note,) = (base / "state" / "local").glob("*.json")
    cluster = json.loads((Path(json.loads(note.read_text())["directory"]) / "cluster.json").read_text())
    made.env |= up["env"]
    assert up["env"]["RAY_AUTH_MODE"] == "token"
    yield made
    made.pools("down", "--force", "--local")
    assert not (base / ".ray").exists(), "Ray's own token file is the user's affair"
    assert local_processes.cluster_pids(Path(cluster["directory"]), cluster["session"]) == []


def driver(place: Place, code: str, **env: str) -> str:
    return Place(place.folder, {**place.env, **env}).run("python", "-c", PREAMBLE + code).stdout


def test_who_holds_and_who_may(place: Place) -> None:
    """A wrong token, a foreign release, a double release, 10,001 over the limit: each the documented answer."""
    driver(place, HOLDERS)
    story = place.pools("log", "--request", "held")
    assert "release was refused" in story
    assert "the token is not the request's" in story
    log = place.pools("log", "coordinator")
    assert "the key is not the requester's" in log
    assert "the key is not that of operators" in log
    for secret in (KEY, OPERATOR_KEY):
        assert secret not in log + place.pools("status", "--json")


def test_keys_from_files_and_an_operators_word(place: Place) -> None:
    key, operator_key = place.folder / "key", place.folder / "operator"
    key.write_text(KEY + "\n")
    operator_key.write_text(OPERATOR_KEY + "\n")
    submit = ("submit", "-r", "prod", "--resource", "seat=1", "--id", "mine")
    said = place.run("pools", *submit, code=1).stderr
    assert said.count("\n") == 1
    assert "protected by a key" in said
    assert place.json(*submit, "--wait", "--key-file", str(key))["state"] == "allocated"
    assert "operators have a key" in place.run("pools", "cancel", "mine", code=1).stderr
    assert "operators have a key" in place.run("pools", "upgrade", code=1).stderr
    operator = Place(place.folder, {**place.env, "RAY_POOLS_OPERATOR_KEY_FILE": str(operator_key)})
    (view,) = operator.json("cancel", "mine")
    assert view["state"] == "cancelled"
    assert f"operator {view['by']} says: cancel" in place.pools("log", "--request", "mine")
    place.pools("key", "reset-operators", "--yes")
    assert place.json("submit", "-r", "team", "--resource", "seat=1", "--id", "free")["id"] == "free"
    assert place.json("release", "free")[0]["state"] in ("released", "cancelled")
    assert operator.json("up", "pools.yaml")["changes"] == 1


def test_commands_and_jobs_of_a_requester_with_a_key(place: Place, tmp_path: Path) -> None:
    """The right key works; a wrong one or none is refused in one line, and nothing runs. A job reads it from FILE."""
    key, wrong, ran = tmp_path / "key", tmp_path / "wrong", tmp_path / "ran"
    key.write_text(KEY + "\n")
    wrong.write_text(keys.new_key() + "\n")
    asks, command = ("-r", "prod", "--resource", "seat=1"), ("--", "touch", str(ran))
    for how in (("run",), ("job", "submit")):
        for given, came in ((("--key-file", str(wrong)), "another one"), ((), "none")):
            done = place.run("pools", *how, *asks, *given, *command, code=1)
            (said,) = [
                line for line in (done.stdout + done.stderr).splitlines() if line.startswith("pools: error: ")
            ]
            assert f"requester 'prod' is protected by a key, and {came} came" in said, (how, said)
            assert not ran.exists()
        place.pools(*how, *asks, "--key-file", str(key), *command)
        assert ran.exists()
        ran.unlink()
    assert KEY not in place.run("ray", "job", "list").stdout


@pytest.mark.parametrize(
    "env",
    [
        {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN_PATH": ""},
        {"RAY_AUTH_TOKEN": "another cluster's"},
        {"RAY_AUTH_TOKEN_PATH": ""},
        {"RAY_AUTH_TOKEN_PATH": "/nowhere"},
    ],
    ids=["disabled", "wrong", "none", "no-file"],
)
def test_whom_ray_refuses_hears_it_in_one_line(place: Place, env: dict[str, str]) -> None:
    """Ray itself tries for 20 s before it says so: here the client has asked before, and nothing of Ray's is said."""
    stranger = Place(place.folder, {k: v for k, v in {**place.env, **env}.items() if v})
    stranger.env["POOLS_STATE_DIR"] = str(place.folder / "nothing")
    done = stranger.run("pools", "status", code=3)
    assert done.stderr.count("\n") == 1, done.stderr
    assert "refused this process" in done.stderr
    assert "RAY_AUTH_MODE" in done.stderr
    code = 'print(refused(errors.Unreachable, lambda: pools.connect(namespace="access")))'
    assert "refused this process" in stranger.run("python", "-c", PREAMBLE + code).stdout


def test_the_other_commands_work_with_authentication_and_say_so_in_one_line_without(
    place: Place, tmp_path: Path
) -> None:
    """Those that no other test here runs."""
    asks = ("-r", "team", "--resource", "seat=1")
    ran = ("--", "echo", "it ran")
    assert "it ran" in place.pools("run", *asks, *ran)
    assert "it ran" in place.pools("job", "submit", *asks, *ran)
    assert place.json("requests", "--requester", "team")
    doctor = place.json("doctor", "--no-sync")
    assert doctor["ok"], doctor
    place.pools("backup", str(tmp_path / "copy"))
    place.pools("restore", str(tmp_path / "copy"), "--store", str(tmp_path / "store"))
    live = (
        "scenario",
        "--live",
        str(RULES),
        "--select",
        "a-reserved-share*",
        "--address",
        place.env["RAY_ADDRESS"],
    )
    assert "1 scenario," in place.pools(*live)

    # one that does not find the cluster's own token in the notes of those who brought it up
    strange = {"RAY_AUTH_TOKEN": "another cluster's", "POOLS_STATE_DIR": str(tmp_path)}
    stranger = Place(place.folder, {**place.env, **strange})
    for command in (
        ("up", "pools.yaml"),
        ("submit", *asks),
        ("run", *asks, *ran),
        ("job", "submit", *asks, *ran),
        ("release", "held"),
        ("requests",),
        ("log", "coordinator"),
        ("upgrade",),
        ("backup", str(tmp_path / "none")),
        live,
        ("down",),
    ):
        done = stranger.run("pools", *command, code=3)
        assert done.stderr.count("\n") == 1, done.stderr
        assert "refused this process" in done.stderr or "uthenticat" in done.stderr


def test_cancel_and_release_in_every_state(place: Place) -> None:
    """docs/protocol.md, "In every state": on live actors, each state by events."""
    driver(place, STATES)


def test_a_requester_may_have_ten_thousand_waiting_and_no_more(place: Place) -> None:
    driver(place, FULL)


def test_a_process_with_ray_client_hears_what_to_do_and_its_tasks_may_have_slots(place: Place) -> None:
    (note,) = (place.folder / "state" / "local").glob("*.json")
    cluster = json.loads((Path(json.loads(note.read_text())["directory"]) / "cluster.json").read_text())
    driver(place, RAY_CLIENT % cluster["ports"]["client"])


def test_an_address_of_a_ray_client_is_told_what_to_do(place: Place) -> None:
    done = Place(place.folder, {**place.env, "RAY_ADDRESS": "ray://127.0.0.1:1"}).run(
        "pools", "status", code=2
    )
    assert "ray job submit" in done.stderr
    assert done.stderr.count("\n") == 1


def test_another_protocol_is_one_clear_error_at_every_entrance(place: Place) -> None:
    driver(place, SKEWED)
    code = "import sys; from ray_pools import wire; wire.PROTOCOL = 7; from ray_pools.cli.app import pools; pools()"
    done = place.run("python", "-c", code, "status", code=2)
    assert "protocol 7" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("release", RELEASES)
def test_a_driver_of_another_release_with_the_same_protocol_works(
    place: Place, tmp_path: Path, release: str
) -> None:
    driver(place, OTHER_CODE, PYTHONPATH=str(other_release(tmp_path, release)))


@pytest.mark.parametrize("release", RELEASES)
def test_actors_of_another_release_serve_this_one_and_go_on_as_this_one(
    place: Place, tmp_path: Path, release: str
) -> None:
    """Drivers and commands are newer, or older, than the actors. At last these are upgraded, and a slot stays held."""
    folder = other_release(tmp_path, release)
    config = f"namespace: {release}\nstore: {tmp_path / 'store'}\n"
    config += "pools: {seats: {capacity: {seat: 2}, placement: none}}\n"
    config += "policies: [{pool: seats, requester: team}]\n"
    (folder / "pools.yaml").write_text(config)
    (folder / "bring_up.py").write_text(BRING_UP)
    Place(folder, place.env).run("python", "bring_up.py", "pools.yaml")
    place.run("python", "-c", PREAMBLE + OTHER_ACTORS, release)

    here = Place(tmp_path, {**place.env, "RAY_POOLS_NAMESPACE": release})
    asked = ("-r", "team", "--resource", "seat=1", "--wait")
    assert here.json("submit", "--id", "held", *asked)["state"] == "allocated"
    assert "seats" in here.pools("status")
    assert here.json("requests", "--state", "allocated")[0]["id"] == "held"
    changed = here.json("upgrade")
    assert {(actor["name"], actor["from"]) for actor in changed["actors"]} == {
        ("coordinator", VERSION),
        ("pool:seats", VERSION),
    }
    assert here.json("submit", "--id", "after", *asked)["state"] == "allocated"
    assert [view["state"] for view in here.json("release", "held", "after")] == ["released"] * 2
    assert "it is released: final" in here.pools("log", "--request", "held")
    here.pools("down")


def test_a_job_of_ray_with_authentication(place: Place) -> None:
    dashboard = place.json("up", "pools.yaml")["dashboard"]
    env = {name: value for name, value in place.env.items() if name != "RAY_ADDRESS"}
    folder = place.folder / "job"
    folder.mkdir()
    code = PREAMBLE + 'client = pools.connect(namespace="access")\n'
    code += 'with client.slot("team", pool_resources={"seat": 1}) as slot:\n    print("inside", slot.pool)\n'
    (folder / "driver.py").write_text(code)
    submit = ("ray", "job", "submit", "--address", dashboard, "--working-dir", ".", "--")
    assert "inside counted" in Place(folder, env).run(*submit, "python", "driver.py").stdout
