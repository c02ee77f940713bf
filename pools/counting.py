"""How a count is said: `1 job`, `2 jobs`."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """The count with its noun, which takes an s where it is not one."""
    return f"{count} {noun}" if count == 1 else f"{count} {_plural(noun)}"


def _plural(noun: str) -> str:
    return f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
