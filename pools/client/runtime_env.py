"""What Ray lets pass in a runtime environment, and nobody means: keys that it does not know."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import BadInput
from ..settings import unknown_key

PLUGINS = "RAY_RUNTIME_ENV_PLUGINS"
"""Ray's own variable. Where it is set the cluster may know keys of its own, and nothing can be said here."""


def check_runtime_env(given: Mapping[str, Any]) -> None:
    """BadInput for a key that Ray would leave out without a word. It is Ray's own list of keys that counts."""
    if not given or os.environ.get(PLUGINS):
        return
    try:
        from ray.runtime_env import RuntimeEnv

        known: Collection[str] = RuntimeEnv.known_fields
    except (ImportError, AttributeError):  # no Ray here, which is said later; or its list has moved
        return
    public = sorted(key for key in known if not key.startswith("_"))
    for key, value in given.items():
        if key not in known:
            expected = f"{unknown_key(key, public)}; for a plugin's set {PLUGINS} here, as on the cluster"
            raise BadInput(f"runtime_env.{key!s:.40}", value, expected)
