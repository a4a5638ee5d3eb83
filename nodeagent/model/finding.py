"""What a look at some part of the system found: how bad, what, and what to do. Must never judge anything itself."""

from __future__ import annotations

from typing import Literal

from nodeagent.model.base import Record

Severity = Literal["error", "warning", "info"]


class Finding(Record):
    """One thing that is wrong, or worth knowing."""

    severity: Severity
    """``error``: work can be lost or go wrong; ``warning``: it holds, with less room than it should; ``info``: no
    action needed, or it could not be found out."""
    what: str
    """A sentence with the numbers."""
    fix: str
    """The exact line to run or to change; empty where there is nothing to do."""
