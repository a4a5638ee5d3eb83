"""How many records an agent reads: a user who can write to the store can invent as many as it bears.

Must never know what a record means.
"""

from __future__ import annotations

OF_USERS, OF_FEW, OF_OPERATORS = 1 / 2, 5 / 8, 3 / 4
"""Shares of what agents read: up to the first all users together may submit jobs, up to the second those of them who
have few, up to the third operators. The rest is left for what records grow to when their gangs form, run and fail."""
FEW = 1 / 256
"""The share up to which a user has few jobs: 64 of them, 256 KiB in all."""


def submit_room(jobs: int, characters: int, *, limited: bool) -> dict[str, dict[str, int]]:
    """What there may be of jobs after a submit, where agents read so many ``jobs`` of so many ``characters``: a count
    and bytes for each of the cases that the step tells apart. ``limited``: a user submits, no operator."""

    def share(of: float) -> dict[str, int]:
        return {"jobs": int(of * jobs), "bytes": int(of * characters)}

    return {
        "read": share(1),
        "most": share(OF_USERS if limited else OF_OPERATORS),
        "few": share(OF_FEW if limited else OF_OPERATORS),
        "little": share(FEW),
    }


class RecordRoom:
    """Which records of a kind have room: so many (``most``), of so many ``characters`` together."""

    def __init__(self, most: int, characters: int) -> None:
        self._most, self._characters = most, characters
        self._sizes: dict[str, int] = {}
        self._together = 0
        self.beyond = False
        """There are records that have none, and are not read."""

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def take(self, name: str, size: int) -> bool:
        """Whether this record has room; ``size``: its characters. Raises ValueError for one that had and has grown too
        large: what is known of it must not pass for what it is now."""
        before = self._sizes.get(name)
        fits = self._together + size - (before or 0) <= self._characters
        if before is None and (not fits or len(self._sizes) >= self._most):
            self.beyond = True
            return False
        if not fits:
            raise ValueError(f"all records of its kind have more than {self._characters} characters with it")
        self._sizes[name] = size
        self._together += size - (before or 0)
        return True

    def leave(self, name: str) -> None:
        """The record is not read any more."""
        self._together -= self._sizes.pop(name, 0)
