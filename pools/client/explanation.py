"""What a ticket's `explain` answers: what each pool says, and the same as one sentence for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .views import FOR_NOBODY, View

_HOW_OVER = {
    "released": "was given back",
    "cancelled": "was cancelled",
    "preempted": "was stopped for another request, and no retries are left",
    "expired": "is over: its lease ran out",
}


class Explanation(dict[str, dict[str, Any]]):
    """Pool to what it says of the request: state, cause, position, waiting (how many), text, numbers; or `unreachable`
    and why. `view` is the request at that time. `str` makes one sentence of it.
    """

    def __init__(self, view: View, said: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(said)
        self.view = view

    def __str__(self) -> str:
        return f"request {self.view['id']} {self._what()}"

    def line(self) -> str:
        """The shortest form, for a line that is written over and over while one waits: each pool's place and cause."""
        state = self.view["state"]
        if state == "allocated":
            return f"granted in {self.view['pool']}, its nodes are made ready"
        if state == "preempting":
            return f"gives its slot in {self.view['pool']} back"
        said = "; ".join(f"{pool} {_short(each)}".rstrip() for pool, each in sorted(self.items()))
        return f"{state}: {said}" if said else state

    def _what(self) -> str:
        view, state = self.view, self.view["state"]
        texts = [f"{pool}: {_text(each)}" for pool, each in sorted(self.items())]
        if state == "queued":
            return "waits: " + ("; ".join(texts) if texts else "its pools have not been asked yet")
        if state == "allocated" and not view.get("ready"):
            return f"is granted in {view['pool']}, and its nodes are made ready"
        if state == "allocated":
            return f"holds a slot in {_joined(view['pool'], texts)}"
        if state == "preempting":
            nobody = FOR_NOBODY.get(view.get("for_nobody", ""))
            return f"is called back in {_joined(view['pool'], texts)}" + (f": {nobody}" if nobody else "")
        if state == "rejected":
            return "was rejected: " + ("; ".join(texts) if texts else "no pool admits it")
        nobody = FOR_NOBODY.get(view.get("for_nobody", ""))
        if state == "preempted" and nobody:
            return f"was stopped: {nobody}, and no retries are left"
        return _HOW_OVER.get(state, f"is {state}")


def _joined(pool: str, texts: list[str]) -> str:
    return texts[0] if texts else pool


def _text(said: Mapping[str, Any]) -> str:
    """One pool's own sentence, with the place in its queue."""
    if said.get("unreachable"):
        return f"does not answer ({said['unreachable']})"
    reason = said.get("text") or said.get("cause") or said.get("state") or "it has not heard of it yet"
    return ", ".join(filter(None, [_place(said), str(reason), _estimate(said)]))


def _short(said: Mapping[str, Any]) -> str:
    if said.get("unreachable"):
        return "does not answer"
    words = [_place(said), str(said.get("cause") or "").replace("_", " "), _estimate(said)]
    return ", ".join(filter(None, words))


def _place(said: Mapping[str, Any]) -> str:
    return f"{said['position']} of {said['waiting']}" if said.get("position") and said.get("waiting") else ""


def _estimate(said: Mapping[str, Any]) -> str:
    """How long it may take, where the client has worked that out (`estimate_s`)."""
    estimate_s = said.get("estimate_s")
    return "" if estimate_s is None else f"about {duration_text(estimate_s)}"


def duration_text(duration_s: float) -> str:
    """`45 s`, `12 min`, `3.5 h`."""
    if duration_s < 120:
        return f"{duration_s:.0f} s"
    return f"{duration_s / 60:.0f} min" if duration_s < 7200 else f"{duration_s / 3600:.1f} h"
