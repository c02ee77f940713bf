"""The command line `pools`: app.py has the group, one module per family of commands has the rest.

Nothing here imports ray, the client or the actors before a command needs them: `pools --help` and `pools scenario` are
quick, and work without Ray.
"""

import sys


def main() -> None:
    """What the console script runs."""
    try:
        from .app import (
            pools,
        )  # later than the package: __main__.py has to clean the path before click is loaded

        pools.main(prog_name="pools")
    except KeyboardInterrupt:  # while modules are loaded; what is under way is the group's to end
        raise SystemExit(130) from None
    finally:
        connection = sys.modules.get("ray_pools.cli.connection")
        if connection is not None:
            connection.let_it_end()
