"""`pools log`: what an actor wrote down, live or after it is gone; a request's story; a check; a state; an export."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ray_pools.cli.connection import cluster_options, json_option
from ray_pools.cli.output import (
    amounts_text,
    asked_amounts,
    print_json,
    print_table,
    progress,
)
from ray_pools.cli.store_place import check_there_are_logs, config_option, find_store, store_option
from ray_pools.counting import counted
from ray_pools.errors import BadInput

if TYPE_CHECKING:
    from ray_pools.log_view import Line
    from ray_pools.store import Reader

FOLLOW_EVERY_S = 0.3


@click.command("log")
@click.argument("name", metavar="POOL|coordinator", required=False)
@store_option
@config_option
@click.option("--from", "from_seq", metavar="SEQ", type=click.IntRange(min=1), help="From this row on.")
@click.option("--limit", metavar="N", type=click.IntRange(min=1), help="At most so many lines, the oldest.")
@click.option("--tail", metavar="N", type=click.IntRange(min=1), help="At most so many lines, the newest.")
@click.option(
    "--request", metavar="ID", help="This request's whole story, over the coordinator and all pools."
)
@click.option(
    "--verify", is_flag=True, help="Chain, replay and invariants; exit code 1 if anything is wrong."
)
@click.option("--at", "moment", metavar="SEQ|TIME", help="The state then: a row, a time, or @SECONDS.")
@click.option("--export", "export_to", metavar="FILE", type=click.Path(), help="The whole log as JSON lines.")
@click.option("--follow", is_flag=True, help="Go on with what is logged from now on, until Ctrl-C.")
@cluster_options
@json_option
def log(
    name: str | None,
    store: str | None,
    config: str | None,
    from_seq: int | None,
    limit: int | None,
    tail: int | None,
    request: str | None,
    verify: bool,
    moment: str | None,
    export_to: str | None,
    follow: bool,
    address: str | None,
    namespace: str,
    as_json: bool,
) -> None:
    """Read the log of a pool, or of the coordinator: also while they run, and after they are gone.

    The store is --store, or that of a configuration file, else the one that the running coordinator uses, else the
    namespace's default.
    """
    from ray_pools.log_view import log_name

    chosen = [
        flag
        for flag, given in (
            ("--request", request is not None),
            ("--verify", verify),
            ("--at", moment is not None),
            ("--export", export_to is not None),
            ("--follow", follow),
        )
        if given
    ]
    if len(chosen) > 1:
        raise click.UsageError(f"{chosen[0]} and {chosen[1]} don't go together")
    if name is None and request is None:
        raise click.UsageError("whose log? name a pool, or `coordinator`")
    if tail is not None:
        others = (("--limit", limit), ("--from", from_seq), ("--at", moment), ("--export", export_to))
        for flag, given in (*others, ("--verify", verify or None)):
            if given is not None:
                raise click.UsageError(f"--tail and {flag} don't go together")
    place = find_store(store, config, address, namespace)
    check_there_are_logs(place, store, config)
    if request is not None:
        _tell(place, request, limit, tail, as_json)
        return
    which = log_name(str(name))
    reader = _reader(place, which)
    try:
        if tail is not None and reader.head()[1]:
            from_seq = max(reader.head()[1] - tail + 1, reader.first_seq())
        if verify:
            _verify(place, which, as_json)
        elif moment is not None:
            _show_state(reader, which, moment, as_json)
        elif export_to is not None:
            _export(reader, which, export_to, as_json)
        elif follow:
            _follow(reader, which, from_seq, limit, as_json)
        else:
            _show(reader, which, from_seq, limit, as_json)
    finally:
        reader.close()


def _reader(place: str, which: str) -> Reader:
    from ray_pools.log_view import pools_in
    from ray_pools.store import NoLog, open_reader

    try:
        return open_reader(place, which)
    except NoLog:
        known = ["coordinator", *pools_in(place)]
        raise BadInput("POOL", which.removeprefix("pool:"), f"one of {', '.join(known)} ({place})") from None


def _checked(reader: Reader, from_seq: int | None) -> int | None:
    if from_seq is not None and from_seq > reader.head()[1]:
        raise BadInput("--from", from_seq, f"a row of this log, whose last one is {reader.head()[1]}")
    return from_seq


def _show(reader: Reader, which: str, from_seq: int | None, limit: int | None, as_json: bool) -> None:
    from ray_pools.log_view import lines

    found = itertools.islice(lines(reader, which, _checked(reader, from_seq)), limit)
    if as_json:
        print_json([line.plain() for line in found])
    else:
        for line in found:
            click.echo(_text(line))


def _text(line: Line) -> str:
    from ray_pools.log_view import time_text
    from ray_pools.log_words import words

    request = f" {line.request}:" if line.request else ""
    return f"{line.seq:>7}  {time_text(line.at)}  {line.name:<10}{request} {words(line.event)}"


def _follow(reader: Reader, which: str, from_seq: int | None, limit: int | None, as_json: bool) -> None:
    """One line per event, JSON or not, as it comes. Starts with what is new, unless --from says where."""
    from ray_pools.log_view import lines

    next_seq = _checked(reader, from_seq) or reader.head()[1] + 1
    left = limit
    while left is None or left > 0:
        for line in lines(reader, which, next_seq):
            click.echo(json.dumps(line.plain(), ensure_ascii=False) if as_json else _text(line))
            next_seq = line.seq + 1
            if left is not None:
                left -= 1
                if left == 0:
                    return
        time.sleep(FOLLOW_EVERY_S)


def _tell(place: str, request: str, limit: int | None, tail: int | None, as_json: bool) -> None:
    from ray_pools.log_tale import tale

    told = tale(place, request)[:limit]
    if tail is not None:
        told = told[-tail:]
    if as_json:
        print_json([line.plain() for line in told])
    else:
        for line in told:
            click.echo(str(line))


def _verify(place: str, which: str, as_json: bool) -> None:
    """Of a pool: its log with the coordinator's. Of the coordinator: all logs together."""
    from ray_pools.log_backup import memory_problems
    from ray_pools.log_check import check_logs
    from ray_pools.log_view import pools_in

    pools = pools_in(place)
    asked = pools if which == "coordinator" else [which.removeprefix("pool:")]
    report = check_logs(place, asked)
    problems = [str(problem) for problem in report.problems]
    if report.ok:  # else it says less of the same
        problems += memory_problems(place, asked)
    if as_json:
        print_json(
            {"ok": not problems, "problems": problems, "events": report.events, "digests": report.digests}
        )
    else:
        for problem in problems:
            click.echo(problem)
        click.echo(f"log check: {counted(len(problems), 'problem')}" if problems else report.text())
    if problems:
        click.get_current_context().exit(1)


