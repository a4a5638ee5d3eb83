"""In which order the roles of a pod are asked to stop: who comes after others is asked before them.

Standard library only. The reverse of the order in which they start, as systemd does it: a trainer may need its
parameter servers to save, and MindSpore's workers their scheduler to leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nodeagent.model.roleorder import comes_after

HALF = 0.5
"""Of the grace: then everybody is asked, so that who is last has some of it."""


class Turns:
    """Of one stop. ``roles``: the pod's, by name, each with those that it comes ``after``."""

    def __init__(self, roles: Mapping[str, Mapping[str, Any]]) -> None:
        self._before = comes_after({name: role["after"] for name, role in roles.items()})
        self.elsewhere: frozenset[str] = frozenset()
        """Roles that workers on other nodes still come after."""
        self.over = False
        """Everybody's turn has come."""

    def has_come(self, role: str, living: Iterable[str]) -> bool:
        """Whether workers of this role are to be asked, while workers of these roles live here."""
        needed = role in self.elsewhere or any(role in self._before.get(other, ()) for other in living)
        return self.over or not needed
