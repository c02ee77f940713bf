"""`pools prewarm`: capacity announced ahead, and taken back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ray_pools.cli.command_options import amounts_option
from ray_pools.cli.connection import cluster_options, connect, json_option
from ray_pools.cli.output import amounts_text, print_json
from ray_pools.cli.times import parse_duration
from ray_pools.errors import BadInput
from ray_pools.keys import key_in_file

if TYPE_CHECKING:
    from ray_pools.client import Announcement


@click.command()
@click.argument("pool", metavar="[POOL]", required=False)
@click.option("--gpus", "-g", type=int, help="How many GPUs.")
@click.option("--cpus", metavar="N", help="How many CPUs; fractions are allowed.")
@click.option("--memory", metavar="SIZE", help="Memory, such as 16GiB.")
@amounts_option("--resource", "Another resource that the pool has nodes for; may be given several times.")
@click.option("--for", "for_", metavar="TIME", help="For how long, such as 90s, 15m or 2h; a day at most.")
@click.option(
    "--requester", "-r", help="Whose requests it is for. Default: everybody's, as an operator's command."
)
@click.option(
    "--key-file",
    metavar="FILE",
    help="The requester's key, where it is protected by one. Default: RAY_POOLS_KEY or RAY_POOLS_KEY_FILE.",
)
@click.option("--id", "id_", metavar="ID", help="Its id: the same again changes nothing. Made when left out.")
@click.option(
    "--cancel", metavar="ID", multiple=True, help="End this announcement before its time; several times."
)
@cluster_options
@json_option
def prewarm(
    pool: str | None,
    gpus: int | None,
    cpus: str | None,
    memory: str | None,
    resource: dict[str, int],
    for_: str | None,
    requester: str | None,
    key_file: str | None,
    id_: str | None,
    cancel: tuple[str, ...],
    address: str | None,
    namespace: str,
    as_json: bool,
) -> None:
    """Announce that capacity of POOL will be needed, so that its nodes are up before the first request.

    Nothing is granted or kept free by it. It ends by itself; `pools status` shows it until then.
    """
    wanted = (pool, gpus, cpus, memory, resource or None, for_, requester, id_)
    if cancel and any(each is not None for each in wanted):
        raise click.UsageError("--cancel ends announcements, and goes with nothing else")
    if not cancel and (pool is None or for_ is None):
        raise click.UsageError("what is missing: POOL and --for, such as `pools prewarm spot -g 8 --for 15m`")
    for_s = 0.0 if for_ is None else parse_duration(for_, "--for")
    key = key_in_file(key_file, "--key-file") if key_file is not None else None
    with connect(address, namespace, key=key) as client:
        if cancel:
            found = client.cancel_prewarm(*cancel)
        else:
            assert pool is not None
            try:
                made = client.prewarm(
                    pool,
                    gpus=gpus,
                    cpus=cpus,
                    memory=memory,
                    pool_resources=resource or None,
                    for_s=for_s,
                    requester=requester,
                    id=id_,
                )
            except BadInput as problem:
                if problem.field != "for_s":
                    raise
                raise BadInput("--for", for_, problem.expected) from None
            found = [made]
    if as_json:
        print_json(found if cancel else found[0])
        return
    for each in found:
        click.echo(announcement_text(each))


def announcement_text(each: Announcement) -> str:
    """`warm-1: gpu 8 of pool spot, announced by alice@host for the next 15 min`."""
    from ray_pools.client.explanation import duration_text

    for_whom = f" for {each['requester']}" if each["requester"] else ""
    what = f"{each['id']}: {amounts_text(each['amounts'])} of pool {each['pool']}{for_whom}"
    if each["over"]:
        return f"{what}: over: {each['over']}"
    return f"{what}, announced by {each['by'] or 'somebody'} for the next {duration_text(each['left_s'])}"
