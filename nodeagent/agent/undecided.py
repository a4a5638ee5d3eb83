"""Decisions about one job that failed: a rule of ``plan/`` raised. That is a defect, and it concerns this job alone: it
is left as it is, and all others are decided.

Owns what is caught, and to whom it is reported. Must only ever guard a pure decision about one job or one pod: never
what waits, reads or writes, and nothing that is about the whole cluster.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Container, Mapping
from pathlib import PurePath
from typing import Literal, TypeVar

import structlog

T = TypeVar("T")

Guarded = Literal["step", "pod", "removal", "message"]
"""A job's next step; what this node does for its pod of the job; whose turn it is to remove the record; and the message
that asks a shim or the store to carry a decision out."""


class Undecided:
    """One agent's. ``counted`` is called with each decision that failed at a place in the code where it had not yet."""

    def __init__(self, node: str, counted: Callable[[Guarded], None]) -> None:
        self._counted = counted
        self._now: dict[tuple[str, Guarded], str] = {}
        """By job (uid): where the decision failed when it was made last, of those that failed."""
        self._logged: dict[str, set[tuple[Guarded, str]]] = {}
        """By job: what the log has. Places in the code, so there are few."""
        self._log = structlog.get_logger("undecided").bind(node=node)

    def guard(self, kind: Guarded, uid: str, decide: Callable[[], T]) -> T | None:
        """What ``decide``, which is pure, finds for this job; None if it raised: then nothing is decided for it. Raises
        MemoryError, which is the machine's."""
        try:
            found = decide()
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 (a defect may raise anything, and the jobs of others are to go on)
            self.failed(kind, uid, error)
            return None
        if self._now:
            self._now.pop((uid, kind), None)
        return found

    def failed(self, kind: Guarded, uid: str, error: Exception) -> None:
        """Said and counted once for each place in the code, however often it is tried again."""
        place = _place(error)
        self._now[uid, kind] = place
        logged = self._logged.setdefault(uid, set())
        if (kind, place) in logged:
            return
        logged.add((kind, place))
        self._counted(kind)
        self._log.error(
            "a decision failed: a defect of nodeagent, please report it; this job is left as it is, all others go on",
            uid=uid, decision=kind, place=place, exc_info=error,
        )  # fmt: skip

    def keep(self, *known: Container[str]) -> None:
        """Forget all jobs that are in none of these."""
        for uid in [uid for uid in self._logged if not any(uid in some for some in known)]:
            del self._logged[uid]
        for key in [key for key in self._now if key[0] not in self._logged]:
            del self._now[key]

    def of(self, uid: str) -> tuple[str, ...]:
        """What people read about this job; empty if all was decided."""
        return tuple(
            f"this agent cannot decide {_WHAT[kind]}, and leaves the job as it is: a defect of nodeagent ({place}); "
            "please report it with what the agent's log says"
            for (concerned, kind), place in sorted(self._now.items())
            if concerned == uid
        )

    @property
    def now(self) -> Mapping[str, str]:
        """Jobs (uids) that are left as they are, with where the decision failed."""
        return {uid: place for (uid, _), place in sorted(self._now.items())}


_WHAT: Mapping[Guarded, str] = {
    "step": "its next step",
    "pod": "what its pod here is to do",
    "removal": "who removes its record",
    "message": "what to ask its shim or the store",
}


def _place(error: Exception) -> str:
    """Its type and where it was raised. Not its words: anybody may read this, and they may have values of the job."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {'/'.join(PurePath(frames[-1].filename).parts[-2:])}, line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}"