def _export(reader: Reader, which: str, to: str, as_json: bool) -> None:
    from ray_pools.log_view import export

    draft = f"{to}.new-{os.getpid()}"
    try:
        try:
            with open(draft, "x", encoding="utf-8") as out:
                end = export(reader, which, out)
                out.flush()
                os.fsync(out.fileno())
            os.replace(draft, to)
        finally:
            if os.path.exists(draft):
                os.unlink(draft)
    except OSError as problem:
        raise BadInput("--export", to, f"a file that can be written: {problem.strerror}") from None
    if as_json:
        print_json({"file": str(Path(to).absolute()), **end})
    else:
        progress(
            f"{counted(end['end'], 'row')} of {which} up to {end['last_seq']} are in {to} (state {end['digest']})"
        )


# --- the state at some row


def _show_state(reader: Reader, which: str, said: str, as_json: bool) -> None:
    from ray_pools.log_view import parse_moment, state_at, time_text

    state = state_at(reader, which, parse_moment(said))
    if as_json:
        print_json(state)
        return
    click.echo(f"{which} after row {state['seq']}, {time_text(state['at'])} (state {state['digest']})")
    if which == "coordinator":
        _show_coordinator(state)
    else:
        _show_pool(state)


def _show_pool(state: dict[str, Any]) -> None:
    print_table(
        ("key", "#capacity", "#held", "#booked"),
        [
            (key, n, state["held"].get(key, 0), state["booked"].get(key, 0))
            for key, n in state["capacity"].items()
        ],
    )
    if state["grants"]:
        print_table(
            ("grant", "requester", "state", "holds"),
            [
                (g["id"], g["requester"], _grant_state(g), amounts_text(asked_amounts(g["amounts"])))
                for g in state["grants"]
            ],
        )
    if state["queue"]:
        print_table(
            ("waits", "requester", "asks for", "cause"),
            [
                (
                    q["id"],
                    q["requester"],
                    amounts_text(asked_amounts(q["amounts"])),
                    q["cause"] or "can be granted",
                )
                for q in state["queue"]
            ],
        )
    if not state["grants"] and not state["queue"]:
        click.echo("nothing is held, and nothing waits")


def _grant_state(grant: dict[str, Any]) -> str:
    return f"{grant['state']}" + ("" if grant["placed"] else ", placing")


def _show_coordinator(state: dict[str, Any]) -> None:
    counts: Iterable[str] = (f"{count} {name}" for name, count in state["requests"].items())
    pools = ", ".join(f"{pool} ({amounts_text(capacity)})" for pool, capacity in state["pools"].items())
    click.echo(
        f"configuration {state['version']}: {pools or 'no pools'}; {counted(state['policies'], 'policy')}"
    )
    click.echo(f"requests: {', '.join(counts) or 'none'}")
    if state["live"]:
        print_table(
            ("request", "requester", "state", "pools", "asks for"),
            [
                (
                    r["id"],
                    r["requester"],
                    r["state"] + (f", asked to {r['asked']}" if r["asked"] else ""),
                    r["owner"] or ", ".join(r["pools"]),
                    amounts_text(asked_amounts(r["amounts"])),
                )
                for r in state["live"]
            ],
        )
