"""The page's HTTP server: it answers GET alone, and only to whom it may be shown.

A browser is full of other people's pages, which can make it send requests here. So:
- a Host header must be an address, localhost, or a name that was allowed: a foreign name that leads to 127.0.0.1
  (DNS rebinding) gets nothing; nor does what the browser says is another site's request for data;
- the page's policy lets it load nothing but this server's own files, run no inline script, be framed by nobody, and
  write no text of anybody as HTML (trusted types).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import mimetypes
from collections.abc import Awaitable, Callable, Collection
from importlib.resources import files
from typing import Any

from aiohttp import web

from ..errors import BadInput, PoolsError, Refused
from ..limits import check_name
from ..log_view import parse_moment
from .feed import Feed, to_json
from .history import History, story

KEEP_ALIVE_S = 15.0
GRANTS_MAX = 2_000
"""Grants of one pool in one answer."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "ray-pools",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
FEED: web.AppKey[Feed] = web.AppKey("feed", Feed)


def make_app(feed: Feed, allowed_hosts: Collection[str] = ()) -> web.Application:
    """The server's handlers. `allowed_hosts`: names, besides addresses and localhost, by which it may be called."""
    app = web.Application(middlewares=[_guard(frozenset(name.lower().rstrip(".") for name in allowed_hosts))])
    app[FEED] = feed
    app.router.add_get("/", _static("index.html"))
    for file in files(__package__).joinpath("static").iterdir():
        app.router.add_get(f"/static/{file.name}", _static(file.name))
    app.router.add_get("/api/events", _events)
    app.router.add_get("/api/at", _at)
    app.router.add_get("/api/grants", _grants)
    app.router.add_get("/api/request", _request)
    app.on_startup.append(lambda app: app[FEED].start())
    app.on_shutdown.append(lambda app: app[FEED].stop())
    return app


# --- who may


def is_allowed_host(host: str, allowed: Collection[str]) -> bool:
    """An address can't be rebound, and localhost is this machine; any other name must have been allowed."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    name = name.strip("[]").lower().rstrip(".")
    if name in allowed or name == "localhost" or name.endswith(".localhost"):
        return True
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


def _guard(allowed: frozenset[str]) -> Any:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await _checked(request, handler, allowed)
        except web.HTTPException as problem:
            response = _error(problem.status, problem.reason)
        except BadInput as problem:
            response = _error(400, str(problem))
        except Refused as problem:
            response = _error(404 if problem.code == "unknown_id" else 409, str(problem))
        except PoolsError as problem:
            response = _error(503, str(problem))
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    return guard


async def _checked(request: web.Request, handler: Handler, allowed: frozenset[str]) -> web.StreamResponse:
    if not is_allowed_host(request.headers.get("Host", ""), allowed):
        return _error(403, "this name is not allowed here: open an address, or start with --allow-host NAME")
    if request.path.startswith("/api/") and request.headers.get("Sec-Fetch-Site") in (
        "cross-site",
        "same-site",
    ):
        return _error(403, "another site's page may not read this")
    return await handler(request)


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status, dumps=to_json)


# --- what there is


def _static(name: str) -> Handler:
    body = files(__package__).joinpath("static").joinpath(name).read_bytes()
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    charset = None if kind.startswith("image/") else "utf-8"

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=kind, charset=charset)

    return answer


async def _events(request: web.Request) -> web.StreamResponse:
    """Server-sent events: each an object of the parts that changed; a comment now and then where nothing does."""
    feed = request.app[FEED]
    if feed.is_full:
        return _error(503, "too many pages are open")
    response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
    await response.prepare(request)
    with contextlib.suppress(ConnectionError, asyncio.CancelledError):
        async with contextlib.aclosing(feed.read(KEEP_ALIVE_S)) as reader:
            async for news in reader:
                await response.write(f"data: {news}\n\n".encode() if news else b": still here\n\n")
    return response


async def _at(request: web.Request) -> web.Response:
    """Each pool at a moment in the past, by its log."""
    moment = parse_moment(_field(request, "moment"), "moment")
    if not isinstance(moment, float) or not math.isfinite(moment):
        raise BadInput(
            "moment", moment, "a time, such as @SECONDS of the logs' own: each log has rows of its own"
        )
    feed = request.app[FEED]
    pools = await feed.in_thread("logs", lambda: _history(feed).at(moment))
    return _json({"at": moment, "pools": pools})


async def _grants(request: web.Request) -> web.Response:
    """Who held what between two times."""
    feed, pool = request.app[FEED], check_name("pool", _field(request, "pool"))
    from_s, to_s, after = (_number(request, name) for name in ("from", "to", "after"))
    return _json(
        await feed.in_thread(
            "logs", lambda: _history(feed).grants(pool, from_s, to_s, int(after), GRANTS_MAX)
        )
    )


async def _request(request: web.Request) -> web.Response:
    """One request: as it is now, and its story."""
    feed, id = request.app[FEED], check_name("id", _field(request, "id"))
    now: dict[str, Any] = {"view": None, "explain": {}}
    trouble, lines = "", None
    try:
        now = await feed.in_thread("look", feed.source.request, id)
    except PoolsError as problem:
        trouble = str(problem)
    try:
        lines = await feed.in_thread("story", lambda: story(_history(feed).store, id))
    except PoolsError as problem:
        if now["view"] is None and not trouble:
            raise
        trouble = trouble or str(problem)
    return _json({"id": id, **now, "story": lines or [], "trouble": trouble})


def _history(feed: Feed) -> History:
    if feed.history is None:
        raise PoolsError(feed.no_history or "the logs are not read yet")
    return feed.history


def _json(value: Any) -> web.Response:
    return web.json_response(value, dumps=to_json)


def _field(request: web.Request, name: str) -> str:
    value = request.query.get(name)
    if value is None:
        raise BadInput(name, None, "given once in the query")
    return value


def _number(request: web.Request, name: str) -> float:
    said = _field(request, name)
    try:
        value = float(said)
    except ValueError:
        value = float("nan")
    if not abs(value) < 2**53:
        raise BadInput(name, said, "a number")
    return value
