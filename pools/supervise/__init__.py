"""Commands that end with everything they started, whoever dies first. No ray, no pools: processes of Linux.

`guard.py` is the program that stands over a command; `supervised.py` starts it and talks to it.
"""

from .supervised import Ending, Supervised

__all__ = ["Ending", "Supervised"]
