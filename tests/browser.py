"""A headless Chromium for tests, driven over its DevTools protocol: pages, what they say, ask and look like.

`find_chromium` installs Debian's package where it may; without a browser it says why, for a skip.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
WAIT_S = 60.0
INSTALL_LIMIT_S = 400


def find_chromium() -> tuple[str, str]:
    """The program, or "" and why there is none."""
    for name in PROGRAMS:
        if found := shutil.which(name):
            return found, ""
    if not shutil.which("apt-get") or os.geteuid() != 0:
        return "", "no Chromium here, and it can't be installed (that takes root and apt-get)"
    options = ["-qq", "-y", "--no-install-recommends"]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", *options, "chromium", "fonts-dejavu-core"]):
        try:
            done = subprocess.run(
                ["apt-get", *command],
                env=env,
                capture_output=True,
                text=True,
                timeout=INSTALL_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "", f"apt-get {command[0]} took longer than {INSTALL_LIMIT_S} s"
        if done.returncode:
            return "", f"apt-get {command[0]} failed: {done.stderr.strip()[-300:]}"
    return shutil.which("chromium") or "", "apt-get installed no chromium"


class Page:
    """One page. `problems`: errors and warnings of its console; `urls`: all that it asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._numbers = 0
        self.problems: list[str] = []
        self.urls: list[str] = []
        self._task = asyncio.get_running_loop().create_task(self._listen())

    async def send(self, method: str, **params: Any) -> Any:
        """One command of the protocol, and its result."""
        self._numbers += 1
        answer = self._answers[self._numbers] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._numbers, "method": method, "params": params})
        return await asyncio.wait_for(answer, WAIT_S)

    async def _listen(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                answer = self._answers.pop(said["id"])
                if "error" in said:
                    answer.set_exception(AssertionError(str(said["error"])))
                else:
                    answer.set_result(said["result"])
            else:
                self._heard(said["method"], said["params"])

    def _heard(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(str(details.get("exception", {}).get("description") or details))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str([arg.get("value", arg.get("description")) for arg in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['text']} ({params['entry'].get('url', '')})")
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"a dialog: {params['message']}")
        elif method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])

    async def begin(self) -> None:
        """Hears of everything from now on."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")

    async def open(self, url: str) -> None:
        """Goes there, and waits until the document is complete."""
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, script: str) -> Any:
        """What the expression comes to, awaited, as plain values."""
        said = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in said:
            details = said["exceptionDetails"]
            raise AssertionError(details.get("exception", {}).get("description") or details["text"])
        return said["result"].get("value")

    async def until(self, script: str) -> Any:
        """The first true value of the expression."""
        ends_at = time.monotonic() + WAIT_S
        while True:
            found = await self.evaluate(script)
            if found:
                return found
            if time.monotonic() > ends_at:
                text = await self.evaluate("document.body.innerText.slice(0, 3000)")
                raise AssertionError(f"not within {WAIT_S:g} s: {script}\n{text}\n{self.problems}")
            await asyncio.sleep(0.05)

    async def key(self, key: str, code: int) -> None:
        """A key is pressed and let go."""
        for kind in ("rawKeyDown", "keyUp"):
            await self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    async def look(self, width: int, height: int, theme: str = "light", reduced_motion: bool = False) -> None:
        """Another window, another system."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        motion = "reduce" if reduced_motion else "no-preference"
        features = [
            {"name": "prefers-color-scheme", "value": theme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path) -> None:
        """What it looks like, all of it, as a PNG."""
        said = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(said["data"]))


@asynccontextmanager
async def browser(program: str) -> AsyncIterator[Page]:
    """A browser with one page, in a profile of its own; ended at the end."""
    with tempfile.TemporaryDirectory(prefix="ray-pools-browser-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                program,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--hide-scrollbars",
                # whatever it would like to look up elsewhere does not exist
                "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1 , EXCLUDE localhost",
                "--remote-debugging-port=0",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            port = await _port(Path(profile, "DevToolsActivePort"), process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    (target,) = [each for each in await answer.json() if each["type"] == "page"]
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    await page.begin()
                    yield page
                    page._task.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()


async def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    ends_at = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(file.read_text().splitlines()[0])
        assert process.poll() is None, f"the browser ended with {process.returncode}"
        assert time.monotonic() < ends_at, "the browser does not come up"
        await asyncio.sleep(0.05)
