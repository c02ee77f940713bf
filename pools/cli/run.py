"""`pools run`: a command inside a slot."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from ray_pools.cli.command_options import place_options, request_options, runtime_env, seconds, submission
from ray_pools.cli.connection import GIVE_UP_S, cluster_options, connect, connect_ray, use_cluster
from ray_pools.cli.output import progress
from ray_pools.keys import key_in_file

if TYPE_CHECKING:
    from ray_pools.client.command import CommandRun


@click.command(context_settings={"allow_interspersed_args": False})
@request_options
@place_options
@click.option("--quiet", "-q", is_flag=True, help="No lines of its own on stderr, but for errors.")
@cluster_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(command: tuple[str, ...], address: str | None, namespace: str, quiet: bool, **given: Any) -> None:
    """Run COMMAND in a slot, and end with its exit code.

    It runs on the slot's node, in this folder if it is there, sees the slot's GPUs, and writes to this terminal; its
    standard input is empty. Called back, it gets SIGTERM, and SIGKILL at the end of the grace with all that it
    started; with retries left it queues and runs again. Where a pool only counts it runs on this machine.

    \b
    Exit codes: the command's (128 and the signal's number if one ended it; 126, 127
    if it can't be started); 1 no slot, or called back without retries left;
    2 wrong use; 3 the cluster can't be reached.
    """
    asked = submission(given)
    brought = runtime_env(given["working_dir"], given["runtime_env"], given["runtime_env_json"])
    timeout_s = None if given["timeout"] is None else seconds("--timeout", given["timeout"], 0.0)
    seconds("--stop-timeout", given["stop_timeout"], 0.0)
    key = None if given["key_file"] is None else key_in_file(given["key_file"], "--key-file")
    use_cluster(address, namespace)
    connect_ray(None, runtime_env=brought or None)
    from ray_pools.client.attempt import CommandSpec
    from ray_pools.client.command import DEFAULT_STOP_TIMEOUT_S, CommandRun
    from ray_pools.client.job import note_grant, of_this_job, stop_timeout_s

    stop_s = given["stop_timeout"]
    with connect(None, namespace, GIVE_UP_S, key) as client:
        cwd = None if of_this_job().get("working_dir") else os.getcwd()
        command_run = CommandRun(
            client,
            asked,
            CommandSpec(command, given["env"], cwd),
            say=_silent if quiet else _say,
            complain=_say,
            stop_timeout_s=stop_timeout_s(DEFAULT_STOP_TIMEOUT_S) if stop_s is None else stop_s,
            on_grant=note_grant,
        )
        _pass_on_signals(command_run)
        code = command_run.run(timeout_s)
    raise SystemExit(code)


def _say(text: str) -> None:
    progress(f"pools: {text}")


def _silent(text: str) -> None:
    """For --quiet."""


def _pass_on_signals(command_run: CommandRun) -> None:
    """In place of the handlers that end a command at once."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        command_run.interrupt(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, pass_on)
