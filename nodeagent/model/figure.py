"""What a check of the hardware measured, as nodes tell each other. Owns the words; judges nothing."""

from __future__ import annotations

from nodeagent.model.base import Record


class Figure(Record):
    """The median of a node's results of one check."""

    kind: str
    """The device's name ("NVIDIA H200"), with their number where several work together ("8 x NVIDIA H200")."""
    check: str
    value: float
    unit: str = ""
