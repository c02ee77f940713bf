"""Notices by HTTP: as JSON, or as Slack and what speaks like it take them. What can't be delivered is tried again."""

from __future__ import annotations

import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from .errors import BadInput, PoolsError
from .notices import Notice

log = logging.getLogger("ray_pools")

FORMATS = ("json", "slack")
TIMEOUT_S = 10.0
BACKOFF_FIRST_S, BACKOFF_MAX_S = 1.0, 60.0
REFUSED_TRIES = 5
"""A receiver that says that the call itself is wrong (4xx) is asked so often; then the notice is passed over."""

_ICONS = {
    "preemption": ":warning:",
    "expiry": ":hourglass:",
    "rejection": ":no_entry:",
    "starvation": ":turtle:",
}


class Stopped(PoolsError):
    """Somebody wanted it to end while a notice was being tried again."""


def check_url(url: str, field: str = "--webhook") -> str:
    """An http or https address; errors don't show it, since it may be a secret."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput(field, "...", "an address such as https://hooks.slack.com/services/...")
    return url


def payload(notice: Notice, format: str, namespace: str) -> dict[str, Any]:
    """The body. slack: `text` for people, with nothing in it that would be a link or a mention."""
    if format == "slack":
        text = notice.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return {"text": f"{_ICONS[notice.kind]} {notice.kind} in {namespace}: {text}"}
    return {**notice._asdict(), "namespace": namespace}


class Webhook:
    """A callback for `notices.follow`: posts, and returns once the receiver has said 2xx.

    A receiver that is away, or answers 5xx, 408 or 429, is tried again for as long as it takes, ever more slowly; other
    4xx a few times, and then passed over with a line on the log. Raises Stopped when `stop` is set meanwhile.
    """

    def __init__(
        self,
        url: str,
        format: str = "json",
        namespace: str = "pools",
        *,
        stop: threading.Event | None = None,
        tell: Callable[[str], None] = log.warning,
        backoff_s: float = BACKOFF_FIRST_S,
    ) -> None:
        if format not in FORMATS:
            raise BadInput("format", format, f"one of {', '.join(FORMATS)}")
        self._url, self._format, self._namespace = check_url(url), format, namespace
        self._stop, self._tell, self._backoff_s = stop or threading.Event(), tell, backoff_s

    def __call__(self, notice: Notice) -> None:
        backoff_s, refused = self._backoff_s, 0
        while True:
            problem, again = self._post(notice)
            if not problem:
                return
            refused += not again
            if refused >= REFUSED_TRIES:
                self._tell(f"{notice.id} is passed over: the webhook {problem}")
                return
            self._tell(f"{notice.id} is tried again in {backoff_s:g} s: the webhook {problem}")
            if self._stop.wait(backoff_s):
                raise Stopped(f"{notice.id} was not delivered; it comes again with the next run")
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    def _post(self, notice: Notice) -> tuple[str, bool]:
        """What went wrong ("": nothing), and whether it is worth trying for ever."""
        body = json.dumps(payload(notice, self._format, self._namespace), ensure_ascii=False).encode()
        headers = {
            "Content-Type": "application/json; charset=utf-8",
            "User-Agent": "ray-pools",
            # the same when it comes again
            "Idempotency-Key": notice.id.encode("ascii", "backslashreplace").decode(),
        }
        request = urllib.request.Request(self._url, body, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                return "", True
        except urllib.error.HTTPError as error:
            error.close()
            return f"answered {error.code}", error.code >= 500 or error.code in (408, 429)
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            return f"can't be reached: {type(reason).__name__}", True
