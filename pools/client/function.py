"""`client.function(...)`: a function with the capacity that each of its calls asks for."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from typing_extensions import ParamSpec

if TYPE_CHECKING:
    from .client import Client

P = ParamSpec("P")
R = TypeVar("R")


class PoolFunction(Generic[P, R]):
    """Made by `Client.function`. Called, it runs in a slot (`Client.run`); `map` runs it over many inputs, `local`
    is the function itself, here and at once. It stays in its process, as its client does.
    """

    def __init__(self, client: Client, function: Callable[P, R], arguments: Mapping[str, Any]) -> None:
        self._client = client
        self._arguments = dict(arguments)
        self.local = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """As `Client.run`."""
        result: R = self._client.run(self.local, *args, kwargs=kwargs, **self._arguments)
        return result

    async def run_async(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """As `Client.run_async`."""
        result: R = await self._client.run_async(self.local, *args, kwargs=kwargs, **self._arguments)
        return result

    def map(self, inputs: Iterable[Any], **more: Any) -> Iterator[R]:
        """As `Client.map`."""
        return self._client.map(self.local, inputs, **{**self._arguments, **more})

    def map_async(self, inputs: Iterable[Any], **more: Any) -> AsyncIterator[R]:
        """As `Client.map_async`."""
        return self._client.map_async(self.local, inputs, **{**self._arguments, **more})

    def options(self, **changes: Any) -> PoolFunction[P, R]:
        """The same function with other arguments of its requests: `train.options(gpus=8)(data)`."""
        return PoolFunction(self._client, self.local, {**self._arguments, **changes})

    def __repr__(self) -> str:
        return f"<PoolFunction {getattr(self.local, '__name__', self.local)!s}>"
