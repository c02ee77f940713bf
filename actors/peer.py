"""One actor's calls to another: one at a time, with what is news at that moment, until the other has it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import ray

from ray_pools import wire
from ray_pools.core.link import Message
from ray_pools.errors import Refused

log = logging.getLogger("ray_pools")

_CALL_TIMEOUT_S = 10.0
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.05, 1.0
# After this long without an answer, others stop waiting for it.
SILENT_AFTER_S = 5.0


class PeerCaller:
    """Keeps one peer informed. `outgoing` gives the message, or None; `incoming` works its answer in."""

    def __init__(
        self,
        actor_name: str,
        namespace: str,
        me: str,
        outgoing: Callable[[], Message | None],
        incoming: Callable[[Message], Awaitable[Any]],
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
        # the code of its refusal, if it refused
        self.refused = ""

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
        try:
            while not self._closed and (message := self._outgoing()) is not None:
                try:
                    answer = await self._exchange(message)
                except Exception as error:  # noqa: BLE001 - whatever it is, the peer does not have it: say it again
                    log.info("%s does not reach %s: %s", self.me, self.actor_name, error)
                    self._handle = None
                    self.trouble = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
                    self.refused = error.code if isinstance(error, Refused) else ""
                    if self._silent and self._loop.time() - since >= SILENT_AFTER_S:
                        self._silent()
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)
                    continue
                self.trouble = self.refused = ""
                backoff_s, since = _BACKOFF_FIRST_S, self._loop.time()
                await self._incoming(answer)
        finally:
            self._task = None

    async def _exchange(self, message: Message) -> Message:
        if self._handle is None:  # blocks while the GCS is down: never on the loop
            self._handle = await self._loop.run_in_executor(
                None, lambda: ray.get_actor(self.actor_name, namespace=self.namespace)
            )
        request = wire.encode_request([{"op": "exchange", "from": self.me, "message": list(message)}])
        response = await asyncio.wait_for(self._handle.call.remote(request), _CALL_TIMEOUT_S)
        (result,) = wire.decode_response(response, 1, self.actor_name)
        return Message(*wire.value_of(result))
