"""The page of `pools dashboard` in a headless Chromium (docs/dashboard.md).

Faults it stands for: a name that is read as HTML, a past on the page that is another than the log's, a control that a
keyboard or a screen reader does not find, text that can't be read in one of the themes, a page that is wider than a
phone. With a live cluster: test_dashboard_live.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from browser import Page, browser
from test_log_usage import kept
from test_metrics import random_world

from ray_pools.core import records as ev
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.status import pool_status
from ray_pools.core.system import System
from ray_pools.dashboard.feed import Feed
from ray_pools.dashboard.history import History
from ray_pools.dashboard.server import make_app
from ray_pools.dashboard.sources import LogSource
from ray_pools.errors import Unreachable
from ray_pools.log_view import state_at
from ray_pools.store import open_reader, open_store
from ray_pools.store.memory import forget

pytestmark = pytest.mark.slow

ODD = "<script>alert(1)</script>"
ODD_IMAGE = '<img src=x onerror="alert(2)">'
WIDTHS = ((1440, 900), (820, 1100), (390, 844))
THEMES = ("light", "dark")

READY = "document.querySelectorAll('.pool .bar .segment').length > 0 && document.querySelector('.chart rect') !== null"

# The contrast of each text with the ground under it, where that is less than its size needs (WCAG 2, level AA).
TOO_FAINT = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const groundOf = (node) => {
    for (let each = node; each; each = each.parentElement) {
      const ground = rgba(getComputedStyle(each).backgroundColor);
      if (ground[3] === 255) return ground;
    }
    return [255, 255, 255, 255];
  };
  const faint = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || !node.checkVisibility() || node.closest('.hidden-text, :disabled, option')) continue;
    const svg = node.closest('svg');
    if (svg !== null && node.tagName !== 'text') continue;
    const style = getComputedStyle(node);
    const [a, b] = [light(rgba(svg ? style.fill : style.color)), light(groundOf(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) faint.add(`${node.tagName}.${node.className} ${text.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return [...faint];
})()"""


def no_trouble(page: Page) -> None:
    """No error on its console, and nothing asked of any other machine."""
    assert page.problems == []
    hosts = {urlsplit(url).hostname for url in page.urls}
    assert hosts == {"127.0.0.1"}


async def looks(page: Page, folder: Path) -> None:
    """At three widths and in both themes: pictures, nothing wider than the window, every text readable."""
    for theme in THEMES:
        for width, height in WIDTHS:
            await page.look(width, height, theme)
            await page.until(f"innerWidth === {width} && document.documentElement.scrollWidth <= {width}")
            await page.screenshot(folder / f"{theme}-{width}.png")
            assert await page.evaluate(TOO_FAINT) == [], (theme, width)
        ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (int(ground.split("(")[1].split(",")[0]) > 128) == (theme == "light")
    await page.look(*WIDTHS[0])


async def named_controls(page: Page) -> None:
    """Whatever can be used has a name for who does not see it."""
    tree = await page.send("Accessibility.getFullAXTree")
    roles = {"button", "combobox", "slider", "searchbox", "link", "image", "region", "dialog", "img"}
    controls = [
        node for node in tree["nodes"] if node.get("role", {}).get("value") in roles and not node["ignored"]
    ]
    assert len(controls) >= (3 if await page.evaluate("document.querySelector('#story').open") else 15)
    unnamed = [
        node["role"]["value"] for node in controls if not node.get("name", {}).get("value", "").strip()
    ]
    assert unnamed == []


# --- without a cluster: logs that a test writes


class Written:
    """A system in one process whose logs the server follows."""

    def __init__(self, world: System) -> None:
        self.world, self.store = world, kept(world)
        self._written = {log: len(rows) for log, rows in world.logs.items()}

    def flush(self) -> None:
        for log, rows in self.world.logs.items():
            done = self._written[log]
            if len(rows) > done:
                writer = open_store(self.store, log if log == "coordinator" else f"pool:{log}")
                writer.open()
                writer.append(rows[done:], done)
                self._written[log] = len(rows)


@asynccontextmanager
async def served(store: str) -> AsyncIterator[str]:
    async with served_by(Feed(LogSource(), lambda: History(store), every_s=0.1)) as url:
        yield url


