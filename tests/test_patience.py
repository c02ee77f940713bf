"""Fault: Ctrl-C comes at the very moment in which a wait begins, and the wait goes on for ever."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ray_pools as pools
from ray_pools.client.background import Background


@pytest.fixture
def interrupt_unheard() -> Iterator[Callable[[], None]]:
    """Interrupts this process so that the main thread's wait is not woken: another thread gets the signal, and
    Python's handler runs in the main thread when that next looks.
    """
    ask = threading.Event()

    def kill() -> None:
        ask.wait()
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=kill)
    thread.start()  # with SIGINT allowed, as the main thread has it until here
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield ask.set
    finally:
        ask.set()
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)


def test_a_ticket(client: pools.Client, interrupt_unheard: Callable[[], None]) -> None:
    ticket = client.submit("vision", gpus=1)
    threading.Timer(0.1, interrupt_unheard).start()
    with pytest.raises(KeyboardInterrupt):
        ticket.wait()


def test_what_runs_in_the_background(interrupt_unheard: Callable[[], None]) -> None:
    background = Background("test")

    async def forever(began: Any) -> None:
        began()
        await asyncio.Event().wait()

    running = background.start(forever(interrupt_unheard))
    with pytest.raises(KeyboardInterrupt):
        running.result()
    assert running.ended.done()
    background.close()
