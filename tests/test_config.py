"""Section 9 of docs/rules.md and the configuration file: every rule refuses, by file, line, key path and value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import BadInputReader

from ray_pools.config import Config, load_config, pool_options
from ray_pools.core.config_rules import PolicyConfig, PoolConfig, check_config, path_text

GOOD = """\
namespace: team-pools
pools:
  spot:
    capacity: {gpu: 8, licence: 2, step_run: null}
    queueing: strict
    grace: 5
    placement: {labels: {market: spot}, node: {gpu: 4}, resources: {licence: [lic, 2], mcpu: none}}
  counted:
    capacity: {gpu: 4}
    placement: none
policies:
  - {pool: spot, requester: prod, priority: 10, reserved: {gpu: 6}, limit: {gpu: 7}}
  - {pool: spot, requester: batch, reserved: {gpu: 2}}
"""

Loads = Callable[[str], Config]


@pytest.fixture
def load(tmp_path: Path) -> Loads:
    def loader(text: str) -> Config:
        (tmp_path / "demo.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
        return load_config(tmp_path / "demo.yaml", {})

    return loader


def test_a_configuration_becomes_what_the_core_holds(load: Loads) -> None:
    config = load(GOOD)
    assert config.namespace == "team-pools"
    pools = config.core_pools()
    assert list(pools) == ["spot", "counted"]
    spot = pools["spot"]
    assert (spot.capacity, spot.queueing, spot.grace_s) == ({"gpu": 8, "licence": 2}, "strict", 5.0)
    assert (spot.starvation_after_s, spot.min_runtime_s) == (300.0, 0.0)
    assert spot.placement == {
        "resources": {"gpu": ["GPU", 1], "memory_mb": ["memory", 0.000001], "licence": ["lic", 2]},
        "labels": {"market": "spot"},
        "node": {"gpu": 4},
        "strategy": "PACK",
        "provision_timeout_s": 900.0,
        "warm": {},
    }
    assert pools["counted"].placement is None
    assert config.core_policies() == [
        PolicyConfig("spot", "prod", 10, {"gpu": 6}, {"gpu": 7}),
        PolicyConfig("spot", "batch", 0, {"gpu": 2}, {}),
    ]
    assert check_config(pools, config.core_policies()) == []


# what of GOOD to replace, by what, then the field, a word of what would be right, and the line
_BAD: list[tuple[str, str, str, str, int]] = [
    ("capacity: {gpu: 4}", "capcity: {gpu: 4}", "pools.counted.capcity", "did you mean capacity?", 9),
    ("grace: 5", "grase: 5", "pools.spot.grase", "unknown key", 6),
    ("grace: 5", "grace: 5\n    grace_s: 5", "pools.spot.grace_s", "one of", 7),
    ("grace: 5", "grace: 5\n    grace: 6", "pools.spot (a key)", "line 6 already", 7),
    ("grace: 5", "grace: -5", "pools.spot.grace_s", "seconds", 6),
    ("grace: 5", "grace: .nan", "pools.spot.grace_s", "seconds", 6),
    ("grace: 5", "min_runtime_s: .inf", "pools.spot.min_runtime_s", "seconds", 6),
    ("grace: 5", "starvation_after: true", "pools.spot.starvation_after_s", "a number", 6),
    ("grace: 5", "grace: 1e3", "pools.spot.grace_s", "a number, which YAML reads as one only as 1000.0", 6),
    ("grace: 5", "grace: 1e30", "pools.spot.grace_s", "a number, which YAML reads as one only as 1.0e+30", 6),
    ("grace: 5", "grace: 1.0e+30", "pools.spot.grace_s", "seconds, a number from 0 to 315360000", 6),
    ("grace: 5", "grace: soon", "pools.spot.grace_s", "a number", 6),
    ("strict", "fifo", "pools.spot.queueing", "backfill or strict", 5),
    ("gpu: 8", "gpu: -8", "pools.spot.capacity.gpu", "integer from 0", 4),
    ("gpu: 8", "gpu: 8.0", "pools.spot.capacity.gpu", "an integer", 4),
    ("gpu: 8", "gpu: true", "pools.spot.capacity.gpu", "an integer", 4),
    ("gpu: 8", '"": 1', "pools.spot.capacity", "printable", 4),
    ("gpu: 8", "7: 1", "pools.spot.capacity (a key)", "quotes", 4),
    ("  counted:", '  "":', "pools.''.name", "printable", 8),
    ("  counted:", f'  "{"x" * 10_000}":', f"pools.{'x' * 60}....name", "printable", 8),
    ("  counted:", '  "a\\x07b":', r"pools.'a\x07b'.name", "printable", 8),
    ("  counted:", "  spot:", "pools (a key)", "line 3 already", 8),
    ("placement: none", "placement: nope", "pools.counted.placement", "a mapping", 10),
    (
        "node: {gpu: 4}",
        "node: {tpu: 4}",
        "pools.spot.placement.node.tpu",
        "a key of the pool: gpu, licence",
        7,
    ),
    ("node: {gpu: 4}", "node: {gpu: 0}", "pools.spot.placement.node.gpu", "integer from 1", 7),
    ("node: {gpu: 4}", "warm: {gpu: 9}", "pools.spot.placement.warm.gpu", "capacity 8", 7),
    ("node: {gpu: 4}", "strategy: TIGHT", "pools.spot.placement.strategy", "STRICT_PACK", 7),
    ("node: {gpu: 4}", "nodes: {gpu: 4}", "pools.spot.placement.nodes", "did you mean node?", 7),
    ("[lic, 2]", "[lic, 0]", "pools.spot.placement.resources.licence", "divisor", 7),
    ("[lic, 2]", "[lic, 1, 2]", "pools.spot.placement.resources.licence", "divisor", 7),
    ("market: spot", "market: 1", "pools.spot.placement.labels.market", "text", 7),
    ("reserved: {gpu: 2}", "reserved: {gpu: 9}", "policies[1].reserved.gpu", "capacity 8", 13),
    ("reserved: {gpu: 2}", "reserved: {gpu: 3}", "policies[1].reserved.gpu", "at most 2, since", 13),
    ("reserved: {gpu: 2}", "reserved: {tpu: 2}", "policies[1].reserved.tpu", "a key of pool spot", 13),
    (
        "reserved: {gpu: 2}",
        "reserved: {step_run: 2}",
        "policies[1].reserved.step_run",
        "a key of pool spot",
        13,
    ),
    ("limit: {gpu: 7}", "limit: {gpu: 5}", "policies[0].reserved.gpu", "limit 5", 12),
    ("limit: {gpu: 7}", "limit: {tpu: 7}", "policies[0].limit.tpu", "a key of pool spot", 12),
    ("requester: batch", "requester: prod", "policies[1].requester", "one policy per requester", 13),
    ("requester: batch", "requester: ''", "policies[1].requester", "printable", 13),
    ("requester: batch", "requester: 17", "policies[1].requester", "text", 13),
    ("requester: batch, ", "", "policies[1].requester", "needed", 13),
    ("pool: spot, requester: batch", "pool: spt, requester: batch", "policies[1].pool", "counted, spot", 13),
    ("priority: 10", "priority: 1.5", "policies[0].priority", "an integer", 12),
    ("priority: 10", "priority: 4294967296", "policies[0].priority", "integer from", 12),
    ("priority: 10", "prio: 10", "policies[0].prio", "unknown key", 12),
    ("policies:", "policy:", "policy", "did you mean policies?", 11),
    ("namespace: team-pools", "namespace: ''", "namespace", "printable", 1),
    ("namespace: team-pools", "lease: {default_s: 10, renew_s: 9}", "lease.renew_s", "at most half", 1),
    ("namespace: team-pools", "prewarm: {period_s: 0}", "prewarm.period_s", "more than 0", 1),
    ("namespace: team-pools", "store: ftp://host/x", "store", "schemes: sqlite", 1),
    ("namespace: team-pools", "store: sqlite://x/y", "store", "from the root on", 1),
    ("namespace: team-pools", "\tnamespace: x", "CONFIG", "valid YAML", 1),
    ("namespace: team-pools", "namespace: 'x", "CONFIG", "valid YAML", 14),
    ("namespace: team-pools", "namespace: \x01", "CONFIG", "U+0001", 1),
    ("namespace: team-pools", "namespace: &a [*a]", "file", "no loops", 1),
    ("namespace: team-pools", "namespace: !!python/name:os.system x", "CONFIG", "valid YAML", 1),
    ("namespace: team-pools", "namespace: " + "[" * 200 + "]" * 200, "CONFIG", "levels of nesting", 1),
    (GOOD, "- pools\n", "CONFIG", "a mapping", 1),
]


@pytest.mark.parametrize(("old", "new", "field", "word", "line"), _BAD, ids=range(len(_BAD)))
def test_what_is_wrong_is_told_with_its_place(
    load: Loads, old: str, new: str, field: str, word: str, line: int, refuses: BadInputReader
) -> None:
    assert GOOD.count(old) >= 1
    with refuses(field, word, where=f"demo.yaml:{line}"):
        load(GOOD.replace(old, new, 1))


def test_files_that_are_no_configuration(load: Loads, tmp_path: Path, refuses: BadInputReader) -> None:
    with refuses("CONFIG", "a mapping"):
        load("")
    with refuses("pools", "needed"):
        load("namespace: x\n")
    with refuses("CONFIG", "No such file"):
        load_config(tmp_path / "none.yaml")
    with refuses("CONFIG", "directory"):
        load_config(tmp_path)
    with refuses("CONFIG", "levels of nesting"):
        load("x: " + "[" * 100_000)
    (tmp_path / "bytes.yaml").write_bytes(b"pools: {}\nx: \xff\n")
    with refuses("CONFIG", "UTF-8", where="bytes.yaml:2"):
        load_config(tmp_path / "bytes.yaml")
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
    with refuses("file", "values"):
        load(bomb)


def test_the_store_comes_from_the_file_then_the_environment_then_the_state_folder(tmp_path: Path) -> None:
    file = tmp_path / "demo.yaml"
    env = {"RAY_POOLS_STORE": "redis://host:6379/0", "XDG_STATE_HOME": "/state"}
    file.write_text("store: logs/here\npools: {}\n")
    assert load_config(file, env).store == f"sqlite://{tmp_path}/logs/here"
    file.write_text("store: sqlite:///var/lib/pools\npools: {}\n")
    assert load_config(file, env).store == "sqlite:///var/lib/pools"
    for slashes in ("sqlite:////var/lib/pools", "//var/lib/pools"):
        file.write_text(f"store: {slashes}\npools: {{}}\n")
        assert load_config(file, env).store == "sqlite:///var/lib/pools"
    file.write_text("namespace: a/b\npools: {}\n")
    assert load_config(file, env).store == "redis://host:6379/0"
    del env["RAY_POOLS_STORE"]
    assert load_config(file, env).store == "sqlite:///state/ray-pools/a%2Fb"


def test_pool_options_take_both_spellings(refuses: BadInputReader) -> None:
    assert pool_options({"grace": 1, "min_runtime_s": 2}) == {"grace_s": 1, "min_runtime_s": 2}
    with refuses("pool.grase_s", "did you mean grace_s?"):
        pool_options({"grase_s": 1})
    with refuses("pool", "a mapping"):
        pool_options(None)


def test_the_rules_take_any_values_and_raise_nothing() -> None:
    odd: list[Any] = [
        None,
        True,
        -1,
        1.5,
        "",
        "x" * 10**5,
        [],
        {},
        {"": 1},
        {1: 1},
        {"gpu": None},
        float("nan"),
        b"x",
    ]
    for value in odd:
        for field in PoolConfig._fields:
            pool = PoolConfig("p", {"gpu": 1})._replace(**{field: value})
            policies = [PolicyConfig("p", "a", 0, {"gpu": 1}, {"gpu": 1})]
            for problem in check_config({"p": pool}, policies):
                assert len(str(problem.error())) < 1000
        for field in PolicyConfig._fields:
            policy = PolicyConfig("p", "a")._replace(**{field: value})
            fine = (field, value) in [("reserved", {}), ("limit", {}), ("priority", -1)]
            assert bool(check_config({"p": PoolConfig("p", {"gpu": 1})}, [policy])) is not fine, (
                field,
                value,
            )
    for placement in odd[1:]:
        pool = PoolConfig(
            "p", {"gpu": 1}, placement={"resources": placement, "labels": placement, "warm": placement}
        )
        assert bool(check_config({"p": pool}, [])) is not (placement == {})


def test_the_wire_form_is_plain_and_ordered(refuses: BadInputReader) -> None:
    one = PoolConfig("p", {"b": 1, "a": 2}, grace_s=3, placement={"warm": {"b": 1, "a": 1}, "labels": {}})
    two = PoolConfig("p", {"a": 2, "b": 1}, grace_s=3.0, placement={"labels": {}, "warm": {"a": 1, "b": 1}})
    assert repr(one.to_wire()) == repr(two.to_wire())  # the same content packs to the same bytes
    assert PoolConfig.from_wire(one.to_wire()) == two
    policy = PolicyConfig("p", "a", 3, {"b": 1, "a": 1}, {"b": 2})
    assert PolicyConfig.from_wire(policy.to_wire()) == policy
    assert list(policy.to_wire()["reserved"]) == ["a", "b"]
    with refuses("policy.requester", "needed"):
        PolicyConfig.from_wire({"pool": "p"})
    with refuses("policy.prio", "priority"):
        PolicyConfig.from_wire({"pool": "p", "requester": "a", "prio": 1})
    with refuses("pool", "a mapping"):
        PoolConfig.from_wire([])


def test_a_key_path_reads_as_in_the_file() -> None:
    assert path_text(("policies", 3, "reserved", "gpu")) == "policies[3].reserved.gpu"
    assert path_text(("pools", "a\nb")) == r"pools.'a\nb'"
