"""`pools job submit`: a command inside a slot, as a Ray job. `ray job list|status|logs|stop` do the rest."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

from ray_pools.cli.command_options import place_options, request_options, runtime_env, seconds, submission
from ray_pools.cli.connection import cluster_options, keep_job_client_quiet, keep_ray_quiet, use_cluster
from ray_pools.cli.output import progress
from ray_pools.errors import BadInput
from ray_pools.limits import check_name

_FLAGS = {
    "requester": "--requester",
    "gpus": "--gpus",
    "cpus": "--cpus",
    "memory": "--memory",
    "strategy": "--strategy",
    "retries": "--retries",
    "lease": "--lease",
    "placement": "--placement",
    "timeout": "--timeout",
    "stop_timeout": "--stop-timeout",
    "key_file": "--key-file",
}

_OTHER_PYTHON = ("conda", "pip", "uv", "image_uri", "container", "py_executable")
"""With one of these in its runtime environment a job has a `python` of its own."""


@click.group()
def job() -> None:
    """Run commands in slots, as Ray jobs. `ray job list|status|logs|stop` look after them."""


def _metadata(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    from ray_pools.client.job import PREFIX

    found = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals or key.startswith(PREFIX):
            raise BadInput("--metadata", text, f"KEY=VALUE, with a key that does not start with {PREFIX}")
        found[key] = value
    return found


@job.command(context_settings={"allow_interspersed_args": False})
@request_options
@place_options
@click.option("--submission-id", metavar="ID", help="The job's id; made when left out.")
@click.option(
    "--metadata", metavar="KEY=VALUE", multiple=True, callback=_metadata, help="Shown by `ray job list`."
)
@click.option(
    "--wait/--no-wait", default=True, show_default=True, help="Show the job's logs until it has ended."
)
@cluster_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def submit(
    command: tuple[str, ...],
    submission_id: str | None,
    metadata: dict[str, str],
    wait: bool,
    address: str | None,
    namespace: str,
    **given: Any,
) -> None:
    """Submit a Ray job that runs COMMAND in a slot, as `pools run` does.

    The job is there at once and waits in the pools' queue, so `ray job stop` ends it in every state; whatever ends it
    gives the slot back. Its metadata name the request and the pool, its logs have the command's output. --env and
    --working-dir become its runtime environment. Nobody need wait for it: Ctrl-C here leaves it running.

    \b
    Exit codes: with --wait those of the job: the command's as of `pools run`, 1 if it was
    stopped; with --no-wait 0 once it is submitted; 2 wrong use; 3 the cluster can't be
    reached.
    """
    from ray_pools.client.job import JobRequest, follow, new_submission_id, submit_job

    submission(given)  # what can't be right is said here, not in the job's logs
    brought = runtime_env(given["working_dir"], given["runtime_env"], given["runtime_env_json"])
    if given["env"]:
        brought["env_vars"] = {**brought.get("env_vars", {}), **given["env"]}
    for name in ("timeout", "stop_timeout"):
        seconds(f"--{name.replace('_', '-')}", given[name], 0.0)
    job_id = new_submission_id() if submission_id is None else _job_id(submission_id)
    request_id = given["request_id"] or job_id
    entrypoint = _entrypoint({**given, "request_id": request_id}, namespace, command, brought)
    _prefer_the_option()
    use_cluster(address, namespace)
    keep_ray_quiet()
    with submit_job(
        JobRequest(job_id, request_id, given["requester"], namespace, entrypoint, brought, metadata)
    ) as client:
        keep_job_client_quiet()
        click.echo(job_id)
        if not wait:
            return
        progress(f"pools: its output follows; Ctrl-C leaves it running, `ray job stop {job_id}` ends it")
        code = follow(client, job_id, sys.stdout)
    raise SystemExit(code)


def _prefer_the_option() -> None:
    """Ray takes this variable before everything else, but an --address that was typed is what is meant."""
    from ray_pools.client.job import API_SERVER_ADDRESS

    if click.get_current_context().get_parameter_source("address") is ParameterSource.COMMANDLINE:
        os.environ.pop(API_SERVER_ADDRESS, None)


def _job_id(given: str) -> str:
    """It becomes a part of an address at Ray's dashboard, which does not quote it."""
    if any(char in "/\\?#%" for char in given):
        raise BadInput(
            "--submission-id", given, "an id without any of / \\ ? # %, which Ray can't find again"
        )
    return check_name("--submission-id", given)


def _entrypoint(
    given: Mapping[str, Any], namespace: str, command: tuple[str, ...], brought: Mapping[str, Any]
) -> str:
    """`pools run` with the same options, by a Python that has Ray and these pools: this one's path if it is there,
    too, else, and where the job brings its own, the first in PATH.
    """
    arguments = ["-m", "ray_pools.cli", "run", "--namespace", namespace, "--id", given["request_id"]]
    for name, flag in _FLAGS.items():
        if given[name] is not None:
            arguments += [flag, str(given[name])]
    arguments += ["--non-preemptible"] if given["non_preemptible"] else []
    for key, amount in given["resource"].items():
        arguments += ["--resource", f"{key}={amount}"]
    for bundle in given["bundles"] or ():
        parts = {**bundle, **bundle.get("pool_resources", {})}
        parts.pop("pool_resources", None)
        arguments += ["--bundle", ",".join(f"{key}={amount}" for key, amount in parts.items())]
    said = shlex.join([*arguments, "--", *command])
    if any(key in brought for key in _OTHER_PYTHON):
        return f"exec python {said}"
    own = shlex.quote(os.path.abspath(sys.executable))
    return f"P={own}; [ -x $P ] || P=python; exec $P {said}"
