"""What `pools run` and `pools job submit` have in common: the options of a request and of a command."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ray_pools.errors import BadInput
from ray_pools.limits import LEASE_MIN_S, check_seconds

if TYPE_CHECKING:
    from ray_pools.client import Submission

Command = TypeVar("Command", bound=Callable[..., Any])

_AMOUNTS = ("gpus", "cpus", "memory")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


def pool_resources(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, int]:
    """KEY=AMOUNT, several times."""
    option = param.opts[0]
    found: dict[str, int] = {}
    for text in given:
        key, equals, amount = text.partition("=")
        if not equals or not amount.strip().isdecimal():
            raise BadInput(option, text, "KEY=AMOUNT with a whole number, such as licence=2")
        if key in found:
            raise BadInput(option, text, f"{key} once")
        found[key] = int(amount)
    return found


def amounts_option(name: str, help: str) -> Callable[[Command], Command]:
    """An option KEY=N that may be given several times."""
    return click.option(name, metavar="KEY=N", multiple=True, callback=pool_resources, help=help)


def _bundles(
    ctx: click.Context, param: click.Parameter, given: tuple[str, ...]
) -> list[dict[str, Any]] | None:
    """gpus=2,cpus=4,memory=8GiB; any other key is a pool's resource."""
    return [_bundle(text) for text in given] or None


