"""Which roles of a job come after which. Standard library only: the shim imports it too."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def comes_after(after: Mapping[str, Collection[str]]) -> dict[str, frozenset[str]]:
    """Role to all roles that start before it, directly or through others. ``after``: role to those that it names."""
    return {name: _reached(name, after) for name in after}


def _reached(name: str, after: Mapping[str, Collection[str]]) -> frozenset[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for other in after[waiting.pop()]:
            if other in after and other not in found:
                found.add(other)
                waiting.append(other)
    return frozenset(found)
