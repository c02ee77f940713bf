"""A real redis-server for tests: installed if it is missing and can be, on loopback, with a folder of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

START_WAIT_S = 30.0
SAFE = {"appendonly": "yes", "appendfsync": "always", "save": ""}


def redis_program() -> str:
    """Where redis-server is. Skips the test, and says why, where it can't be had."""
    pytest.importorskip("redis")
    found = shutil.which("redis-server")
    if found is None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            pytest.skip("no redis-server here, and only root can install one with apt-get")
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "redis-server"]):
            done = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"no redis-server here, and {' '.join(command)} failed: {done.stderr[-300:]}")
        found = shutil.which("redis-server")
    if found is None:
        pytest.skip("redis-server was installed, but is not on the path")
    return found


class RedisServer:
    """One server process at a time over one folder; `start` after `kill` comes back on the same port."""

    def __init__(self, folder: Path) -> None:
        self.program = redis_program()
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def written(self) -> Path:
        """The file that the server appends to."""
        (found,) = (self.folder / "appendonlydir").glob("*.incr.aof")
        return found

    def start(self, **settings: str) -> bool:
        """Whether it came up: it does not over a file that it can't read."""
        options = {"port": str(self.port), "bind": "127.0.0.1", "dir": str(self.folder), "daemonize": "no"}
        options |= SAFE | {name.replace("_", "-"): value for name, value in settings.items()}
        command = [self.program]
        for name, value in options.items():
            command += [f"--{name}", value]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_WAIT_S
        while self.process.poll() is None:
            if self.answers():
                return True
            assert time.monotonic() < deadline, (self.folder / "server.log").read_text()
            time.sleep(0.005)
        self.process = None
        return False

    def answers(self) -> bool:
        """Whether it is done with loading; it may want a password."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(100).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(how)
            process.wait()