@asynccontextmanager
async def served_by(feed: Feed) -> AsyncIterator[str]:
    runner = web.AppRunner(make_app(feed), shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


def odd_world() -> System:
    """Every name that somebody can choose is one that a browser could run."""
    pools = {ODD: PoolConfig(ODD, {"gpu": 8, "step_run": 20}, grace_s=20.0), "q": PoolConfig("q", {"gpu": 4})}
    policies = [
        PolicyConfig(ODD, ODD_IMAGE, 9, {"gpu": 4}),
        PolicyConfig(ODD, "plain", 1),
        PolicyConfig("q", ODD_IMAGE, 1),
        PolicyConfig("q", "plain", 2, {"gpu": 2}),
    ]
    world = System(pools, policies)
    world.advance(1.7e9)
    for number in range(10):
        world.advance(20.0)
        world.submit(f"{ODD} {number}", "plain", {"gpu": 2, "step_run": 1})
    world.submit("first", ODD_IMAGE, {"gpu": 4, "step_run": 1}, retries=1)
    world.advance(25.0)
    world.submit("second", ODD_IMAGE, {"gpu": 2, "step_run": 1}, retries=1)
    return world


def test_names_are_text_wherever_they_are_shown(chromium: str, tmp_path: Path) -> None:
    written = Written(odd_world())

    async def story() -> None:
        async with served(written.store) as url, browser(chromium) as page:
            await page.look(*WIDTHS[0])
            await page.open(url)
            await page.until(READY)
            await page.evaluate(
                "document.querySelectorAll('details').forEach((each) => { each.open = true; })"
            )
            text = await page.evaluate("document.body.innerText")
            for name in (ODD, ODD_IMAGE, f"{ODD} 9"):
                assert name in text
            assert await page.evaluate("document.querySelectorAll('script, img, iframe').length") == 1, (
                "the page's own"
            )
            titles = await page.evaluate(
                "[...document.querySelectorAll('.chart rect')].map((box) => {"
                " box.dispatchEvent(new PointerEvent('pointerover', {bubbles: true}));"
                " return box.textContent; }).join()"
            )
            assert ODD in titles
            await looks(page, tmp_path / "odd")
            await named_controls(page)
            # a name that comes in later, and one in a request's story
            written.world.submit(f"late {ODD_IMAGE}", ODD_IMAGE, {"gpu": 1, "step_run": 1})
            written.flush()
            await page.until(f"document.body.innerText.includes({json.dumps('late ' + ODD_IMAGE)})")
            log = [ev.unpack(body) for _, body in written.world.logs[ODD]]
            victim = next(event for event in log if isinstance(event, ev.Nominated)).victims[0][0]
            await page.evaluate(f"location.hash = 'request=' + encodeURIComponent({json.dumps(victim)})")
            await page.until("document.querySelectorAll('#story .story li').length > 3")
            assert ODD_IMAGE in await page.evaluate("document.querySelector('#story').innerText")
            assert await page.evaluate(TOO_FAINT) == []
            await named_controls(page)
            no_trouble(page)

    asyncio.run(story())
    forget(written.store)


# What is wrong with the places of the chart's boxes, at the row of each grant; they come in two portions, as on a page.
MISPLACED = """import('/static/model.js').then(({Layout}) => {
  const grants = GRANTS, capacity = CAPACITY, layout = new Layout('gpu', capacity), wrong = [];
  const all = new Map(grants.map((grant) => [`${grant.id} ${grant.k}`, grant]));
  layout.add(new Map([...all].slice(0, grants.length / 2)));
  layout.add(all);
  for (const {row} of grants) {
    const running = [...all].filter(([, g]) => g.row <= row && (g.ended_at === null || g.seq > row));
    const spans = running.flatMap(([name]) => layout.of(name)).sort(([a], [b]) => a - b);
    const lengths = spans.reduce((sum, [low, high]) => sum + high - low, 0);
    const amounts = running.reduce((sum, [, grant]) => sum + (grant.amounts.gpu ?? 0), 0);
    const meet = spans.some(([low], index) => index > 0 && low < spans[index - 1][1]);
    const above = spans.some(([, high]) => high > capacity);
    if (lengths !== amounts || meet || above) wrong.push([row, spans]);
  }
  return wrong;
})"""


def test_boxes_of_the_chart_never_overlap_and_are_as_high_as_their_grants(chromium: str) -> None:
    worlds = {seed: random_world(seed) for seed in range(3)}

    async def story() -> None:
        store = kept(worlds[0])
        async with served(store) as url, browser(chromium) as page:
            await page.open(url)
            for world in worlds.values():
                history = History(kept(world))
                history.read()
                for pool, capacity in (("p", 8), ("q", 4)):
                    grants = history.grants(pool, 0.0, 1e9, 0, 10_000)["grants"]
                    assert len(grants) > 5
                    script = MISPLACED.replace("GRANTS", json.dumps(grants)).replace(
                        "CAPACITY", str(capacity)
                    )
                    assert await page.evaluate(script) == []

    asyncio.run(story())


def test_the_keyboard_is_enough_and_motion_can_be_reduced(chromium: str) -> None:
    written = Written(odd_world())
    pool_log = f"pool:{ODD}"

    async def story() -> None:
        async with served(written.store) as url, browser(chromium) as page:
            await page.look(*WIDTHS[0])
            await page.open(url)
            await page.until(READY)
            assert (
                await page.evaluate("getComputedStyle(document.querySelector('.segment')).transitionDuration")
                != "0s"
            )
            await page.look(*WIDTHS[0], reduced_motion=True)
            assert (
                await page.evaluate("getComputedStyle(document.querySelector('.segment')).transitionDuration")
                == "0s"
            )
            # Tab reaches every control, in the order of the page, and shows where it is
            seen: list[str] = []
            for _ in range(12):
                await page.key("Tab", 9)
                seen.append(
                    await page.evaluate("document.activeElement.id || document.activeElement.className")
                )
                outline = "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
                assert await page.evaluate(f"document.activeElement.matches(':focus-visible') && {outline}")
            assert [name for name in seen if name in ("find-id", "theme", "window", "moment")] == [
                "find-id", "theme", "window", "moment",
            ]  # fmt: skip
            # the arrow keys look back, Escape returns
            await page.evaluate("document.querySelector('#moment').focus()")
            for _ in range(3):
                await page.key("ArrowLeft", 37)
            shown = await page.until(
                "poolsPage.shown().at !== null && poolsPage.shown().settled && poolsPage.shown()"
            )
            reader = open_reader(written.store, pool_log)
            assert shown["pools"][ODD] == json.loads(
                json.dumps(state_at(reader, pool_log, float(shown["at"])))
            )
            assert "ago" in await page.evaluate(
                "document.querySelector('#moment').getAttribute('aria-valuetext')"
            )
            await page.key("Escape", 27)
            await page.until("poolsPage.shown().at === null")
            # from change to change, each with the state that the log has there
            for _ in range(4):
                before = await page.evaluate("poolsPage.shown().at ?? Infinity")
                await page.evaluate("document.querySelector('#earlier').click()")
                shown = await page.until(
                    f"poolsPage.shown().at < {json.dumps(before)} && poolsPage.shown().settled && poolsPage.shown()"
                    if before is not None
                    else "poolsPage.shown().at !== null && poolsPage.shown().settled && poolsPage.shown()"
                )
                assert shown["pools"][ODD] == json.loads(
                    json.dumps(state_at(reader, pool_log, float(shown["at"])))
                )
            reader.close()
            no_trouble(page)

    asyncio.run(story())
    forget(written.store)


def test_a_theme_that_is_chosen_stays(chromium: str) -> None:
    written = Written(odd_world())

    async def story() -> None:
        async with served(written.store) as url, browser(chromium) as page:
            await page.open(url)
            await page.until(READY)
            for theme in THEMES:
                await page.evaluate(
                    f"(() => {{ const s = document.querySelector('#theme'); s.value = '{theme}';"
                    " s.dispatchEvent(new Event('change')); })()"
                )
                await page.open(url)
                await page.until(READY)
                assert await page.evaluate("document.documentElement.dataset.theme") == theme

    asyncio.run(story())
    forget(written.store)


def test_the_page_goes_on_where_the_logs_cant_be_opened(chromium: str) -> None:
    """As on another machine than the store's: the present is there, and the page says what is not."""

    pool = pool_status(odd_world().pools["q"], 10)

    class Present:
        live = True

        def look(self, history: History | None) -> dict[str, Any]:
            return {"at": 5.0, "namespace": "ns", "coordinator": {}, "pools": {"q": pool}, "trouble": ""}

        def request(self, id: str) -> dict[str, Any]:
            return {"view": None, "explain": {}}

    def open_history() -> History:
        raise Unreachable("the logs are elsewhere")

    async def story() -> None:
        feed = Feed(Present(), open_history, every_s=0.1)
        async with served_by(feed) as url, browser(chromium) as page:
            await page.open(url)
            await page.until(
                "!document.querySelector('#logs-trouble').hidden && poolsPage.updates().length > 0"
            )
            assert "the logs are elsewhere" in await page.evaluate(
                "document.querySelector('#logs-trouble').innerText"
            )
            assert await page.evaluate("document.querySelectorAll('.pool .bar .segment').length") > 0
            no_trouble(page)

    asyncio.run(story())


def test_what_an_operator_calls_back_stops_for_nobody(chromium: str) -> None:
    world = System({"p": PoolConfig("p", {"gpu": 2}, grace_s=60.0)}, [PolicyConfig("p", "a")])
    world.submit("one", "a", {"gpu": 1})
    world.advance(5.0)
    world.cordon("p", "draining")
    world.evict("p")
    store = kept(world)

    async def story() -> None:
        async with served(store) as url, browser(chromium) as page:
            await page.look(*WIDTHS[0])
            await page.open(url)
            await page.until("document.querySelector('.preemptions li') !== null")
            said = "one of a stops: an operator empties the pool"
            line = "document.querySelector('.preemptions li')"
            assert said in await page.evaluate(f"{line}.textContent")
            assert await page.evaluate(f"{line}.querySelectorAll('a').length") == 1
            title = await page.evaluate(
                "(() => { const mark = document.querySelector('.chart .mark');"
                " mark.dispatchEvent(new PointerEvent('pointerover', {bubbles: true}));"
                " return mark.textContent; })()"
            )
            assert said in title
            no_trouble(page)

    asyncio.run(story())
    forget(store)


def test_the_page_says_when_its_server_is_gone(chromium: str) -> None:
    written = Written(odd_world())

    async def story() -> None:
        async with browser(chromium) as page:
            async with served(written.store) as url:
                await page.open(url)
                await page.until(READY)
                no_trouble(page)
            await page.until("document.querySelector('#connection').innerText.includes('not connected')")

    asyncio.run(story())
    forget(written.store)
