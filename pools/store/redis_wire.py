"""A Redis server as the log in `redis.py` sees it: its address, one connection, its settings, its errors.

Why one bare connection and no client of the redis package: a client sends a command again when an answer is
lost, and hides whether anything was sent at all. Both decide here what an append may answer.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from hashlib import sha1
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from ray_pools.errors import BadInput
from ray_pools.store.base import StoreError, UnsafeStore

EXPECTED = "redis://[USER[:PASSWORD]@]HOST[:PORT][/DB], with ?prefix=WORD and ?unsafe=1 if wanted"
PASSWORD_ENV = "POOLS_REDIS_PASSWORD"
"""Does not begin with RAY_: a cluster that is started here gets nothing that does."""
SCHEMES = ("redis", "rediss")
"""rediss is redis over TLS."""
DEFAULT_PREFIX = "ray-pools"

CONNECT_WAIT_S = 5.0
ANSWER_WAIT_S = 10.0
"""How long an answer may take: a sync, and what the server does before it."""
LOADING_WAIT_S = 60.0
"""A server that was just started reads its file first, and says so."""
PAUSE_S = 0.05

SETTINGS: dict[str, tuple[str, str]] = {
    "appendonly": ("yes", "nothing would be on disk"),
    "appendfsync": ("always", "an acknowledged turn might not be on disk"),
    "no-appendfsync-on-rewrite": ("no", "while the server rewrites its file, nothing would be synced"),
    "maxmemory-policy": ("noeviction", "a full memory would throw logs away"),
}
"""Setting of the server to the value that it must have, and what happens otherwise."""


class Lost(Exception):
    """The connection broke, or no answer came in time: whether the command was carried out is not known."""


class Loading(Lost):
    """The server has just started, and is not done with reading its file."""


class NotSynced(Exception):
    """The writes were made, but the server does not say that they are on disk."""


class Refusal(Exception):
    """The server's answer is an error; `code` is its first word."""

    def __init__(self, text: str) -> None:
        self.code = text.split(" ", 1)[0]
        super().__init__(text)


class Place(NamedTuple):
    """Where logs are: a server, a database of it, and what their keys begin with."""

    host: str
    port: int
    db: int
    user: str
    password: str
    tls: bool
    prefix: str
    unsafe: bool

    @property
    def shown(self) -> str:
        """The whole address but for the password, which nobody should find in an error or a status."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        options = [f"prefix={self.prefix}"] * (self.prefix != DEFAULT_PREFIX) + ["unsafe=1"] * self.unsafe
        return (
            f"redis{'s' * self.tls}://{self.user}{'@' * bool(self.user)}{host}:{self.port}/{self.db}"
            + "?" * bool(options)
            + "&".join(options)
        )


def masked(address: str) -> str:
    """An address, however wrong, without what may be a password in it."""
    return re.sub(r"(password=)[^&]*", r"\1***", re.sub(r"//.*@", "//***@", address, flags=re.DOTALL))


def parse_place(address: str, where: str = "", environ: Mapping[str, str] = os.environ) -> Place:
    """What a redis address says; the password may be in the environment instead. BadInput if it is wrong."""

    def wrong(why: str) -> BadInput:
        return BadInput("store", masked(address), f"{EXPECTED}; {why}", where)

    try:
        parts = urlsplit(address)
        port = parts.port or 6379
        options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise wrong("host, port or options can't be read") from None
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise wrong("a host is needed")
    if parts.fragment:
        raise wrong("write a # in a password as %23")
    db = parts.path.removeprefix("/")
    if db and not re.fullmatch(r"[0-9]{1,6}", db):
        raise wrong(f"DB is a number, not {db!r}")
    given = dict(options)
    for key in given.keys() - {"prefix", "unsafe"}:
        raise wrong(f"there is no option {key!r}")
    prefix = given.get("prefix", DEFAULT_PREFIX)
    if not re.fullmatch(r"[A-Za-z0-9_.:-]{1,100}", prefix):
        raise wrong("a prefix is 1 to 100 letters, digits or any of _ . : -")
    if given.get("unsafe", "1") != "1":
        raise wrong("unsafe=1, or without it")
    return Place(
        host=parts.hostname,
        port=port,
        db=int(db or 0),
        user=unquote(parts.username or ""),
        password=unquote(parts.password or "") or environ.get(PASSWORD_ENV, ""),
        tls=parts.scheme == "rediss",
        prefix=prefix,
        unsafe="unsafe" in given,
    )


class Script:
    """A Lua script: the server carries it out as a whole, and nothing of others in between."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = sha1(text.encode(), usedforsecurity=False).hexdigest()


