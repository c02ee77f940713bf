"""The group `pools`: which commands there are, and how every error becomes one line and an exit code.

Exit codes: 0 done, 1 the answer is no, 2 wrong use, 3 the cluster can't be reached, 130 interrupted.
"""

from __future__ import annotations

import errno
import functools
import importlib
import re
from typing import Any

import click
from click.shell_completion import CompletionItem

from ray_pools import __version__
from ray_pools.cli.output import Failed, Interrupted
from ray_pools.errors import BadInput, PoolsError

COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("ray_pools.cli.lifecycle:up", "Bring the pools of a configuration up."),
    "down": ("ray_pools.cli.lifecycle:down", "Take the pools down; their logs stay."),
    "apply": ("ray_pools.cli.apply:apply", "Change running pools to what a configuration says."),
    "export": ("ray_pools.cli.apply:export", "Print the configuration that runs as a file."),
    "status": ("ray_pools.cli.status:status", "What is held, borrowed and waiting, per pool."),
    "submit": ("ray_pools.cli.requests:submit", "Ask for capacity."),
    "prewarm": ("ray_pools.cli.prewarm:prewarm", "Announce capacity ahead: its nodes come up now."),
    "would": ("ray_pools.cli.would:would", "What would become of a request, without submitting it."),
    "run": ("ray_pools.cli.run:run", "Run a command in a slot."),
    "job": ("ray_pools.cli.job:job", "Run a command in a slot, as a Ray job."),
    "release": ("ray_pools.cli.requests:release", "Give back what requests hold (as an operator)."),
    "cancel": ("ray_pools.cli.requests:cancel", "End requests in any state (as an operator)."),
    "requests": ("ray_pools.cli.requests:requests", "List requests."),
    "dashboard": (
        "ray_pools.cli.dashboard:dashboard",
        "Show the pools on a web page, now and at any moment.",
    ),
    "describe": ("ray_pools.cli.explaining:describe", "Show one pool, or one request, in full."),
    "why": ("ray_pools.cli.explaining:why", "Why a request waits, was rejected, or may be stopped."),
    "history": ("ray_pools.cli.history:history", "What was decided, newest first, and why."),
    "events": ("ray_pools.cli.events:events", "Preemptions, expiries, rejections as they come; webhooks."),
    "log": (
        "ray_pools.cli.log:log",
        "Read a log, live: lines, a request's story, a check, a state, an export.",
    ),
    "doctor": (
        "ray_pools.cli.maintenance:doctor",
        "Look at what the pools stand on: Ray, store, clocks, versions.",
    ),
    "backup": ("ray_pools.cli.maintenance:backup", "Copy all logs, while the pools run."),
    "restore": ("ray_pools.cli.maintenance:restore", "Put the logs of a backup into an empty store."),
    "pool": ("ray_pools.cli.pool:pool", "Pools: create, update, delete, list, describe, cordon ..."),
    "policy": ("ray_pools.cli.policy:policy", "Who may use which pool: attach, detach, list."),
    "upgrade": (
        "ray_pools.cli.maintenance:upgrade",
        "Go on with the code of this environment, from the same logs.",
    ),
    "key": ("ray_pools.cli.key:key", "Keys of requesters and operators: make, hash, reset."),
    "scenario": ("ray_pools.cli.scenario:scenario", "Play scenario files: unit tests for policies."),
    "replay": ("ray_pools.cli.replay:replay", "Play a job trace through live pools."),
    "simulate": (
        "ray_pools.cli.simulate:simulate",
        "Play a job trace through one or more configurations, in virtual time.",
    ),
    "advise": (
        "ray_pools.cli.advise:advise",
        "Advise shares for the teams of a trace; changes nothing.",
    ),
    "completion": ("ray_pools.cli.completion:completion", "Shell completion for bash, zsh or fish."),
    "demo": ("ray_pools.cli.demo:demo", "Queueing, borrowing, reclaim and scale-up, told live."),
}
"""Name to module:attribute and what `pools --help` says of it, so that help loads none of them."""


_NO_ARGUMENTS: tuple[type[click.UsageError], ...] = tuple(
    filter(None, [getattr(click.exceptions, "NoArgsIsHelpError", None)])
)
"""A group that is called without a command shows its help; older click has no error for it."""


