"""Scenario files and their runner (docs/rules.md section 11): what is malformed, what fails, what is reported.

The worlds here are the reference, or one that is wrong in a single way: a runner that finds nothing would pass
every other test of this project.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import ClassVar

import pytest
from conftest import BadInputReader
from reference import Reference, make_world

from ray_pools.errors import BadInput
from ray_pools.scenario import Failure, run_files, run_scenario
from ray_pools.scenario_files import Scenario, load_scenarios, parse_scenarios

HEAD = """\
- name: one
  pools: {p: {capacity: {gpu: 4}}}
  policies:
    - {pool: p, requester: a, priority: 1}
  steps:
"""


def scenario(steps: str) -> Scenario:
    """The steps, written as in a file, on pool p with four GPUs and requester a."""
    (parsed,) = parse_scenarios(
        HEAD + "".join(f"    {line}\n" for line in steps.strip().splitlines()), "f.yaml"
    )
    return parsed


def failures(steps: str, world: type[Reference] = Reference) -> list[Failure]:
    return run_scenario(scenario(steps), world)


# ---------------------------------------------------------------- malformed files

MALFORMED = [
    # text, field, words of what would be right, line
    ("", "file", ["list of scenarios"], ""),
    ("# nothing but this\n", "file", ["list of scenarios"], ""),
    ("name: one\n", "file", ["list of scenarios"], "1"),
    ("[]\n", "file", ["at least one"], "1"),
    ("- name: [\n", "file", ["valid YAML"], "2"),
    ("a: b\n--- \nc: d\n", "file", ["valid YAML"], "2"),
    ("- !!python/object:os.system x\n", "file", ["valid YAML"], "1"),
    ("- just text\n", "scenario", ["mapping with name"], "1"),
    ("- pools: {}\n  steps: []\n", "name", ["name for the scenario"], "1"),
    ("- name: 3\n  pools: {}\n  steps: []\n", "name", ["string", "quote"], "1"),
    ("- name: ' '\n  pools: {}\n  steps: []\n", "name", ["not empty"], "1"),
    ("- name: x\n  steps: []\n", "pools", ["capacity"], "1"),
    ("- name: x\n  pools: {}\n", "steps", ["list"], "1"),
    ("- name: x\n  pools: {}\n  steps: 4\n", "steps", ["list of steps"], "3"),
    ("- name: x\n  pools: []\n  steps: []\n", "pools", ["mapping of pool names"], "2"),
    ("- name: x\n  pools: {p: 4}\n  steps: []\n", "pools.p", ["capacity"], "2"),
    ("- name: x\n  pools: {1: {capacity: {}}}\n  steps: []\n", "pools", ['write "1"'], "2"),
    ("- name: x\n  pools: {p: {size: 4}}\n  steps: []\n", "size", ["capacity", "min_runtime"], "2"),
    ("- name: x\n  pools: {}\n  policies: {}\n  steps: []\n", "policies", ["list of policies"], "3"),
    ("- name: x\n  pools: {}\n  policies:\n    - {pol: p}\n  steps: []\n", "pol", ["requester"], "4"),
    ("- name: x\n  pools: {}\n  refused: yep\n  steps: []\n", "refused", ["true or false"], "3"),
    ("- name: x\n  name: y\n  pools: {}\n  steps: []\n", "name", ["each key once"], "2"),
    ("- name: x\n  pools: {}\n  stepps: []\n", "stepps", ["steps"], "3"),
]


@pytest.mark.parametrize(("text", "field", "words", "line"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_file_is_named_with_line_and_key(
    text: str, field: str, words: list[str], line: str, refuses: BadInputReader
) -> None:
    with refuses(field, *words, where=f"f.yaml:{line}" if line else "f.yaml"):
        parse_scenarios(text, "f.yaml")


MALFORMED_STEPS = [
    ("- {expect: {a: queued}}", "step", ["exactly one verb", "set_capacity"]),
    ("- {release: a, cancel: a}", "step", ["exactly one verb"]),
    ("- {relase: a}", "relase", ["release"]),
    ("- release", "step", ["one verb"]),
    ("- {release: 7}", "release", ["id", "quote"]),
    ("- {cancel: [a]}", "cancel", ["id"]),
    ("- {advance: soon}", "advance", ["seconds"]),
    ("- {advance: -1}", "advance", ["seconds, 0 or more"]),
    ("- {advance: true}", "advance", ["seconds"]),
    ("- {advance: .nan}", "advance", ["seconds"]),
    ("- {advance: .inf}", "advance", ["seconds"]),
    ("- {restart: 4}", "restart", ["coordinator"]),
    ("- {submit: a}", "submit", ["mapping"]),
    ("- {submit: {id: a, id: b}}", "id", ["each key once"]),
    ("- {detach: {pool: p}}", "detach.requester", ["requester and pool"]),
    ("- {detach: {pool: p, requester: a, why: not}}", "why", ["requester"]),
    ("- {set_capacity: {pool: p}}", "set_capacity.capacity", ["pool and capacity"]),
    ("- {release: a, refused: 1}", "refused", ["true or false"]),
    ("- {release: a, note: 1}", "note", ["string"]),
    ("- {release: a, expect: [a]}", "expect", ["ids to states"]),
    ("- {release: a, expect: {a: alocated}}", "expect.a", ["allocated"]),
    ("- {release: a, expect: {a: queued@p}}", "expect.a", ["@pool"]),
    ("- {release: a, expect: {a: allocated@}}", "expect.a", ["@pool"]),
    ("- {release: a, expect: {no: queued}}", "expect", ['write "no"']),
    ("- {release: a, reason: {a: too_big}}", "reason.a", ["exceeds_capacity"]),
    ("- {release: a, usage: {p: 4}}", "usage.p", ["keys to amounts"]),
    ("- {release: a, usage: {p: {gpu: true}}}", "usage.p.gpu", ["integer"]),
    ("- {release: a, resources: {a: {gpu: 1.5}}}", "resources.a.gpu", ["integer"]),
    ("- {release: a, queue: {p: a}}", "queue.p", ["list of ids"]),
    ("- {release: a, queue: {p: [1]}}", "queue.p", ["quote"]),
]


@pytest.mark.parametrize(
    ("step", "field", "words"), MALFORMED_STEPS, ids=[step for step, _, _ in MALFORMED_STEPS]
)
def test_a_malformed_step_is_named_with_line_and_key(
    step: str, field: str, words: list[str], refuses: BadInputReader
) -> None:
    with refuses(field, *words, where="f.yaml:7"):
        scenario(f"- {{release: x, refused: true}}\n{step}")


def test_a_missing_file_and_one_that_is_no_text_are_bad_input(
    tmp_path: Path, refuses: BadInputReader
) -> None:
    with refuses("file", "readable"):
        load_scenarios(tmp_path / "none.yaml")
    with refuses("file", "readable"):
        load_scenarios(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with refuses("file", "UTF-8", where="binary.yaml"):
        load_scenarios(tmp_path / "binary.yaml")
    (tmp_path / "control.yaml").write_bytes(b"- name: \x00\n")
    with refuses("file", "valid YAML", where="control.yaml"):
        load_scenarios(tmp_path / "control.yaml")


def test_deep_nesting_is_bad_input(refuses: BadInputReader) -> None:
    with refuses("file", "valid YAML", where="f.yaml"):
        parse_scenarios("[" * 100_000, "f.yaml")


def test_anchors_and_merges_read_as_yaml_has_them() -> None:
    text = HEAD + (
        "    - submit: &first {id: x, requester: a, resources: {gpu: 1}}\n"
        "    - submit: {<<: *first, id: y}\n"
        "      expect: {x: allocated@p, y: allocated@p}\n"
    )
    (parsed,) = parse_scenarios(text, "f.yaml")
    assert parsed.steps[1].argument == {"id": "y", "requester": "a", "resources": {"gpu": 1}}
    assert run_scenario(parsed, make_world) == []


# ---------------------------------------------------------------- expectations that do not hold

SUBMIT = "- submit: {id: x, requester: a, resources: {gpu: 3}}\n"
UNMET = [
    ("expect: {x: queued}", "expect.x", "queued", "allocated@p"),
    ("expect: {x: allocated@q}", "expect.x", "allocated@q", "allocated@p"),
    ("expect: {x: preempting}", "expect.x", "preempting", "allocated@p"),
    ("expect: {z: queued}", "expect.z", "queued", "no such request (there are x)"),
    ("usage: {p: {gpu: 4}}", "usage.p.gpu", 4, 3),
    ("usage: {p: {tpu: 0}}", "usage.p.tpu", 0, "the pool does not meter it (there are gpu)"),
    ("usage: {q: {gpu: 0}}", "usage.q", {"gpu": 0}, "no such pool (there are p)"),
    ("queue: {p: [x]}", "queue.p", ["x"], []),
    ("queue: {q: []}", "queue.q", [], "no such pool (there are p)"),
    ("reason: {x: at_limit}", "reason.x", "at_limit", "none: it is allocated@p"),
    ("reason: {z: at_limit}", "reason.z", "at_limit", "no such request (there are x)"),
    ("resources: {x: {gpu: 3}}", "resources.x", {"gpu": 3}, {"gpu": 3, "step_run": 1}),
    ("resources: {z: {gpu: 3}}", "resources.z", {"gpu": 3}, "no such request (there are x)"),
    ("refused: true", "refused", "submit refused", "accepted"),
]


@pytest.mark.parametrize(("expectation", "what", "wanted", "got"), UNMET, ids=[one[0] for one in UNMET])
def test_an_unmet_expectation_says_wanted_and_got(
    expectation: str, what: str, wanted: object, got: object
) -> None:
    (failure,) = failures(f"{SUBMIT}  {expectation}")
    assert failure == Failure("one", 1, what, wanted, got, "f.yaml:6")
    assert failure.text().startswith(f"one, step 1 (f.yaml:6): {what}\n")


def test_an_unmet_reason_shows_the_cause_of_each_pool() -> None:
    (failure,) = failures(f"{SUBMIT}{SUBMIT.replace('x', 'y')}  reason: {{y: at_limit}}")
    assert (failure.step, failure.got) == (2, {"p": "waiting_capacity"})


def test_bare_states_hold_in_any_pool() -> None:
    assert failures(f"{SUBMIT}  expect: {{x: allocated}}") == []


def test_a_refusal_that_nobody_expected_is_named() -> None:
    (failure,) = failures("- release: nobody")
    assert (failure.step, failure.what, failure.wanted) == (1, "refused", "release accepted")
    assert failure.got.startswith("refused: ")
    assert "nobody" in failure.got


def test_what_follows_a_failed_step_is_still_played() -> None:
    found = failures(f"- release: nobody\n{SUBMIT}  expect: {{x: queued}}")
    assert [(one.step, one.what) for one in found] == [(1, "refused"), (2, "expect.x")]


class ChangesThenRefuses(Reference):
    def release(self, id: str) -> None:
        super().release(id)
        raise BadInput("id", id, "something else")


def test_a_refused_step_must_have_changed_nothing() -> None:
    found = failures(f"{SUBMIT}- release: x\n  refused: true", ChangesThenRefuses)
    assert [one.what for one in found] == ["states after a refused step", "usage after a refused step"]


def test_a_configuration_is_refused_exactly_when_it_says_so() -> None:
    over = HEAD.replace("priority: 1", "reserved: {gpu: 5}") + "    - {advance: 1}\n"
    (parsed,) = parse_scenarios(over, "f.yaml")
    (failure,) = run_scenario(parsed, make_world)
    assert (failure.step, failure.what, failure.wanted) == (0, "refused", "the configuration accepted")
    assert "configuration (f.yaml:1)" in failure.text()
    (parsed,) = parse_scenarios(over + "  refused: true\n", "f.yaml")
    assert run_scenario(parsed, make_world) == []
    (parsed,) = parse_scenarios(HEAD + "    - {advance: 1}\n  refused: true\n", "f.yaml")
    (failure,) = run_scenario(parsed, make_world)
    assert (failure.step, failure.got) == (0, "accepted")


WRONG_OPTIONS = [
    "{p: {}}",
    "{p: {capacity: 4}}",
    "{p: {capacity: {gpu: -1}}}",
    "{p: {capacity: {gpu: true}}}",
    "{p: {capacity: {gpu: 4}, queueing: fair}}",
    "{p: {capacity: {gpu: 4}, queueing: [strict]}}",
    "{p: {capacity: {gpu: 4}, grace: -1}}",
    "{p: {capacity: {gpu: 4}, min_runtime: long}}",
    "{'': {capacity: {gpu: 4}}}",
]


@pytest.mark.parametrize("pools", WRONG_OPTIONS)
def test_wrong_options_refuse_the_configuration(pools: str) -> None:
    (parsed,) = parse_scenarios(f"- name: x\n  pools: {pools}\n  refused: true\n", "f.yaml")
    assert run_scenario(parsed, make_world) == []


WRONG_POLICIES = [
    "{pool: p}",
    "{requester: a}",
    "{pool: q, requester: a}",
    "{pool: p, requester: ''}",
    "{pool: p, requester: a, priority: high}",
    "{pool: p, requester: a, priority: true}",
    "{pool: p, requester: a, reserved: 4}",
    "{pool: p, requester: a, limit: {gpu: null}}",
    "{pool: p, requester: a, limit: {gpu: 1.5}}",
]


@pytest.mark.parametrize("policy", WRONG_POLICIES)
def test_wrong_policies_are_refused_in_a_configuration_and_in_a_step(policy: str) -> None:
    text = f"- name: x\n  pools: {{p: {{capacity: {{gpu: 4}}}}}}\n  policies: [{policy}]\n  refused: true\n"
    (parsed,) = parse_scenarios(text, "f.yaml")
    assert run_scenario(parsed, make_world) == []
    assert failures(f"- attach: {policy}\n  refused: true") == []


# ---------------------------------------------------------------- many files


def test_a_trace_has_one_line_per_step_with_all_that_is_visible(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(
        HEAD
        + "    - submit: {id: z, requester: a, resources: {gpu: 4}}\n"
        + "    - submit: {id: b, requester: a, resources: {gpu: 4}}\n"
        + "    - release: nobody\n      refused: true\n"
    )
    trace = io.StringIO()
    assert run_files([path], make_world, trace_out=trace).ok
    lines = trace.getvalue().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert lines[2] == (
        '{"scenario": "one", "step": 3, "refused": true, "states": {"b": "queued", "z": "allocated@p"},'
        ' "usage": {"p": {"gpu": 4}}, "queue": {"p": ["b"]}}'
    )


def test_a_report_counts_scenarios_and_says_each_failure(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    good = HEAD + "    - {advance: 1}\n"
    path.write_text(good + good.replace("one", "two").replace("{advance: 1}", "{release: nobody}"))
    report = run_files([path, path], make_world)
    assert (report.scenarios, report.steps, report.failed, report.ok) == (4, 4, 2, False)
    assert report.text().endswith("2 of 4 scenarios hold (4 steps, 2 failures)")
    assert report.text().count("two, step 1") == 2


def test_scenarios_are_selected_by_name_or_pattern(tmp_path: Path, refuses: BadInputReader) -> None:
    path = tmp_path / "f.yaml"
    good = HEAD + "    - {advance: 1}\n"
    path.write_text(good + good.replace("one", "two") + good.replace("one", "three"))
    assert run_files([path], make_world, select=["t*"]).scenarios == 2
    assert run_files([path], make_world, select=["one", "two"]).scenarios == 2
    with refuses("select", "name"):
        run_files([path], make_world, select=["four"])


def test_nothing_is_played_when_one_file_is_malformed(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(HEAD + "    - {advance: 1}\n")
    (tmp_path / "bad.yaml").write_text("nonsense")
    trace = io.StringIO()
    with pytest.raises(BadInput):
        run_files([tmp_path / "good.yaml", tmp_path / "bad.yaml"], make_world, trace_out=trace)
    assert trace.getvalue() == ""


class Unclosed(Reference):
    closed: ClassVar[list[str]] = []

    def close(self) -> None:
        self.closed.append("closed")

    def advance(self, seconds: float) -> None:
        raise ZeroDivisionError


def test_a_world_is_closed_even_when_it_crashes() -> None:
    with pytest.raises(ZeroDivisionError):
        failures("- advance: 1", Unclosed)
    assert Unclosed.closed == ["closed"]
