"""The operators' commands at live actors (without Ray): pools and policies one by one, and what they are told.

Faults it stands for: a pool that is taken away with what runs in it, or that goes on admitting; waiters that lose their
place when a pool is closed; a `why` without the numbers, a history without the reason; tables that break at 80 columns.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner
from shell_pools import ShellPools, shell_pools

from ray_pools.cli import output
from ray_pools.cli.app import COMMANDS, pools
from ray_pools.cli.times import parse_since
from ray_pools.errors import BadInput

CONFIG = """\
pools:
  p: {capacity: {gpu: 4}, placement: none, grace_s: 60}
  q: {capacity: {gpu: 2}, placement: none}
policies:
  - {pool: p, requester: a, priority: 1, reserved: {gpu: 2}}
  - {pool: q, requester: a}
  - {pool: p, requester: b, priority: 9, limit: {gpu: 3}}
"""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[ShellPools]:
    with shell_pools(tmp_path, CONFIG) as made:
        yield made


def done(live: ShellPools, *arguments: str, code: int = 0, input: str | None = None) -> str:
    result = live.run(*arguments, input=input)
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def said(live: ShellPools, *arguments: str) -> Any:
    return json.loads(done(live, *arguments, "--json"))


# --- policies


def test_policies_are_attached_replaced_listed_and_detached(live: ShellPools) -> None:
    shown = done(live, "policy", "attach", "c", "q", "--priority", "3", "--reserved", "gpu=1")
    assert shown.splitlines()[0] == "+ policy of c on q: priority 3, reserved gpu 1"
    assert "~ policy of c on q: priority 3 -> 0, reserved gpu 1 -> none" in done(
        live, "policy", "attach", "c", "q"
    )
    assert "nothing to do" in done(live, "policy", "attach", "c", "q")
    assert [(each["requester"], each["pool"]) for each in said(live, "policy", "list")] == [
        ("a", "p"), ("a", "q"), ("b", "p"), ("c", "q")
    ]  # fmt: skip
    live.submit("c1", "c", 2)
    live.submit("c2", "c", 2)
    assert "c2 of c would be rejected" in done(live, "policy", "detach", "c", "q", "--dry-run")
    assert "- policy of c on q" in done(live, "policy", "detach", "c", "q")
    live.until(c1="allocated", c2="rejected")
    assert "has no policy on pool" in done(live, "policy", "detach", "c", "q", code=1)
    assert "POOL = 'z': one of p, q" in done(live, "policy", "detach", "c", "z", code=2)
    assert "POOL = 'z': one of p, q" in done(live, "policy", "attach", "c", "z", code=2)
    assert "--pool = 'z': one of p, q" in done(live, "policy", "list", "--pool", "z", code=2)
    # a name of which nothing is known is most likely wrong; one with a policy has an empty list
    for command in (("policy", "list"), ("requests",)):
        assert "requester 'nobody' has no policy" in done(live, *command, "-r", "nobody", code=1)
    assert (
        said(live, "requests", "-r", "b") == said(live, "policy", "list", "-r", "a", "--pool", "q")[1:] == []
    )


def test_a_policy_that_breaks_a_rule_is_refused(live: ShellPools) -> None:
    before = live.seq()
    refused = done(live, "policy", "attach", "c", "p", "--reserved", "gpu=3", code=2)
    assert (
        "--reserved gpu = 3: at most 2, since others reserve 2 of pool p's capacity 4 before it: a 2"
        in refused
    )
    assert "--reserved" in done(live, "policy", "attach", "c", "p", "--reserved", "gpu", code=2)
    assert live.seq() == before


# --- pools


def test_a_pool_is_made_changed_listed_and_described(live: ShellPools) -> None:
    done(
        live,
        "pool",
        "create",
        "r",
        "--capacity",
        "gpu=2",
        "--capacity",
        "licence=1",
        "--grace-s",
        "5",
        "--count-only",
    )
    done(live, "policy", "attach", "c", "r")
    live.submit("c1", "c", 2)
    live.until(c1="allocated")
    shown = done(live, "pool", "update", "r", "--capacity", "licence=none", "--capacity", "gpu=3")
    assert "~ pool r: capacity gpu 2 -> 3, capacity licence 1 -> none" in shown
    assert "nothing to do" in done(live, "pool", "update", "r", "--capacity", "gpu=3")
    (r,) = [pool for pool in said(live, "pool", "list") if pool["name"] == "r"]
    assert (r["capacity"], r["grace_s"], r["state"]) == ({"gpu": 3}, 5.0, "open")
    described = said(live, "pool", "describe", "r")
    assert [view["id"] for view in described["holders"]] == ["c1"]
    assert described["status"]["held"] == {"gpu": 2}
    assert "pool r (open)" in done(live, "describe", "r")


REFUSED = (
    (("create", "r"), 2, "--capacity"),
    (("create", "p", "--capacity", "gpu=1"), 1, "there is a pool 'p'"),
    (("create", "all", "--capacity", "gpu=1"), 2, "another name"),
    (("create", "r", "--capacity", "gpu"), 2, "KEY=N"),
    (("update", "z", "--capacity", "gpu=1"), 2, "POOL = 'z': one of p, q"),
    (("update", "p", "--capacity", "gpu=1"), 2, "at most the pool's capacity 1"),
    (("update", "p", "--label", "a=b", "--count-only"), 2, "--count-only"),
    (("delete", "z", "--yes"), 2, "POOL = 'z': one of p, q"),
    (("cordon", "z"), 2, "POOL = 'z': one of p, q"),
    (("describe", "z"), 2, "POOL = 'z': one of p, q"),
)
"""Arguments of `pools pool`, exit code, words of the error."""


def test_what_can_not_be_is_refused_before_anything_changes(live: ShellPools) -> None:
    before = live.seq()
    for arguments, code, words in REFUSED:
        assert words in done(live, "pool", *arguments, code=code)
    assert live.seq() == before


def test_a_cordoned_pool_grants_nothing_and_waiters_keep_their_place(
    live: ShellPools, tmp_path: Path
) -> None:
    live.submit("b1", "b", 2)
    assert "~ pool p: state open -> cordoned" in done(live, "pool", "cordon", "p")
    live.submit("b2", "b", 1)
    live.submit("a1", "a", 2)  # the other pool still grants
    live.submit("a2", "a", 2)
    live.until(b1="allocated", b2="queued", a1="allocated", a2="queued")
    assert "cordoned" in done(live, "why", "b2")
    assert "pool 'p' is cordoned" in done(live, "status")
    assert "nothing to do" in done(live, "apply", str(tmp_path / "pools.yaml"))  # no part of a configuration
    assert "# Pool p is cordoned" in done(live, "export")
    dry = done(live, "pool", "uncordon", "p", "--dry-run")
    assert "a2 of a would be granted in p" in dry
    done(live, "pool", "uncordon", "p")
    live.until(a2="allocated", b2="queued")  # in its share, it stands before b2, which is older


def test_delete_drains_and_waiters_fall_back(live: ShellPools) -> None:
    live.submit("b1", "b", 3)
    live.submit("a1", "a", 2)
    live.submit("a2", "a", 2)
    live.submit("b2", "b", 3)
    live.until(a1="allocated", a2="queued", b1="preempting", b2="queued")
    before = live.seq()
    asked = live.run("pool", "delete", "p", input="n\n")
    assert (asked.exit_code, live.seq()) == (1, before)
    assert "b2 of b would be rejected (p: draining, q: no_policy)" in asked.stdout
    assert "drains: 1 request still holds" in done(live, "pool", "delete", "p", "--yes", "--no-wait")
    live.settle()
    live.until(b1="preempting", b2="rejected", a2="queued")
    assert said(live, "why", "a2")["request"]["pools"] == ["q"]
    assert "drains on" in done(live, "pool", "delete", "p", "--yes", "--timeout", "0", code=1)
    live.ask("", op="stopped", id="b1", token=b"")
    assert "is deleted" in done(live, "pool", "delete", "p", "--yes")
    assert [pool["name"] for pool in said(live, "pool", "list")] == ["q"]
    assert "ray-pools:pool:p" not in live.shells
    assert said(live, "policy", "list") == [
        {"pool": "q", "requester": "a", "priority": 0, "reserved": {}, "limit": {}}
    ]


def test_delete_by_force_calls_back_what_is_held_and_retries_go_elsewhere(live: ShellPools) -> None:
    done(live, "pool", "update", "p", "--grace-s", "0")
    for id, retries in (("fixed", 0), ("again", 1)):
        live.ask("", op="submit", id=id, requester="a", amounts={"gpu": 1, "step_run": 1}, token=b"", retries=retries,
                 preemptible=id != "fixed")  # fmt: skip
    live.settle()
    assert {live.ask("", op="get", ids=[id])[0]["pool"] for id in ("fixed", "again")} == {"p"}
    assert "is deleted" in done(live, "pool", "delete", "p", "--yes", "--force")
    live.until(fixed="preempted", again="allocated")
    assert "was stopped: an operator emptied its pool, and no retries are left" in done(live, "why", "fixed")
    again = live.ask("", op="get", ids=["again"])[0]
    assert again["for_nobody"] == ""  # of this attempt nobody wants anything
    assert (again["pool"], again["k"], again["retries"]) == ("q", 2, 0)


def test_a_pool_that_is_draining_comes_back_by_uncordon(live: ShellPools) -> None:
    live.submit("b1", "b", 3)
    done(live, "pool", "delete", "p", "--yes", "--no-wait")
    live.submit("b2", "b", 1)
    live.until(b2="rejected")
    done(live, "pool", "uncordon", "p")
    live.submit("b3", "b", 1)
    assert "3 of its limit of 3 gpu" in done(live, "why", "b3")


# --- why, for each cause


def test_why_names_the_numbers_for_each_cause(live: ShellPools) -> None:
    """The causes of docs/rules.md, sections 3 to 5, and those of section 9."""

    def text(id: str) -> str:
        return done(live, "why", id)

    live.submit("stranger", "nobody", 1)
    assert "no_policy: requester nobody has no policy on p" in text("stranger")
    live.ask("", op="submit", id="key", requester="a", amounts={"tpu": 3, "step_run": 1}, token=b"")
    assert "no_capacity_for_key: it asks for 3 tpu, which p does not list" in text("key")
    live.submit("large", "b", 5)
    assert "exceeds_capacity: it asks for 5 gpu; p has 4 in all" in text("large")
    live.submit("over", "b", 4)
    assert "exceeds_limit: it asks for 4 gpu; the limit of b on p is 3" in text("over")
    live.submit("fixed", "a", 3, preemptible=False)
    assert "exceeds_reserved: it is not preemptible and asks for 3 gpu; a has 2 reserved on p" in text(
        "fixed"
    )

    live.submit("b1", "b", 3)
    live.submit("b2", "b", 1)
    assert "at_limit: b has 3 of its limit of 3 gpu, and it asks for 1 more" in text("b2")
    assert "3 gpu of it are borrowed; a could take it" in text("b1")
    live.submit("f1", "a", 1, preemptible=False)
    live.submit("f2", "a", 1, preemptible=False)
    assert "awaiting_preemption: 1 gpu are held by work that is stopping (b1), " in text("f2")
    live.submit("f3", "a", 1, preemptible=False)
    assert (
        "reserved_in_use: it is not preemptible, and non-preemptible work of a has 2 of its 2 reserved gpu"
        in text("f3")
    )
    assert "it is being preempted, and has " in text("b1")
    live.ask("", op="stopped", id="b1", token=b"")
    live.until(b1="preempted", f2="allocated", b2="allocated")
    live.submit("w", "b", 2)
    assert "waiting_capacity: 1 gpu more needed in p; nobody borrows any" in text("w")
    done(live, "pool", "cordon", "p")
    assert "cordoned: an operator has cordoned p" in text("w")
    assert "there is no request 'nope'" in done(live, "why", "nope", code=1)


def test_why_names_who_stands_before_and_what_that_one_lacks(live: ShellPools) -> None:
    done(live, "pool", "update", "p", "--queueing", "strict")
    live.submit("b1", "b", 1)
    live.submit("a1", "a", 2)
    live.submit("head", "b", 2)
    live.submit("small", "a", 1)
    live.submit("b2", "b", 1)
    explained = said(live, "why", "b2")
    assert explained["pools"]["p"]["cause"] == "behind_head"
    assert explained["pools"]["p"]["numbers"] == {
        "behind": "head", "its_cause": "waiting_capacity", "its_shortage": {"gpu": 1}
    }  # fmt: skip
    words = "it could be granted, but head of b, of priority 9, waits before it for 1 gpu more"
    assert words in done(live, "why", "b2")


# --- requests, history, status


def test_requests_are_filtered_by_pool_requester_state_and_time(live: ShellPools) -> None:
    live.submit("b1", "b", 3)
    live.submit("a1", "a", 1)
    live.submit("b2", "b", 3)

    def ids(*arguments: str) -> list[str]:
        return [view["id"] for view in said(live, "requests", *arguments)]

    assert ids() == ["b2", "a1", "b1"]
    assert ids("--pool", "p", "--state", "allocated") == ["a1", "b1"]
    assert ids("--requester", "b", "--state", "queued") == ["b2"]
    now = live.ask("", op="ping")["now"]
    assert ids("--since", f"@{now + 5}") == []
    assert ids("--since", "1h") == ["b2", "a1", "b1"]
    assert "--since" in done(live, "requests", "--since", "yesterday", code=2)


def test_times_ago_and_moments() -> None:
    assert parse_since("90s", 1000.0) == 910.0
    assert parse_since("1.5 h", 10_000.0) == 4600.0
    assert parse_since("@12.5", 0.0) == 12.5
    assert parse_since("2026-01-31T12:00:00Z", 0.0) == 1769860800.0
    with pytest.raises(BadInput):
        parse_since("10 parsecs", 0.0)


def test_history_says_what_was_decided_and_why(live: ShellPools) -> None:
    live.submit("b1", "b", 3)
    live.submit("a1", "a", 2)
    live.submit("a2", "a", 2)
    live.submit("no", "nobody", 1)
    live.ask("", op="stopped", id="b1", token=b"")
    live.until(b1="preempted", a1="allocated", a2="allocated")
    done(live, "pool", "cordon", "q")
    live.settle()

    def texts(*arguments: str) -> list[str]:
        return [each["text"] for each in said(live, "history", *arguments)]

    newest = texts()
    assert newest[0].startswith("configuration 2, by operator ")
    assert newest[0].endswith(": ~ pool q: state open -> cordoned")  # what changed, not what there is
    assert any(
        text.startswith("a2 of a: nominated for gpu 2: b1 of b must stop, since it takes its share")
        for text in newest
    )
    assert any(text.startswith("no of nobody asks for gpu 1") for text in newest)
    about = texts("--request", "b1")
    assert [text.split(": ")[0] for text in about] == ["b1 of b", "b1 of b", "a2 of a", "b1 of b"]
    assert "it is preempted: final" in " ".join(about[:2])
    assert about[3].startswith("b1 of b: granted gpu 3, borrows gpu 3")
    assert {each["requester"] for each in said(live, "history", "--requester", "a")} == {"a"}
    assert {each["log"] for each in said(live, "history", "--pool", "q")} == {"pool:q"}
    assert len(texts("--limit", "2")) == 2
    now = live.ask("", op="ping")["now"]
    assert texts("--since", f"@{now + 10}") == []
    assert "--pool = 'z': one of p, q" in done(live, "history", "--pool", "z", code=2)
    ats = [each["at"] for each in said(live, "history")]
    assert ats == sorted(ats, reverse=True)


def test_status_watches_until_it_is_interrupted(live: ShellPools, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        live.submit(f"b{len(slept)}", "b", 1)
        if len(slept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("ray_pools.cli.status.time.sleep", lambda s: sleep(s) if s == 7 else time.monotonic())
    result = live.run("status", "--watch", "--every", "7", "--json")
    assert result.exit_code == 130
    held = [json.loads(line)["pools"]["p"]["held"]["gpu"] for line in result.stdout.splitlines()]
    assert held == [0, 1]
    assert "--every" in done(live, "status", "--every", "0", code=2)


def test_tables_fit_80_columns(live: ShellPools, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a line that a terminal wraps, so that no column stands under its head."""
    name = "a-pool-with-quite-a-long-name-as-teams-like-to-have-them"
    done(live, "pool", "create", name, "--capacity", "gpu=9007199254740991", "--count-only")
    done(live, "policy", "attach", "research-and-development-of-language", name, "--reserved", "gpu=9007199254740991",
         "--limit", "gpu=9007199254740991", "--priority", "2147483648")  # fmt: skip
    live.submit(
        "a-request-with-a-very-long-name-such-as-that-of-a-sweep/17",
        "research-and-development-of-language",
        7,
    )
    monkeypatch.setattr(output, "WIDTH_OF_FILES", 80)
    for command in (("status",), ("requests",), ("policy", "list"), ("pool", "list"), ("describe", name)):
        for line in done(live, *command).splitlines():
            assert len(line.rstrip()) <= 80, f"{command}: {line}"


