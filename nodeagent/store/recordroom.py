"""How many records an agent reads: a user who can write to the store can invent as many as it bears.

Must never know what a record means.
"""

from __future__ import annotations


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
