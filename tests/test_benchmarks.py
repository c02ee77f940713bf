"""The benchmarks as a product part: what their command takes, prints and refuses, and the parts of them that need no
cluster. That each of them works live is in `test_benchmarks_live.py`."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parent.parent))  # beside the tests, and no part of the distribution

from benchmarks import __main__ as command
from benchmarks import compare, figures, kueue, restart, scale, slurm
from benchmarks.figures import Figure
from ray_pools.core import records as ev
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.pool_state import PoolState
from ray_pools.errors import BadInput
from ray_pools.store import open_reader

FIELDS = ["name", "value", "unit", "ratio", "target", "met", "spread"]
COSTS = Figure("decide: cost", 2.0, "ms", 4.0, "at most 5 bare calls", True, 0.1)
RATE = Figure("decide: rate", 500.0, "grants/s", None, "", None, 0.1)

Run = Callable[..., Result]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command, with a benchmark `decide` that gives these figures; no other one is run."""
    monkeypatch.setenv(figures.QUICK_ENV, "")

    def run(found: list[Figure], *arguments: str) -> Result:
        def only(name: str) -> Iterator[Figure]:
            assert name == "decide"
            yield from found

        monkeypatch.setattr(command, "run", only)
        return CliRunner().invoke(command.main, list(arguments))

    return run


def stored(file: Path, *found: Figure) -> str:
    file.write_text("".join(figures.json_line(each) + "\n" for each in found))
    return str(file)


# --- the registry


def test_each_name_is_a_module_that_measures() -> None:
    for name in command.NAMES:
        module = command.NAMES[name].module or name.replace("-", "_")
        source = (Path(command.__file__).parent / f"{module}.py").read_text()
        assert "\ndef run() -> Iterator[Figure]:" in source, name


def test_the_long_ones_run_only_by_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(command, "run", lambda name: ran.append(name) or [])
    assert CliRunner().invoke(command.main, []).exit_code == 0
    assert ran == [name for name in command.NAMES if name not in ("kueue", "scale", "prewarm")]
    ran.clear()
    assert CliRunner().invoke(command.main, ["scale", "decide"]).exit_code == 0
    assert ran == ["scale", "decide"]


def test_the_page_names_each_of_them() -> None:
    page = (Path(command.__file__).parent / "README.md").read_text()
    assert [name for name in command.NAMES if f"| `{name}` |" not in page] == []


# --- what it prints


def test_json_is_a_line_for_each_figure_with_all_its_fields(runs: Run) -> None:
    result = runs([COSTS, RATE], "decide", "--json")
    assert result.exit_code == 0
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert list(first) == list(second) == FIELDS
    assert first == COSTS._asdict()
    assert second == RATE._asdict()


def test_a_target_that_is_missed_is_the_exit_code(runs: Run) -> None:
    result = runs([COSTS._replace(met=False), RATE], "decide")
    assert result.exit_code == 1
    assert "NO" in result.stdout


def test_a_quick_run_has_no_verdict(runs: Run) -> None:
    """Its figures mean nothing: neither reached nor missed."""
    assert figures.verdict(True) is True
    assert runs([], "decide", "--quick").exit_code == 0
    assert (figures.verdict(False), figures.size(100, 2)) == (None, 2)


def test_figures_are_medians_with_their_spread() -> None:
    assert figures.middle([4.0, 2.0, 3.0, 10.0, 1.0]) == (3.0, 3.0)
    assert figures.ratios([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]) == 3.0
    turns: list[str] = []
    figures.rounds(2, lambda: turns.append("a") or 1.0, lambda: turns.append("b") or 1.0)
    assert turns == ["a", "b", "a", "b"]


# --- against a stored run


@pytest.mark.parametrize(
    ("now", "worse"),
    [
        ([COSTS, RATE], []),
        ([COSTS._replace(ratio=4.3), RATE._replace(value=460.0)], []),  # within the spread
        ([COSTS._replace(ratio=5.0)], ["decide: cost"]),
        ([COSTS._replace(ratio=5.0, spread=0.5)], []),  # it scatters as much by itself
        ([COSTS._replace(value=9.0)], []),  # the machine is slower, the ratio is not
        ([RATE._replace(value=400.0)], ["decide: rate"]),  # of a rate less is worse
        ([COSTS._replace(ratio=1.0), RATE._replace(value=900.0)], []),
    ],
)
def test_worse_is_what_changed_by_more_than_the_spread(now: list[Figure], worse: list[str]) -> None:
    before = {each.name: each for each in (COSTS, RATE)}
    assert [each.name for each in compare.worse(before, now)] == worse


def test_a_comparison_says_what_got_worse(runs: Run, tmp_path: Path) -> None:
    gone = Figure("decide: gone", 1.0, "ms", None, "", None, 0.0)
    other = Figure("log: of another benchmark", 1.0, "ms", None, "", None, 0.0)
    file = stored(tmp_path / "before.jsonl", COSTS, RATE, gone, other)
    new = Figure("decide: new", 1.0, "ms", None, "", None, 0.0)
    result = runs([COSTS._replace(ratio=8.0), RATE, new], "decide", "--compare", file)
    assert result.exit_code == 1
    assert "worse: decide: cost: ratio 8, was 4: 100% worse, and the spread is 10%" in result.stdout
    assert "not in this run: decide: gone" in result.stdout
    assert "not in the file: decide: new" in result.stdout
    assert "2 figures compared, 1 worse" in result.stdout
    assert "another" not in result.stdout