# --- completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_completion_script(shell: str) -> None:
    result = CliRunner().invoke(pools, ["completion", shell])
    assert result.exit_code == 0
    assert "_POOLS_COMPLETE" in result.stdout


def test_completion_offers_commands_without_loading_them() -> None:
    env = {"_POOLS_COMPLETE": "bash_complete", "COMP_WORDS": "pools ", "COMP_CWORD": "1"}
    with mock.patch.dict(sys.modules):
        sys.modules.pop("ray_pools.cli.replay", None)
        result = CliRunner().invoke(pools, [], env=env, prog_name="pools", complete_var="_POOLS_COMPLETE")
        assert "ray_pools.cli.replay" not in sys.modules
    offered = [line.partition(",")[2] for line in result.stdout.splitlines()]
    assert set(COMMANDS) <= set(offered)
    within = CliRunner().invoke(
        pools, [], prog_name="pools", complete_var="_POOLS_COMPLETE",
        env={**env, "COMP_WORDS": "pools pool cor", "COMP_CWORD": "2"},
    )  # fmt: skip
    assert within.stdout.strip() == "plain,cordon"


def test_a_rejected_submit_says_why_once_and_with_numbers(live: ShellPools) -> None:
    """As `pools why` does: who is refused need not ask again for what it asked too much of."""
    result = live.run("submit", "-r", "b", "-g", "5", "--id", "big")
    assert (result.exit_code, result.stdout) == (1, "big rejected\n")
    assert result.stderr == (
        "pools: error: request 'big' is rejected: p: exceeds_capacity: it asks for 5 gpu; p has 4 in all;"
        " q: no_policy: requester b has no policy on q\n"
    )
