"""Events out (`pools events`, webhooks): out of the logs of live actors, in order, each at least once.

Faults it stands for: an event that is lost when the receiver or this process dies, or that is told for ever; a user's
text that Slack takes for a link or a mention; a secret address in an error.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from shell_pools import ShellPools, shell_pools

from ray_pools.errors import BadInput
from ray_pools.notices import KINDS, Cursor, Notice, Watch, follow
from ray_pools.webhook import REFUSED_TRIES, Stopped, Webhook, payload

CONFIG = """\
pools:
  p: {capacity: {gpu: 4}, placement: none, grace_s: 60, starvation_after_s: 100}
policies:
  - {pool: p, requester: a, priority: 1, reserved: {gpu: 2}}
  - {pool: p, requester: b, priority: 9}
"""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[ShellPools]:
    with shell_pools(tmp_path, CONFIG) as made:
        yield made


def told(live: ShellPools, cursor: Path | None = None, **options: Any) -> list[Notice]:
    found: list[Notice] = []
    follow(live.store, found.append, cursor=cursor, once=True, **{"from_start": True, **options})
    return found


def busy(live: ShellPools) -> None:
    live.submit("b1", "b", 4)
    live.submit("a1", "a", 2)
    live.submit("no", "nobody", 1)
    live.ask("", op="stopped", id="b1", token=b"")
    live.until(b1="preempted", a1="allocated")
    live.ask(
        "", op="submit", id="short", requester="b", amounts={"gpu": 1, "step_run": 1}, token=b"", lease_s=0.3
    )
    live.until(short="expired")


def test_each_kind_is_told_with_its_reason(live: ShellPools) -> None:
    busy(live)
    notices = {notice.kind: notice for notice in told(live)}
    assert set(notices) == {"preemption", "rejection", "expiry"}
    preemption = notices["preemption"]
    assert (preemption.request, preemption.requester, preemption.pool) == ("b1", "b", "p")
    assert preemption.text == "request b1 of b must stop in p within 60 s: for a1 of a (reclaim)"
    assert preemption.details["for"] == "a1"
    assert notices["rejection"].text == "request no of nobody was rejected (p: no_policy)"
    assert notices["expiry"].request == "short"


def test_an_emptied_pool_says_that_an_operator_did_it(live: ShellPools) -> None:
    live.submit("b1", "b", 1)
    live.run("pool", "delete", "p", "--yes", "--no-wait", "--force")
    live.until(b1="preempting")
    (notice,) = told(live, kinds=["preemption"])
    assert (notice.details["reason"], notice.details["for"]) == ("operator", "")


def test_who_starves_is_told_once_and_again_only_if_it_comes_back(live: ShellPools, tmp_path: Path) -> None:
    live.submit("b1", "b", 4)
    live.submit("b2", "b", 1)
    now = live.ask("", op="ping")["now"]
    watch = Watch(live.store, Cursor(tmp_path / "c"), from_start=True)
    assert [notice.request for notice, _ in watch.notices(now + 99.0)] == []
    for notice, took in watch.notices(now + 101.0):
        assert (notice.id, notice.kind) == ("starvation:b2", "starvation")
        took()
    assert list(watch.notices(now + 200.0)) == []
    watch.close()
    again = Watch(live.store, Cursor(tmp_path / "c"))
    assert list(again.notices(now + 300.0)) == []
    again.close()


def test_a_callback_that_fails_is_told_again_and_nothing_is_left_out(
    live: ShellPools, tmp_path: Path
) -> None:
    busy(live)
    all_of_it = [notice.id for notice in told(live)]
    assert len(all_of_it) == 3
    seen: list[str] = []

    def fails(notice: Notice) -> None:
        seen.append(notice.id)
        if len(seen) % 2 == 0:  # every second call dies, before its cursor moves
            raise RuntimeError("the receiver died")

    for _ in range(10):
        try:
            follow(live.store, fails, cursor=tmp_path / "cursor", from_start=True, once=True)
        except RuntimeError:
            continue
        break
    assert set(seen) == set(all_of_it)
    assert len(seen) > len(all_of_it)  # at least once, and here some twice
    assert told(live, tmp_path / "cursor") == []
    live.submit("no2", "nobody", 1)
    assert [notice.request for notice in told(live, tmp_path / "cursor")] == ["no2"]


def test_without_a_cursor_it_begins_with_what_comes_from_now_on(live: ShellPools, tmp_path: Path) -> None:
    busy(live)
    assert told(live, tmp_path / "c", from_start=False) == []
    live.submit("no2", "nobody", 1)
    assert [notice.request for notice in told(live, tmp_path / "c", from_start=False)] == ["no2"]


def test_a_pool_that_comes_later_is_followed_too(live: ShellPools) -> None:
    watch = Watch(live.store, Cursor(None))
    assert list(watch.notices()) == []
    live.run("pool", "create", "r", "--capacity", "gpu=1", "--count-only")
    live.run("policy", "attach", "c", "r")
    live.run("policy", "attach", "d", "r", "--priority", "1")
    live.submit("c1", "c", 1)
    live.submit("d1", "d", 1)
    list(watch.notices())
    assert [notice.request for notice, _ in watch.notices()] == ["c1"]
    watch.close()


def test_a_file_that_is_no_cursor_is_refused(live: ShellPools, tmp_path: Path) -> None:
    (tmp_path / "c").write_text("hello")
    with pytest.raises(BadInput, match="cursor"):
        told(live, tmp_path / "c")
    with pytest.raises(BadInput, match="kind"):
        told(live, kinds=["nonsense"])


# --- webhooks


class Receiver:
    """An HTTP server whose answers a test says; the last one stays."""

    def __init__(self, *answers: int) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        left = list(answers)
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.bodies.append(json.loads(body))
                receiver.keys.append(self.headers["Idempotency-Key"])
                self.send_response(left.pop(0) if len(left) > 1 else left[0])
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook?secret=s3cret"
        self._thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


NOTICE = Notice(
    "pool:p:7:<é>", "preemption", 1.0, "<é>", "<!channel> & co", "p", "<é> of <!channel> & co must stop", {}
)


def test_a_receiver_that_fails_is_tried_again_until_it_takes_it() -> None:
    said: list[str] = []
    with Receiver(503, 429, 500, 200) as receiver:
        Webhook(receiver.url, namespace="ns", backoff_s=0.0, tell=said.append)(NOTICE)
    assert len(receiver.bodies) == 4
    assert set(receiver.keys) == {"pool:p:7:<\\xe9>"}
    assert receiver.bodies[0] == {**NOTICE._asdict(), "namespace": "ns"}
    assert len(said) == 3
    assert "s3cret" not in "".join(said)


def test_a_receiver_that_refuses_is_passed_over_after_some_tries() -> None:
    with Receiver(404) as receiver:
        Webhook(receiver.url, backoff_s=0.0, tell=lambda text: None)(NOTICE)
    assert len(receiver.bodies) == REFUSED_TRIES


def test_a_receiver_that_is_away_does_not_keep_the_process() -> None:
    with Receiver(200) as gone:
        pass
    stop = threading.Event()
    webhook = Webhook(gone.url, stop=stop, backoff_s=60.0, tell=lambda text: stop.set())
    with pytest.raises(Stopped):
        webhook(NOTICE)


def test_slack_gets_one_text_without_links_or_mentions() -> None:
    said = payload(NOTICE, "slack", "ns")
    assert said == {"text": ":warning: preemption in ns: &lt;é&gt; of &lt;!channel&gt; &amp; co must stop"}


def test_the_command_posts_each_once_and_remembers_it(live: ShellPools) -> None:
    busy(live)
    with Receiver(200) as receiver:
        options = ("--webhook", receiver.url, "--store", live.store, "--slack", "--once", "--from-start")
        first = live.run("events", *options)
        assert (first.exit_code, first.stderr) == (0, "3 told\n")
        assert live.run("events", *options).stderr == "0 told\n"
        assert len(receiver.bodies) == 3
        assert all(set(body) == {"text"} for body in receiver.bodies)
    shown = live.run("events", "--store", live.store, "--once", "--from-start", "--json", "--kind", "expiry")
    assert [json.loads(line)["request"] for line in shown.stdout.splitlines()] == ["short"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--kind", "nonsense"), ", ".join(KINDS)),
        (("--slack",), "--webhook"),
        (("--webhook", "ftp://s3cret"), "an address such as"),
    ],
)
def test_wrong_use_is_said(live: ShellPools, options: tuple[str, ...], words: str) -> None:
    result = live.run("events", "--store", live.store, *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "s3cret" not in result.stderr
