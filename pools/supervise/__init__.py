"""Commands that end with everything they started, whoever dies first. No ray, no pools: processes of Linux.

`guard.py` is the program that stands over a command; `supervised.py` starts it and talks to it.
"""

from .guard import NOT_STARTED
from .supervised import Ending, Supervised

__all__ = ["NOT_STARTED", "Ending", "Supervised"]
