"""One call of a function as a Ray task inside a slot: started, watched, killed, and what its end means.

Ray itself never retries these tasks: one that is sent again into a removed placement group would wait for ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import BadInput
from .inside import call_inside

if TYPE_CHECKING:
    from .slot import Slot

_OURS = (
    "scheduling_strategy",
    "max_retries",
    "retry_exceptions",
    "num_returns",
    "label_selector",
    "placement_group",
)
_MB = 1_000_000


@dataclass(frozen=True)
class Call:
    """What is to be called, checked when made. `ray_options`: for the task, on top of what the slot says."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    ray_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not callable(self.plain):
            raise BadInput("fn", self.function, "a function")
        if not isinstance(self.kwargs, Mapping) or not all(isinstance(key, str) for key in self.kwargs):
            raise BadInput("kwargs", self.kwargs, "a mapping of the function's keyword arguments")
        for name in self.ray_options:
            if name in _OURS:
                raise BadInput(f"ray_options.{name}", self.ray_options[name], "left out: the slot says it")

    @property
    def plain(self) -> Callable[..., Any]:
        """The function itself, where it was given as one of Ray's."""
        found: Callable[..., Any] = getattr(self.function, "_function", self.function)
        return found

    @property
    def name(self) -> str:
        return str(getattr(self.plain, "__name__", type(self.plain).__name__))

    @property
    def wants_slot(self) -> bool:
        """It has a parameter called `slot`, and nobody gave it one."""
        try:
            signature = inspect.signature(self.plain)
            given = signature.bind_partial(*self.args, **self.kwargs).arguments
        except (TypeError, ValueError):  # Python says what is wrong where it is called
            return False
        parameter = signature.parameters.get("slot")
        by_name = parameter is not None and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        return by_name and "slot" not in given


class Task(Protocol):
    """A call under way."""

    outcome: Future[Any]

    def kill(self) -> None:
        """Its process ends; harmless when it has ended."""
        ...


class Tasks(Protocol):
    """What runs calls: Ray, but for tests."""

    def start(self, slot: Slot, call: Call) -> Task:
        """Raises SlotOver when the slot is over."""
        ...

    def crash(self, problem: BaseException) -> bool:
        """Did the process, its node or its placement group die, rather than the function raise?"""
        ...

    def own_error(self, problem: BaseException) -> BaseException:
        """What the function raised."""
        ...

    def group_is_gone(self, slot: Slot) -> bool:
        """The placement group was removed, or its node is gone; False where the slot only counts."""
        ...


class RayTask:
    """A task of Ray's."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref
        self.outcome: Future[Any] = ref.future()

    def kill(self) -> None:
        import ray

        if not self.outcome.done():
            ray.cancel(self._ref, force=True)


class RayTasks:
    """Calls as Ray tasks."""

    def start(self, slot: Slot, call: Call) -> RayTask:
        import ray

        handed = {"namespace": slot._ticket._client.namespace, "view": slot.as_handed()}
        entry = ray.remote(call_inside).options(
            name=call.name, max_retries=0, **{**task_options(slot), **call.ray_options}
        )
        # the function's own arguments stand at the top, so that Ray resolves object references among them
        ref = entry.remote(handed if call.wants_slot else None, call.plain, *call.args, **call.kwargs)
        return RayTask(ref)

    def crash(self, problem: BaseException) -> bool:
        from ray import exceptions as ray_errors

        names = (
            "WorkerCrashedError", "OutOfMemoryError", "NodeDiedError", "LocalRayletDiedError", "ObjectLostError",
            "TaskPlacementGroupRemoved", "RaySystemError", "TaskCancelledError",
        )  # fmt: skip
        kinds = tuple(getattr(ray_errors, name) for name in names if hasattr(ray_errors, name))
        return isinstance(problem, kinds) and not isinstance(problem, ray_errors.RayTaskError)

    def own_error(self, problem: BaseException) -> BaseException:
        from ray import exceptions as ray_errors

        cause = getattr(problem, "cause", None)
        if isinstance(problem, ray_errors.RayTaskError) and isinstance(cause, BaseException):
            cause.__cause__ = problem  # with the traceback of the worker in its text
            return cause
        return problem

    def group_is_gone(self, slot: Slot) -> bool:
        from ray.util import placement_group_table

        if slot.counts_only or slot.over:
            return slot.over
        return bool(placement_group_table(slot.placement_group).get("state") != "CREATED")


def task_options(slot: Slot) -> dict[str, Any]:
    """All of the slot's first bundle, inside its placement group; where it only counts, the amounts themselves."""
    if slot.counts_only:
        memory_mb = slot.resources.get("memory_mb", 0)
        options: dict[str, Any] = {
            "num_gpus": slot.resources.get("gpu", 0),
            "num_cpus": slot.resources.get("mcpu", 1000) / 1000,
        }
        if memory_mb:
            options["memory"] = memory_mb * _MB
        if slot.label_selector:
            options["label_selector"] = slot.label_selector
        return options
    bundle = slot.bundles[0]
    options = {
        "scheduling_strategy": slot.scheduling_strategy_for(0),
        "num_cpus": bundle.pop("CPU", 0),
        "num_gpus": bundle.pop("GPU", 0),
    }
    if "memory" in bundle:
        options["memory"] = bundle.pop("memory")
    return {**options, "resources": bundle} if bundle else options
