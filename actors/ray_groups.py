"""All of Ray that placement needs, behind six calls, so that the placer is tested without a cluster.

Every call blocks, and fails or hangs while the GCS is down. Ray is imported when first used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

CREATED, REMOVED = "CREATED", "REMOVED"

View = dict[str, float]
"""Group (hex) to its free bundles, as the nodes reported last: fewer than it has if anything runs in it."""

_BUNDLE_KEY = re.compile(r"bundle_group_([0-9a-f]{30,})")
_PER_BUNDLE = 1000.0  # of the resource that stands for each bundle; each task or actor takes 0.001 of it


class NameTaken(Exception):
    """A placement group of this name exists."""


class Impossible(Exception):
    """Ray refuses the group for what it asks, now and ever."""


class GroupInfo(NamedTuple):
    """One group as the GCS knows it. `scheduling` says why it is not created yet, in Ray's word."""

    state: str
    bundles: Sequence[Mapping[str, float]]
    scheduling: str = ""

    @property
    def removed(self) -> bool:
        return self.state == REMOVED


class Groups(Protocol):
    """What the placer asks of Ray."""

    def list(self, prefix: str) -> dict[str, str]: ...
    def create(
        self, name: str, bundles: Sequence[Mapping[str, float]], strategy: str, selector: Mapping[str, str]
    ) -> str: ...
    def find(self, name: str) -> str | None: ...
    def info(self, hex: str) -> GroupInfo | None: ...
    def remove(self, hex: str) -> None: ...
    def view(self) -> View: ...


class RayGroups:
    """The cluster that this process is connected to."""

    def list(self, prefix: str) -> dict[str, str]:
        """Name to hex of the groups that exist and whose name starts so. Slow where there were many groups."""
        from ray.util import placement_group_table

        return {
            str(info["name"]): str(hex)
            for hex, info in placement_group_table().items()
            if str(info["name"]).startswith(prefix) and info["state"] != REMOVED
        }

    def create(
        self, name: str, bundles: Sequence[Mapping[str, float]], strategy: str, selector: Mapping[str, str]
    ) -> str:
        """The hex of a new detached group; NameTaken, Impossible."""
        from ray.exceptions import RaySystemError
        from ray.util import placement_group

        try:
            group = placement_group(
                [dict(bundle) for bundle in bundles],
                strategy,
                name,
                "detached",
                bundle_label_selector=[dict(selector) for _ in bundles] if selector else None,
            )
        except (ValueError, TypeError) as problem:
            raise Impossible(str(problem)) from None
        except RaySystemError as problem:
            if "already exists" in str(problem):
                raise NameTaken(name) from None
            raise
        return str(group.id.hex())

    def find(self, name: str) -> str | None:
        """The hex of an existing group that was made in this process's namespace."""
        from ray.util import get_placement_group

        try:
            return str(get_placement_group(name).id.hex())
        except ValueError:
            return None

    def info(self, hex: str) -> GroupInfo | None:
        """None: never heard of it."""
        from ray.util import placement_group_table

        info = placement_group_table(self._handle(hex))
        if not info:
            return None
        stats: Mapping[str, Any] = info.get("stats") or {}
        return GroupInfo(
            str(info["state"]), list(info["bundles"].values()), str(stats.get("scheduling_state", ""))
        )

    def remove(self, hex: str) -> None:
        """Removed when this returns; what runs in it dies a little later."""
        from ray.util import remove_placement_group

        remove_placement_group(self._handle(hex))

    def view(self) -> View:
        """The groups that any node still reports."""
        from ray._private.state import state  # no public call tells what each node reported

        found: View = {}
        for resources in state.available_resources_per_node().values():
            for resource, amount in resources.items():
                match = _BUNDLE_KEY.fullmatch(resource)
                if match:
                    found[match[1]] = found.get(match[1], 0.0) + amount / _PER_BUNDLE
        return found

    @staticmethod
    def _handle(hex: str) -> Any:
        from ray._raylet import PlacementGroupID
        from ray.util.placement_group import PlacementGroup

        return PlacementGroup(PlacementGroupID(bytes.fromhex(hex)))