def _wrong_use(problem: click.UsageError) -> Failed:
    """One line instead of click's four: what is wrong, and where the help is."""
    said = problem.format_message().strip().rstrip(".")
    said = f"{said[:1].lower()}{said[1:]}"
    where = f"`{problem.ctx.command_path} --help`" if problem.ctx is not None else "--help"
    return Failed(f"{' '.join(said.split())} (see {where})", problem.exit_code)


class _OneLineErrors(click.Command):
    """Turns what a command raises into one line and an exit code."""

    def make_context(self, *arguments: Any, **named: Any) -> click.Context:
        try:
            return super().make_context(*arguments, **named)
        except click.UsageError as problem:
            if isinstance(problem, _NO_ARGUMENTS):
                raise
            raise _wrong_use(problem) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as problem:
            if isinstance(problem, _NO_ARGUMENTS):
                raise
            raise _wrong_use(problem) from None
        except click.Abort as problem:  # at a question, whose line is not ended
            click.echo(err=True)
            if isinstance(problem.__context__, KeyboardInterrupt):
                raise Interrupted(problem.__context__) from None
            raise Failed(
                "nobody answered the question, so nothing has changed (--yes is the answer)", 1
            ) from None
        except (click.ClickException, click.exceptions.Exit):
            raise
        except PoolsError as problem:
            if ctx.params.get("debug"):
                raise
            raise Failed(str(problem), problem.exit_code) from None
        except KeyboardInterrupt as problem:
            raise Interrupted(problem) from None
        except Exception as problem:
            if ctx.params.get("debug") or (isinstance(problem, OSError) and problem.errno == errno.EPIPE):
                raise
            lines = str(problem).strip().splitlines()
            said = f"{type(problem).__name__}: {lines[0][:300]}" if lines else type(problem).__name__
            raise Failed(f"unexpected: {said} (please report this, with the output of --debug)", 1) from None


class OneLineCommand(_OneLineErrors, click.Command):
    """A command that is called by itself, without the group."""


def _in_words_of_options(command: click.Command) -> click.Command:
    """The command, whose errors name the options that were typed, not the arguments that these became."""
    for each in command.commands.values() if isinstance(command, click.Group) else ():
        _in_words_of_options(each)
    called = command.callback
    if isinstance(command, click.Group) or called is None or hasattr(called, "names_options"):
        return command
    options = {
        name: parameter.opts[0]
        for parameter in command.params
        if isinstance(parameter, click.Option) and parameter.name
        for name in (parameter.name, f"{parameter.name}_s")
    }

    @functools.wraps(called)
    def renamed(*arguments: Any, **named: Any) -> Any:
        try:
            return called(*arguments, **named)
        except BadInput as problem:
            # an amount of one of several policies is that of the one that was typed: `policies[5].reserved.gpu`
            field = re.sub(r"^policies\[\d+\]\.", "", problem.field)
            option = options.get(field.partition(".")[0])
            inside = "." in field and field == problem.field  # of a file, or of a value that has parts
            if option is None or inside or problem.where:
                raise
            typed = " ".join([option, *field.split(".")[1:]])
            raise BadInput(typed, problem.value, problem.expected) from None

    renamed.names_options = True  # type: ignore[attr-defined]
    command.callback = renamed
    return command


class LazyGroup(_OneLineErrors, click.Group):
    """Loads a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return _in_words_of_options(command)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names and help as above, so that a Tab loads no command."""
        found = [
            CompletionItem(name, help=text)
            for name, (_, text) in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return found + [
            item for item in click.Command.shell_complete(self, ctx, incomplete) if item not in found
        ]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, name="pools", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, envvar="RAY_POOLS_DEBUG", help="Show tracebacks and Ray's own output.")
@click.version_option(__version__, prog_name="pools")
def pools(debug: bool) -> None:
    """Shared, preemptible GPU pools for Ray: reserved shares, borrowing, reclaim.

    \b
    Exit codes: 0 done, 1 the answer is no, 2 wrong use,
    3 the cluster can't be reached, 130 interrupted.
    """