def test_a_comparison_without_names_runs_what_the_file_has(runs: Run, tmp_path: Path) -> None:
    """And beside JSON lines its words go to stderr."""
    file = stored(tmp_path / "before.jsonl", COSTS, RATE)
    result = runs([COSTS, RATE], "--json", "--compare", file)
    assert result.exit_code == 0
    assert [json.loads(line)["name"] for line in result.stdout.splitlines()] == [COSTS.name, RATE.name]
    assert "2 figures compared, 0 worse" in result.stderr


GOOD = COSTS._asdict()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "--json"),
        ("name value unit\n", "line 1"),
        ("[1, 2]\n", "line 1"),
        (json.dumps(GOOD) + "\n{\n", "line 2"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "spread"}), "spread"),
        (json.dumps({**GOOD, "value": "2"}), "a number"),
        (json.dumps({**GOOD, "ratio": True}), "a number, or null"),
        (json.dumps({**GOOD, "met": 1}), "true, false, or null"),
        (json.dumps(GOOD) + "\n" + json.dumps(GOOD), "two runs"),
        (json.dumps({**GOOD, "name": "nothing: cost"}), "nothing"),
    ],
)
def test_a_file_that_is_no_stored_run_is_one_clear_error(
    runs: Run, tmp_path: Path, text: str, words: str
) -> None:
    """Before anything is measured."""
    file = tmp_path / "before.jsonl"
    file.write_text(text)
    result = runs([COSTS], "--compare", str(file))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


def test_other_mistakes_in_the_command_line(runs: Run, tmp_path: Path) -> None:
    assert "'nothing' is not one of 'log'" in runs([], "nothing").output
    result = runs([COSTS], "decide", "--compare", str(tmp_path / "nowhere"))
    assert result.exit_code == 2
    assert "No such file" in result.stderr
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    assert runs([COSTS], "decide", "--compare", str(tmp_path / "bytes")).exit_code == 2
    with pytest.raises(BadInput, match="compare"):
        compare.read(tmp_path)


def test_a_cluster_that_is_not_there_is_one_line() -> None:
    result = CliRunner().invoke(command.main, ["batch", "--quick", "--address", "127.0.0.1:1"])
    assert result.exit_code == 3
    assert result.stderr.startswith("benchmarks: error: no Ray cluster answers at '127.0.0.1:1'")
    assert "Traceback" not in result.output


# --- parts of the benchmarks


def test_what_is_not_installed_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slurm, "missing", lambda: ["slurmctld", "salloc"])
    assert list(slurm.run()) == []
    assert capsys.readouterr().err == (
        "slurm: not measured, slurm-wlm is not installed here (no slurmctld, salloc)\n"
    )
    from benchmarks import semaphore

    monkeypatch.setattr(semaphore.importlib.util, "find_spec", lambda name: None)
    assert list(semaphore.run()) == []
    assert capsys.readouterr().err.count("\n") == 1


def test_slurm_is_looked_for(tmp_path: Path) -> None:
    assert slurm.missing(str(tmp_path)) == list(slurm.PROGRAMS)
    for name in slurm.PROGRAMS:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert slurm.missing(str(tmp_path)) == []


def test_the_logs_of_a_restart_are_whole_and_as_large_as_asked(tmp_path: Path) -> None:
    """Both actors find what they would have written: all seats held, nothing left to tell, a snapshot and its tail."""
    restart.make(tmp_path, events=3000, held=100, tail=500)
    pool, coordinator = PoolState(), CoordinatorState()
    for state, name in ((pool, f"pool:{restart.NAME}"), (coordinator, "coordinator")):
        reader = open_reader(str(tmp_path), name)
        for row in reader.read(1):
            state.apply(ev.unpack(row.body), row.at)
        snapshot = reader.latest_snapshot()
        assert snapshot is not None
        if state is pool:
            assert state.seq - 600 <= snapshot.seq <= state.seq - 300
        reader.close()
    assert pool.seq >= 3000
    assert len(pool.attempts) == 100
    assert {attempt.state for attempt in pool.attempts.values()} == {"granted"}
    assert {r.told for r in coordinator.waiting_or_holding.values()} == {"placed"}
    assert len(coordinator.requests) < 2000


def test_what_logs_tell_of_kueues_jobs() -> None:
    told = kueue.Told()
    told.submitted, told.units = {"a": 0.0, "b": 1.0, "c": 5.0}, {"a": 1, "b": 5, "c": 1}
    told.granted, told.ended = {"a": 2.0, "b": 1.0, "c": 5.5}, {"a": 4.0, "b": 5.0, "c": 10.0}
    assert told.seconds() == 10.0
    assert told.use(10) == pytest.approx(100 * (2 + 20 + 4.5) / 100)
    assert told.waits() == {1: [2.0, 0.5], 5: [0.0]}


def test_a_job_of_kueues_ends_by_the_timer_or_when_it_is_stopped() -> None:
    timer, slot = kueue.Timer(), types.SimpleNamespace()
    later: Any = timer.start(slot, 1000.0)[0]  # type: ignore[arg-type]
    soon: Any = timer.start(slot, 0.0)[0]  # type: ignore[arg-type]
    soon.ended.result(30)
    assert not later.ended.done()
    later.cancel(), later.cancel()
    assert later.ended.done()


@pytest.mark.parametrize(
    ("busy", "words"),
    [
        ({"coordinator": 0.95, "pools": 0.4, "clients": 0.6}, "the coordinator, one process"),
        (
            {"coordinator": 0.6, "pools": 0.4, "clients": 0.9},
            "2 processors of this machine are busy, most of all",
        ),
        ({"coordinator": 0.3, "pools": 0.2, "clients": 0.1}, "nothing here is busy all the time"),
    ],
)
def test_where_a_plateau_comes_from(busy: dict[str, float], words: str) -> None:
    assert words in scale.reason(busy, 2)
