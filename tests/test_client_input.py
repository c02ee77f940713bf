"""What a client is given is checked before anything is sent (docs/rules.md section 2): one error, that names the
argument, its value and what would be right; and a missing cluster is said at once."""

from __future__ import annotations

import inspect
import socket
from dataclasses import fields
from typing import Any

import pytest
from conftest import BadInputReader
from fake_pools import FakePools

import ray_pools as pools
from ray_pools.client.submission import RequestArguments
from ray_pools.client.transport import connect_ray


@pytest.mark.parametrize(
    ("arguments", "field", "word"),
    [
        ({"requester": ""}, "requester", "name"),
        ({"requester": "x" * 10_000}, "requester", "name"),
        ({"requester": "a\x1b[31m"}, "requester", "name"),
        ({"requester": 3}, "requester", "name"),
        ({"gpus": -1}, "gpus", "integer"),
        ({"gpus": 1.5}, "gpus", "integer"),
        ({"gpus": True}, "gpus", "integer"),
        ({"cpus": "many"}, "cpus", "CPUs"),
        ({"cpus": float("nan")}, "cpus", "CPUs"),
        ({"memory": "16 bananas"}, "memory", "16GiB"),
        ({"pool_resources": {"licence": 0.5}}, "pool_resources.licence", "integer"),
        ({"pool_resources": ["licence"]}, "pool_resources", "mapping"),
        ({"preemptible": "no"}, "preemptible", "true or false"),
        ({"retries": -1}, "retries", "integer"),
        ({"lease_s": float("inf")}, "lease_s", "seconds"),
        ({"lease_s": -1}, "lease_s", "seconds"),
        ({"id": ""}, "id", "name"),
        ({"token": b"short"}, "token", "bytes"),
        ({"settings": {"gpu_count": 1}}, "settings", "ResourceSettings"),
        ({"settings": pools.ResourceSettings(1), "gpus": 1}, "gpus", "left out"),
        ({"strategy": "TIGHT"}, "strategy", "PACK"),
        ({"placement": "some"}, "placement", "none"),
        ({"bundles": []}, "bundles", "list"),
        ({"bundles": {"gpus": 1}}, "bundles", "list"),
        ({"bundles": [{"gpus": 1}, {"gpu": 1}]}, "bundles[1].gpu", "did you mean gpus"),
        ({"bundles": [{"gpus": 1}, {"gpus": -1}]}, "bundles[1].gpus", "integer"),
        ({"bundles": [{"gpus": 0}]}, "bundles[0]", "at least one"),
        ({"bundles": [3]}, "bundles[0]", "mapping"),
        ({"gpus": 3, "bundles": [{"gpus": 1}, {"gpus": 1}]}, "bundles", "3"),
    ],
)
def test_a_bad_argument_is_named(
    refuses: BadInputReader, arguments: dict[str, Any], field: str, word: str
) -> None:
    with refuses(field, word):
        pools.Submission(**{"requester": "vision", **arguments})


def test_what_a_submission_becomes() -> None:
    sent = pools.Submission(
        "vision", gpus=2, cpus=0.069, memory="16GiB", pool_resources={"licence": 1}
    ).operation("c1", b"secret")
    assert sent["amounts"] == {"gpu": 2, "licence": 1, "mcpu": 69, "memory_mb": 17180, "step_run": 1}
    assert (sent["preemptible"], sent["retries"], sent["lease_s"], sent["options"]) == (True, 0, 60.0, {})
    fixed = pools.Submission("vision", pools.ResourceSettings(1, preemptible=False), lease_s=0)
    assert (fixed.operation("c1", b"")["preemptible"], fixed.lease) == (False, 0.0)
    assert pools.Submission(
        "vision", pools.ResourceSettings(1, preemptible=False), preemptible=True
    ).operation("c1", b"")["preemptible"]


def test_a_gang_is_the_sum_of_its_bundles() -> None:
    gang = pools.Submission(
        "vision", bundles=[{"gpus": 2}, pools.ResourceSettings(1, cpu_count=4)], strategy="SPREAD"
    )
    assert gang.amounts == {"gpu": 3, "mcpu": 4000, "step_run": 1}
    assert gang.options == {"bundles": [{"gpu": 2}, {"gpu": 1, "mcpu": 4000}], "strategy": "SPREAD"}


def test_ids_and_secrets_are_made_anew_and_the_secret_is_not_shown() -> None:
    first, second = pools.Submission("vision"), pools.Submission("vision")
    assert first.request_id != second.request_id
    assert first.secret != second.secret
    assert "token" not in repr(first)


# --- addresses; none of these starts Ray or connects


@pytest.mark.parametrize("address", ["ray://host:10001", "local", "http://host:8265", "host", "host:port", 3])
def test_an_address_that_cannot_be_right(refuses: BadInputReader, address: Any) -> None:
    with refuses("address", "host:port"):
        connect_ray(address)


def test_ray_client_is_refused_with_what_to_do(
    refuses: BadInputReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://host:10001")
    with refuses("RAY_ADDRESS", "Ray Client", "ray job submit"):
        pools.connect()


def test_a_cluster_that_is_not_there_is_said_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets it, nobody answers
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(pools.Unreachable, match="no Ray cluster answers") as caught:
            pools.connect(address)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)


def test_a_namespace_that_cannot_be_one(refuses: BadInputReader) -> None:
    with refuses("namespace", "name"):
        pools.connect(namespace="")


# --- arguments by keyword: said in one place


def test_the_arguments_of_a_request_are_those_of_a_submission() -> None:
    named = [each.name for each in fields(pools.Submission) if each.name not in ("requester", "settings")]
    assert [*RequestArguments.__annotations__] == named


@pytest.mark.parametrize("call", [pools.Client.submit, pools.Client.slot])
def test_help_says_what_the_arguments_are(call: Any) -> None:
    shown = inspect.signature(call).parameters
    assert (shown["retries"].default, shown["gpus"].kind) == (0, inspect.Parameter.KEYWORD_ONLY)
    assert "arguments" not in shown
    said = inspect.getdoc(call)
    assert said is not None
    assert "lease_s: seconds within which" in said


def test_an_argument_that_there_is_not_is_named(refuses: BadInputReader) -> None:
    with FakePools().client() as client, refuses("gpu", "did you mean gpus"):
        client.submit("vision", gpu=1)  # type: ignore[call-arg]
