"""Maintenance windows: times, known in advance, at which nodes take no work. All windows are one record, like the
queues.

Owns the meaning of each field. ``plan/nodes/availability.py`` decides by the windows.
"""

from __future__ import annotations

from pydantic import Field

from nodeagent.model.base import Record
from nodeagent.model.constraints import named

MOST_WINDOWS = 256
MOST_PATTERNS = 64
"""The most names, or names with ranges, in one window."""
MOST_WHY = 1000
"""The most characters of a reason."""


class Window(Record):
    """One window: from ``start`` to ``end`` its nodes take no work."""

    id: str = Field(pattern=r"^w[0-9]{1,16}$")
    nodes: tuple[str, ...] = Field(min_length=1, max_length=MOST_PATTERNS)
    """Names, or names with ranges (``n[1-8]``). A node that joins later is included."""
    start: int
    """Served time (ms); served time stands still while the store is unreachable."""
    end: int
    """Served time (ms), like ``start``."""
    starts: float
    """Unix time of ``start`` as the operator requested it, for people only."""
    ends: float
    """Unix time of ``end`` as the operator requested it, for people only."""
    why: str = Field(default="", max_length=MOST_WHY)
    by: str
    text: str
    """The whole window in words, for people who ask about one of its nodes: words that follow "is", or by
    themselves."""

    def names(self, node: str) -> bool:
        """Returns whether this node is in the window."""
        return named(self.nodes, node)


class Windows(Record):
    """All windows, as an operator wrote them. Every write raises ``rev``."""

    rev: int = Field(default=0, ge=0)
    """0: nothing is stored."""
    by: str = ""
    """The user who wrote last."""
    windows: tuple[Window, ...] = Field(default=(), max_length=MOST_WINDOWS)
    """In the order in which they were created."""
    signature: str = ""
    """The cluster key's signature of all windows: agents act on no other (``trust/seal.py``)."""


class WindowsRecord(Record):
    """The windows as the store keeps them."""

    windows: Windows
    rev: int = 0
    """The store's revision of the record."""


NO_WINDOWS = Windows()


class NodeWindow(Record):
    """What a window means for one of its nodes now. Never stored: ``plan/nodes/availability.py`` computes it for each
    view."""

    window: str
    """Id of the window."""
    text: str
    """For people: from when to when, why, and by which operator."""
    leaves: bool
    """All work leaves the node, and nothing starts."""
    left: int = 0
    """Before the node leaves: milliseconds that a job may take that starts there now; rounded down."""
