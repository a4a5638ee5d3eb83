"""What happened, for wake-ups and as the audit log. Events are never the truth: records are."""

from __future__ import annotations

from nodeagent.model.base import Record


class Event(Record):
    """One line of the capped stream."""

    id: str
    """The stream's id (milliseconds-sequence); orders events."""
    kind: str
    """e.g. JobSubmitted, GenerationForming, GenerationActive, GenerationStarted, WorkerFailed, NodeLost,
    NodeJoined, JobScaled, NodeCordoned."""
    job: str = ""
    """Job name."""
    uid: str = ""
    node: str = ""
    generation: int = 0
    by: str = ""
    """Node or user that caused it."""
    text: str = ""
