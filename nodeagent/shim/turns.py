"""In which order the roles of a pod are asked to stop: who comes after others is asked before them.

Standard library only. The reverse of the order in which they start, as systemd does it: a trainer may need its
parameter servers to save, and MindSpore's workers their scheduler to leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

HALF = 0.5
"""Of the grace: then everybody is asked, so that who is last has some of it."""


class Turns:
    """Of one stop. ``roles``: the pod's, by name, each with those that it comes ``after``."""

    def __init__(self, roles: Mapping[str, Mapping[str, Any]]) -> None:
        self._before = {name: _reached(name, roles) for name in roles}
        self.elsewhere: frozenset[str] = frozenset()
        """Roles that workers on other nodes still come after."""
        self.over = False
        """Everybody's turn has come."""

    def has_come(self, role: str, living: Iterable[str]) -> bool:
        """Whether workers of this role are to be asked, while workers of these roles live here."""
        needed = role in self.elsewhere or any(role in self._before.get(other, ()) for other in living)
        return self.over or not needed


def _reached(name: str, roles: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    """All roles that have to start before this one, directly or through others."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for other in roles[waiting.pop()]["after"]:
            if other in roles and other not in found:
                found.add(other)
                waiting.append(other)
    return frozenset(found)
