"""Maintenance windows: times at which nodes take no work, known in advance. All of them are one record, like the
queues.

Owns the meaning of each field. What follows from a window is ``plan/windows.py``'s.
"""

from __future__ import annotations

from pydantic import Field

from nodeagent.model.base import Record
from nodeagent.model.constraints import named

MOST_WINDOWS = 256
MOST_PATTERNS = 64
"""Names, or names with ranges, of one window."""
MOST_WHY = 1000
"""Characters."""


class Window(Record):
    """One window: from ``start`` to ``end`` its nodes take no work."""

    id: str = Field(pattern=r"^w[0-9]{1,16}$")
    nodes: tuple[str, ...] = Field(min_length=1, max_length=MOST_PATTERNS)
    """Names, or names with ranges (``n[1-8]``). A node that joins later is meant as well."""
    start: int
    """Served time (ms): while the store is away it stands still."""
    end: int
    """Likewise."""
    starts: float
    """Unix time of ``start`` as it was asked for, for people only."""
    ends: float
    """Likewise."""
    why: str = Field(default="", max_length=MOST_WHY)
    by: str
    text: str
    """All of this in words, for whoever asks about one of its nodes: as what follows "is", or by itself."""

    def names(self, node: str) -> bool:
        """Whether this node is one of them."""
        return named(self.nodes, node)


class Windows(Record):
    """All windows, as an operator left them. Every write raises ``rev``."""

    rev: int = Field(default=0, ge=0)
    """0: nothing is stored."""
    by: str = ""
    """Who wrote last."""
    windows: tuple[Window, ...] = Field(default=(), max_length=MOST_WINDOWS)
    """In the order in which they were made."""
    signature: str = ""
    """The cluster key's, of all this: agents act on no other (``trust/seal.py``)."""


class WindowsRecord(Record):
    """They as the store has them."""

    windows: Windows
    rev: int = 0
    """The store's revision, as of any record."""


NO_WINDOWS = Windows()


class ReservedNode(Record):
    """What a window means for one of its nodes now. Never stored: ``plan/windows.py`` works it out for each view."""

    window: str
    """Its id."""
    text: str
    """For people: from when to when, why, and who says so."""
    leaves: bool
    """Whatever runs there goes, and nothing starts."""
    left: int = 0
    """Before that: milliseconds that a job may take which starts there now; rounded down."""
