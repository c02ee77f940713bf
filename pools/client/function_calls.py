"""The part of a Client that runs functions inside slots: `run`, `map` and `function`, and their async twins."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from typing_extensions import ParamSpec, Unpack

from ..errors import BadInput
from ..keys import Keys
from ..settings import ResourceSettings
from .announcing import Announcing
from .function import PoolFunction
from .live_status import LiveStatus
from .mapping import DEFAULT_SLOT_S, Map, MapOptions
from .running import run
from .submission import RequestArguments, Submission, submission_of, takes_request_arguments
from .tasks import Call, RayTasks, Tasks
from .transport import Transport

if TYPE_CHECKING:
    from .client import Client

P = ParamSpec("P")
R = TypeVar("R")


class FunctionCalls(Announcing):
    """Base of Client, and never anything else."""

    def __init__(self, transport: Transport, give_up_s: float, keys: Keys) -> None:
        super().__init__(transport, give_up_s, keys)
        self._tasks: Tasks = RayTasks()

    @property
    def _client(self) -> Client:
        return cast("Client", self)

    @takes_request_arguments
    def run(
        self,
        fn: Callable[..., R],
        *args: Any,
        requester: str,
        settings: ResourceSettings | None = None,
        kwargs: Mapping[str, Any] | None = None,
        ray_options: Mapping[str, Any] | None = None,
        crash_retries: int = 0,
        timeout_s: float | None = None,
        progress: bool = False,
        **arguments: Unpack[RequestArguments],
    ) -> R:
        """Queues, runs `fn(*args, **kwargs)` as a Ray task inside the grant, gives the slot back, returns the result.

        When the slot is called back before fn has ended, it queues again and fn runs again from its beginning,
        while retries last. fn may leave early: if it has a parameter `slot` it is given the slot that it runs in,
        with `preempting`, `grace_left_s()` and `on_preempt`, and whose `check()` raises SlotPreempted; what it
        should not lose by then is for it to save. Whoever does not look runs on until the grace is over.

        The task has all of the slot's first bundle (in a pool that only counts: the amounts, wherever Ray puts it).
        ray_options change that, and what else Ray's `options` may say (`num_gpus`, `runtime_env`, ...). What fn starts
        runs inside the grant too. crash_retries: how often it runs again after its process died by itself (killed,
        out of memory); else that is Ray's error. A node that dies costs no retry. timeout_s bounds each wait.

        Raises:
            whatever fn raised: as it is.
            SlotPreempted: called back, and no retries left. Also the other errors of `Ticket.wait`, and of `submit`.
        """
        call, submission = self._run_arguments(fn, args, kwargs, ray_options, requester, settings, arguments)
        running = run(
            self._client, call, submission, crash_retries, timeout_s, lambda t: LiveStatus(t, progress)
        )
        result: R = self._background.start(running).result()
        return result

    @takes_request_arguments
    async def run_async(
        self,
        fn: Callable[..., R],
        *args: Any,
        requester: str,
        settings: ResourceSettings | None = None,
        kwargs: Mapping[str, Any] | None = None,
        ray_options: Mapping[str, Any] | None = None,
        crash_retries: int = 0,
        timeout_s: float | None = None,
        progress: bool = False,
        **arguments: Unpack[RequestArguments],
    ) -> R:
        """As `run`. A caller that is cancelled ends the task, and leaves no request behind."""
        call, submission = self._run_arguments(fn, args, kwargs, ray_options, requester, settings, arguments)
        running = run(
            self._client, call, submission, crash_retries, timeout_s, lambda t: LiveStatus(t, progress)
        )
        result: R = await self._background.start(running).outcome()
        return result

    @takes_request_arguments
    def map(
        self,
        fn: Callable[..., R],
        inputs: Iterable[Any],
        *,
        requester: str,
        settings: ResourceSettings | None = None,
        kwargs: Mapping[str, Any] | None = None,
        ray_options: Mapping[str, Any] | None = None,
        concurrency: int | None = None,
        slot_s: float = DEFAULT_SLOT_S,
        crash_retries: int = 0,
        timeout_s: float | None = None,
        progress: bool | None = None,
        return_exceptions: bool = False,
        ordered: bool = True,
        **arguments: Unpack[RequestArguments],
    ) -> Iterator[R]:
        """Yields `fn(each, **kwargs)` for each of the inputs, as `run` would: in order, or as they come (`ordered`).

        At most `concurrency` requests (32) wait or hold at a time. Each slot runs one input after the other until it
        has been held for slot_s seconds (60): then it is given back, so that others get their turn. 0 has a slot
        for each input. retries and crash_retries count per input. The first input is begun when the first result
        is asked for; inputs and results that wait are bounded, so that both may be endless. Leaving the loop ends
        what runs. progress: a bar on stderr; None means if that is a terminal.

        The first error ends the rest and is raised; with return_exceptions it takes its result's place. An error
        that is no input's (rejected, timed out, unreachable) ends the map in any case.
        """
        options = MapOptions(
            concurrency,
            slot_s,
            arguments.get("retries", 0),
            crash_retries,
            timeout_s,
            return_exceptions,
            ordered,
            progress,
        )
        return self._map(fn, inputs, kwargs, ray_options, options, requester, settings, arguments).iterate()

    @takes_request_arguments
    def map_async(
        self,
        fn: Callable[..., R],
        inputs: Iterable[Any],
        *,
        requester: str,
        settings: ResourceSettings | None = None,
        kwargs: Mapping[str, Any] | None = None,
        ray_options: Mapping[str, Any] | None = None,
        concurrency: int | None = None,
        slot_s: float = DEFAULT_SLOT_S,
        crash_retries: int = 0,
        timeout_s: float | None = None,
        progress: bool | None = None,
        return_exceptions: bool = False,
        ordered: bool = True,
        **arguments: Unpack[RequestArguments],
    ) -> AsyncIterator[R]:
        """As `map`, for `async for`."""
        options = MapOptions(
            concurrency,
            slot_s,
            arguments.get("retries", 0),
            crash_retries,
            timeout_s,
            return_exceptions,
            ordered,
            progress,
        )
        found = self._map(fn, inputs, kwargs, ray_options, options, requester, settings, arguments)
        return found.iterate_async()

    @takes_request_arguments
    def function(
        self,
        requester: str,
        settings: ResourceSettings | None = None,
        *,
        ray_options: Mapping[str, Any] | None = None,
        crash_retries: int = 0,
        timeout_s: float | None = None,
        **arguments: Unpack[RequestArguments],
    ) -> Callable[[Callable[P, R]], PoolFunction[P, R]]:
        """Decorates a function: each call of it runs in a slot of its own, as by `run`.

        @client.function(requester="vision", gpus=1, retries=3)
        def train(lr): ...

        train(0.1)                 # queues, runs, returns the result
        list(train.map([0.1, 0.2]))
        """
        submission_of(requester, settings, arguments)
        more: dict[str, Any] = {
            "requester": requester,
            "settings": settings,
            "ray_options": ray_options,
            "crash_retries": crash_retries,
            "timeout_s": timeout_s,
            **arguments,
        }
        return lambda function: PoolFunction(self._client, function, more)

    def _run_arguments(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        ray_options: Mapping[str, Any] | None,
        requester: str,
        settings: ResourceSettings | None,
        arguments: Mapping[str, Any],
    ) -> tuple[Call, Submission]:
        self._check_usable()
        call = Call(fn, args, {} if kwargs is None else kwargs, ray_options or {})
        return call, submission_of(requester, settings, arguments)

    def _map(
        self,
        fn: Callable[..., Any],
        inputs: Iterable[Any],
        kwargs: Mapping[str, Any] | None,
        ray_options: Mapping[str, Any] | None,
        options: MapOptions,
        requester: str,
        settings: ResourceSettings | None,
        arguments: Mapping[str, Any],
    ) -> Map:
        if not isinstance(inputs, Iterable):
            raise BadInput("inputs", inputs, "something that can be iterated over")
        for name in ("id", "token"):
            if arguments.get(name) is not None:
                raise BadInput(name, arguments[name], "left out: a map makes many requests")
        call, _ = self._run_arguments(fn, (None,), kwargs, ray_options, requester, settings, arguments)
        return Map(
            self._client,
            lambda value: Call(call.function, (value,), call.kwargs, call.ray_options),
            inputs,
            lambda: submission_of(requester, settings, arguments),
            options,
        )
