"""The command line `pools`: app.py has the group, one module per family of commands has the rest.

Nothing here imports ray, the client or the actors before a command needs them: `pools --help` and `pools scenario` are
quick, and work without Ray.
"""

from .app import main, pools

__all__ = ["main", "pools"]
