"""One actor's calls to another: one at a time, with what is news at that moment, until the other has it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import ray

from ray_pools import wire
from ray_pools.core.link import SHORTER_LOG, Message, ShorterLog
from ray_pools.errors import PoolsError, Refused

log = logging.getLogger("ray_pools")

_CALL_TIMEOUT_S = 10.0
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.05, 1.0
# After this long without an answer, others stop waiting for it.
SILENT_AFTER_S = 5.0
# Coordinator and pool exchange a message at least this often (and a fifth more or less), also where nothing happens:
# a log that lost something shows within this time.
BEAT_S = 5.0


def exchange_op(me: str, message: Message) -> dict[str, Any]:
    """The call of an exchange. An older version reads `message`; a newer one `whole`, and answers as wholly."""
    return {
        "op": "exchange",
        "from": me,
        "message": message.to_wire(whole=False),
        "whole": message.to_wire(),
    }


def message_of(op: Mapping[str, Any]) -> Message:
    """The message of an exchange."""
    return Message(*op.get("whole", op["message"]))


def answer_to(op: Mapping[str, Any], message: Message) -> list[Any]:
    """The answer, as the caller's version takes it."""
    return message.to_wire(whole="whole" in op)


def beat_after_s(beat_s: float) -> float:
    """When to exchange again where nothing happens: actors that started together don't all call at once."""
    return beat_s * random.uniform(0.8, 1.2)


class PeerCaller:
    """Keeps one peer informed. `outgoing` gives the message, or None; `incoming` works its answer to it in."""

    def __init__(
        self,
        actor_name: str,
        namespace: str,
        me: str,
        outgoing: Callable[[], Message | None],
        incoming: Callable[[Message, Message], Awaitable[list[Any]]],
        silent: Callable[[], None] | None = None,
    ) -> None:
        self.actor_name, self.namespace, self.me = actor_name, namespace, me
        self._outgoing, self._incoming, self._silent = outgoing, incoming, silent
        self._loop = asyncio.get_running_loop()
        self._handle: Any = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        # why the peer does not have our news, as far as known; shown in status
        self.trouble = ""
        # whose log lost something, if that is why
        self.lost = ""
        # when it last took our news and answered
        self.spoke_at = 0.0

    def poke(self, delay_s: float = 0.0) -> None:
        """There is news: tell it now, or after a delay unless it is known by then."""
        if self._task is not None or self._closed:
            return
        if delay_s > 0:
            if self._timer is None:
                self._timer = self._loop.call_later(delay_s, self._after_delay)
            return
        self._task = self._loop.create_task(self._run())

    def close(self) -> None:
        """Nothing more is told."""
        self._closed = True

    def _after_delay(self) -> None:
        self._timer = None
        self.poke()

    async def _run(self) -> None:
        backoff_s, since = _BACKOFF_FIRST_S, self._loop.time()
        before: Message | None = None
        try:
            while not self._closed and (message := self._outgoing()) is not None:
                if message == before:  # it was heard, and brought nothing
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)
                try:
                    await self._speak(message)
                except Exception as error:  # noqa: BLE001 - whatever it is, the peer does not have it: say it again
                    log.info("%s does not reach %s: %s", self.me, self.actor_name, error)
                    self._handle = None
                    self.trouble = str(error).splitlines()[0][:600] if str(error) else type(error).__name__
                    if self._silent and self._loop.time() - since >= SILENT_AFTER_S:
                        self._silent()
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)
                    continue
                self.trouble = self.lost = ""
                since = self.spoke_at = self._loop.time()
                if message != before:
                    backoff_s = _BACKOFF_FIRST_S
                before = message
        finally:
            self._task = None

    async def _speak(self, message: Message) -> None:
        """The peer takes the message, and its answer is worked in. Raises what refused either."""
        try:
            answer = await self._exchange(message)
        except Refused as error:
            self.lost = error.details.get("log", self.me) if error.code == SHORTER_LOG else ""
            raise
        except Exception:
            self.lost = ""
            raise
        (said,) = await self._incoming(answer, message)
        if isinstance(said, PoolsError):
            self.lost = said.details["log"] if isinstance(said, ShorterLog) else ""
            raise said

    async def _exchange(self, message: Message) -> Message:
        if self._handle is None:  # blocks while the GCS is down: never on the loop
            self._handle = await self._loop.run_in_executor(
                None, lambda: ray.get_actor(self.actor_name, namespace=self.namespace)
            )
        request = wire.encode_request([exchange_op(self.me, message)])
        response = await asyncio.wait_for(self._handle.call.remote(request), _CALL_TIMEOUT_S)
        (result,) = wire.decode_response(response, 1, self.actor_name)
        return Message(*wire.value_of(result))