def _bundle(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, _, amount = (each.strip() for each in part.partition("="))
        whole = amount.isdecimal()
        if not key or not amount:
            raise BadInput("--bundle", text, "KEY=AMOUNT, such as gpus=2,cpus=4,memory=8GiB")
        if not whole and key not in ("cpus", "memory"):
            expected = "a whole number, 0 or more, such as --bundle gpus=2,cpus=4"
            raise BadInput(f"--bundle {key:.40}", amount, expected)
        if key in found or key in found.get("pool_resources", {}):
            raise BadInput("--bundle", text, f"{key} once")
        if key in _AMOUNTS:
            found[key] = int(amount) if whole else amount
        else:
            found.setdefault("pool_resources", {})[key] = int(amount)
    return found


def _environment(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """NAME=VALUE, or NAME for the value that it has here."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not _ENV_NAME.fullmatch(name):
            raise BadInput(
                "--env",
                text,
                "NAME=VALUE, or NAME of a variable that is set here; a name has letters, digits and _ . -, and does"
                " not begin with a digit",
            )
        if not equals:
            if name not in os.environ:
                raise BadInput("--env", text, "a variable that is set here, or NAME=VALUE")
            value = os.environ[name]
        if name.startswith("RAY_POOLS_"):
            raise BadInput("--env", text, "another name: RAY_POOLS_* tell the command its slot")
        found[name] = value
    return found


def amount_options(command: Command) -> Command:
    """How much, and whether it may be stopped."""
    for option in reversed(
        (
            click.option("--gpus", "-g", type=int, help="How many GPUs."),
            click.option("--cpus", metavar="N", help="How many CPUs; fractions are allowed."),
            click.option("--memory", metavar="SIZE", help="Memory, such as 16GiB."),
            amounts_option("--resource", "Another resource; may be given several times."),
            click.option("--non-preemptible", is_flag=True, help="Never to be stopped for others."),
        )
    ):
        command = option(command)
    return command


def request_options(command: Command) -> Command:
    """Whom it is for and how much: the request."""
    for option in reversed(
        (
            click.option(
                "--requester", "-r", required=True, help="Who asks: a name with a policy in some pool."
            ),
            amount_options,
            click.option(
                "--bundle",
                "bundles",
                metavar="KEY=N,...",
                multiple=True,
                callback=_bundles,
                help="A part of a gang, such as gpus=4,cpus=8; the command runs in the first.",
            ),
            click.option(
                "--strategy",
                type=click.Choice(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]),
                help="How bundles lie on nodes.",
            ),
            click.option(
                "--retries",
                type=int,
                default=0,
                show_default=True,
                help="Run again after so many preemptions.",
            ),
            click.option(
                "--key-file",
                metavar="FILE",
                help="The requester's key, where it is protected by one; a job reads the file where its driver runs.",
            ),
            click.option(
                "--id",
                "request_id",
                help="The request's id: for one use, no request may have had it before. Made when left out.",
            ),
            click.option(
                "--lease",
                metavar="SECONDS",
                type=float,
                help=f"When a slot whose holder hangs is taken back: {LEASE_MIN_S} s or more; 0: never, it is held"
                " until it is given back or cancelled. Default: the configuration's (60).",
            ),
            click.option(
                "--placement", type=click.Choice(["none"]), help="none: only count it; the command runs here."
            ),
            click.option(
                "--timeout", metavar="SECONDS", type=float, help="How long to wait for the first slot."
            ),
        )
    ):
        command = option(command)
    return command


def place_options(command: Command) -> Command:
    """Where the command runs, and with what environment."""
    for option in reversed(
        (
            click.option(
                "--working-dir",
                metavar="DIR",
                help="A folder (or a URI that Ray knows) to run in: Ray brings it.",
            ),
            click.option(
                "--env",
                metavar="NAME[=VALUE]",
                multiple=True,
                callback=_environment,
                help="For the command; without VALUE the one that it has here.",
            ),
            click.option("--runtime-env", metavar="FILE", help="Ray's runtime environment, as YAML or JSON."),
            click.option("--runtime-env-json", metavar="JSON", help="The same, in the command line."),
            click.option(
                "--stop-timeout",
                metavar="SECONDS",
                type=float,
                help="After Ctrl-C or SIGTERM: from SIGTERM to SIGKILL. Default: 10.",
            ),
        )
    ):
        command = option(command)
    return command


def runtime_env(working_dir: str | None, path: str | None, text: str | None) -> dict[str, Any]:
    """Ray's runtime environment from the three options for it. BadInput for what can't be one."""
    if path is not None and text is not None:
        raise click.UsageError("--runtime-env and --runtime-env-json exclude each other")
    found: Any = {}
    if path is not None:
        import yaml

        try:
            found = yaml.safe_load(Path(path).read_text())
        except (OSError, ValueError, yaml.YAMLError) as problem:
            raise BadInput(
                "--runtime-env", path, f"a YAML or JSON file: {str(problem).splitlines()[0]}"
            ) from None
    if text is not None:
        try:
            found = json.loads(text)
        except ValueError as problem:
            raise BadInput("--runtime-env-json", text, f"JSON: {problem}") from None
    if not isinstance(found, dict):
        field = "--runtime-env" if path is not None else "--runtime-env-json"
        raise BadInput(field, found, "an object, such as {pip: [numpy]}")
    if working_dir is not None:
        if "working_dir" in found:
            raise BadInput("--working-dir", working_dir, "given once: the runtime environment has one")
        if "://" not in working_dir and not Path(working_dir).is_dir():
            raise BadInput("--working-dir", working_dir, "a folder that is there, or a URI")
        found["working_dir"] = working_dir
    return found


def seconds(name: str, value: float | None, default: float) -> float:
    """A time of the command line. BadInput for what can't be one, which is to be said before anything is submitted."""
    return default if value is None else check_seconds(name, value)


def submission(given: Mapping[str, Any]) -> Submission:
    """The request that `request_options` describe. BadInput for what can't be right."""
    from ray_pools.client import Submission

    return Submission(
        given["requester"],
        gpus=given["gpus"],
        cpus=given["cpus"],
        memory=given["memory"],
        pool_resources=given["resource"] or None,
        preemptible=not given["non_preemptible"],
        retries=given["retries"],
        lease_s=given["lease"],
        bundles=given["bundles"],
        strategy=given["strategy"],
        placement=given["placement"],
        id=given["request_id"],
    )