class Wire:
    """One connection. After `Lost` it is of no more use."""

    def __init__(self, place: Place, where: str) -> None:
        """Connects. Lost if that fails, StoreError if the server does not let us in."""
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            expected = "a store that is installed: pip install 'ray-pools[redis]' on every node"
            raise BadInput("store", place.shown, expected) from None
        self._errors = redis.exceptions
        self._place, self._where = place, where
        self._syncs: bool | None = None
        kind = redis.SSLConnection if place.tls else redis.Connection
        self._connection: Any = kind(
            host=place.host,
            port=place.port,
            db=place.db,
            username=place.user or None,
            password=place.password or None,
            socket_connect_timeout=CONNECT_WAIT_S,
            socket_timeout=ANSWER_WAIT_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        deadline = time.monotonic() + LOADING_WAIT_S
        while not self._connected(last_try=time.monotonic() > deadline):
            time.sleep(PAUSE_S)

    def _connected(self, last_try: bool) -> bool:
        """Connects, unless the server is still loading, and it is not the last try."""
        try:
            try:
                self._connection.connect()
            except self._errors.BusyLoadingError as error:
                raise Loading(self._clean(error)) from None
            except self._errors.AuthenticationError as error:
                raise self._not_let_in(error) from None
            except (self._errors.RedisError, OSError) as error:
                raise Lost(self._clean(error)) from None
            self.call("PING")
        except Loading:
            self.close()
            if last_try:
                raise
            return False
        except Refusal as error:
            self.close()
            raise StoreError(self._where, f"the server refuses: {error}") from None
        except BaseException:
            self.close()
            raise
        return True

    def close(self) -> None:
        """Lets go of the connection. May be called twice."""
        self._connection.disconnect()

    def is_gone(self) -> bool:
        """Whether the other side has hung up, as it shows without sending anything."""
        try:
            return bool(self._connection.can_read(timeout=0))  # nobody owes us an answer
        except (self._errors.RedisError, OSError):
            return True

    def call(self, *command: bytes | str | int) -> Any:
        """The answer to one command. Raises Lost, Refusal."""
        answer = self.many([command])[0]
        if isinstance(answer, Refusal):
            raise answer
        return answer

    def many(self, commands: Sequence[Sequence[bytes | str | int]]) -> list[Any]:
        """The answers to some commands that are sent at once; those that are errors as Refusal. Raises Lost."""
        try:
            packed = self._connection.pack_commands(commands)
            self._connection.send_packed_command(packed, check_health=False)
            return [self._answer() for _ in commands]
        except self._errors.BusyLoadingError as error:
            self.close()
            raise Loading(self._clean(error)) from None
        except self._errors.AuthenticationError as error:
            self.close()
            raise self._not_let_in(error) from None
        except (self._errors.RedisError, OSError) as error:
            self.close()
            raise Lost(self._clean(error)) from None
        except BaseException:
            self.close()  # an answer that nobody waited for would be taken for that of the next command
            raise

    def together(self, commands: Sequence[Sequence[bytes | str | int]]) -> list[Any]:
        """The answers to reads with nothing of others in between. Raises Lost, Refusal."""
        answers = self.many([("MULTI",), *commands, ("EXEC",)])
        for answer in answers:
            if isinstance(answer, Refusal):
                raise answer
        found: list[Any] = answers[-1]
        for answer in found:
            if isinstance(answer, Exception):
                raise Refusal(self._clean(answer))
        return found

    def run(
        self, script: Script, keys: Sequence[str], values: Sequence[bytes | str | int], sync: bool = True
    ) -> Any:
        """What a script answers, once all of its writes are on disk. Raises Lost, Refusal, NotSynced.

        With appendfsync=always a server answers no write before it has synced; that it did is asked where it
        can be asked (WAITAOF, Redis 7.2), since settings may be changed at any time.
        """
        wait: list[tuple[bytes | str | int, ...]] = []
        if sync and self._can_wait():
            wait.append(("WAITAOF", 1, 0, int(ANSWER_WAIT_S * 900)))
        arguments = (len(keys), *keys, *values)
        answers = self.many([("EVALSHA", script.sha, *arguments), *wait])
        if isinstance(answers[0], Refusal) and answers[0].code == "NOSCRIPT":
            answers = self.many([("EVAL", script.text, *arguments), *wait])
        if isinstance(answers[0], Refusal):
            raise answers[0]
        for synced in answers[1:]:
            if isinstance(synced, Refusal) or synced[0] < 1:
                raise NotSynced(f"the server does not confirm that it is on disk ({synced})")
        return answers[0]

    def _can_wait(self) -> bool:
        if self._syncs is None:
            self._syncs = not self._place.unsafe
            if self._syncs:
                try:
                    self.call("WAITAOF", 0, 0, 1)
                except Refusal as error:
                    if "unknown command" not in str(error):
                        raise StoreError(self._where, f"WAITAOF is refused: {error}") from None
                    self._syncs = False
        return self._syncs

    def _answer(self) -> Any:
        try:
            return self._connection.read_response()
        except (self._errors.AuthenticationError, self._errors.ConnectionError):
            raise
        except self._errors.ResponseError as error:
            return Refusal(self._clean(error))

    def _not_let_in(self, error: Exception) -> StoreError:
        return StoreError(
            self._where,
            f"the server does not let us in: {self._clean(error)} (user and password are in the address, "
            f"or the password in {PASSWORD_ENV})",
        )

    def _clean(self, error: Exception) -> str:
        """What an error says, its code first, in one line and without the password."""
        text = " ".join(str(error).split()) or type(error).__name__
        code = _CODES.get(type(error).__name__)
        if code is not None and not text.startswith(code):  # the package cuts the codes it knows off
            text = f"{code} {text}"
        return text.replace(self._place.password, "***") if self._place.password else text


_CODES = {
    "NoScriptError": "NOSCRIPT",
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "NoPermissionError": "NOPERM",
    "ExecAbortError": "EXECABORT",
    "MovedError": "MOVED",
    "MasterDownError": "MASTERDOWN",
    "ClusterDownError": "CLUSTERDOWN",
}


def keep_promises(wire: Wire, where: str) -> None:
    """UnsafeStore unless the server's settings keep what it acknowledges, through a crash and a full memory."""
    hint = "; ?unsafe=1 in the address opens it all the same"
    try:
        wrong = []
        for setting, (wanted, otherwise) in SETTINGS.items():
            found = wire.call("CONFIG", "GET", setting)
            value = found[1].decode() if len(found) == 2 else None
            if value != wanted:
                wrong.append(f"{setting} is {value}, not {wanted}: {otherwise}")
        info = _info(wire.call("INFO", "persistence")) | _info(wire.call("INFO", "replication"))
    except Refusal as error:
        raise UnsafeStore(where, f"the server does not tell its settings: {error}{hint}") from None
    if info.get("role") != "master":
        wrong.append(f"its role is {info.get('role')}, not master")
    if info.get("aof_last_write_status", "ok") != "ok":
        wrong.append("its last write to disk failed")
    if "1" in (info.get("aof_rewrite_in_progress"), info.get("aof_rewrite_scheduled")) and (
        info.get("aof_base_size") == "0"
    ):
        wrong.append("appendonly was switched on just now, and its first file is not complete yet")
    if wrong:
        raise UnsafeStore(where, "; ".join(wrong) + hint)


def _info(answer: bytes) -> dict[str, str]:
    lines = (line.split(":", 1) for line in answer.decode(errors="replace").splitlines())
    return {line[0]: line[1] for line in lines if len(line) == 2}


__all__ = [
    "Lost",
    "NotSynced",
    "PASSWORD_ENV",
    "Place",
    "Refusal",
    "SCHEMES",
    "Script",
    "Wire",
    "keep_promises",
    "masked",
    "parse_place",
]
