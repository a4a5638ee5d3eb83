"""What ended jobs left on this node: their output and their pods' records, removed when they are old or too many.

A job that has not ended, that has a pod here, or of which the agent cannot say is left alone. The folders are their
users', so they are looked into and removed beside the loop, by ``osutil.untrusted``. Nothing else removes them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.osutil.untrusted import (
    NotSeenError,
    OneAside,
    PutAsideError,
    UntrustedError,
    UntrustedFolder,
    last_written,
    remove_tree,
)
from nodeagent.plan.queueing.dependencies import surplus
from nodeagent.spec.agentconfig import DirsConfig, RetentionConfig

LOOK = 3600.0
"""Seconds between two looks."""
COUNT = 60.0
"""Seconds after which the folders are counted: of many short jobs the output could fill a disk within an hour."""
SURPLUS = 1.25
"""Times as many folders as jobs are to be kept: then there is a look at once."""
LOOK_LIMIT = 60.0
"""Seconds for a look, and for each removal."""
_LOGS = re.compile(r".+-([0-9a-f]{8})")
_STATE = re.compile(r"([0-9a-f]{8})[0-9a-f]{24}")
_OURS = re.compile(r"g[0-9]+|shim\.log|pod\.log")
"""What a folder of output holds; without it the folder is somebody else's."""


@dataclass(frozen=True, slots=True)
class Left:
    """One folder of a job."""

    above: Path
    name: str
    job: str
    """The first 8 digits of the job's uid."""
    written: float
    """When something was last written there (wall clock), as far as the folder tells."""
    owner: int
    """The user (uid) whose folder it is."""


def found(dirs: DirsConfig) -> list[Left]:
    """Blocking. Folders that jobs have here. Raises NotSeenError."""
    output = [
        Left(dirs.logs, name, match[1], *written)
        for name in _names(dirs.logs)
        if (match := _LOGS.fullmatch(name)) and (written := _written(dirs.logs, name, needs=_OURS)) is not None
    ]
    records = [
        Left(dirs.state / "pods", name, match[1], *written)
        for name in _names(dirs.state / "pods")
        if (match := _STATE.fullmatch(name)) and (written := _written(dirs.state / "pods", name)) is not None
    ]
    return output + records


def outdated(
    left: Iterable[Left],
    jobs: Mapping[str, JobRecord],
    spared: Collection[str],
    wall: float,
    keep: RetentionConfig,
) -> list[Left]:
    """Those to be removed. ``spared``: uids of jobs that are left alone whatever is known of them."""
    known: dict[str, list[JobRecord]] = {}
    for record in jobs.values():
        known.setdefault(record.uid[:8], []).append(record)
    lives = {uid[:8] for uid in spared} | {
        short for short, records in known.items() if any(record.phase not in TERMINAL for record in records)
    }
    folders: dict[str, list[Left]] = {}
    for one in left:
        if one.job not in lives:
            folders.setdefault(one.job, []).append(one)

    def ended(job: str) -> float:
        ends = [record.ended for record in known.get(job, []) if record.ended is not None]
        return max([*ends, *(one.written for one in folders[job])])

    newest_first = sorted(folders, key=lambda job: (-ended(job), job))
    over = frozenset(surplus(newest_first[::-1], keep.jobs, lambda job: folders[job][0].owner))
    old = [job for job in newest_first if job in over or wall - ended(job) > keep.age]
    return [one for job in old for one in folders[job]]


class Retention:
    """The task. ``view`` gives what is known of jobs, which are to be spared, and the Unix time that it is for the
    others; None while that is not certain."""

    def __init__(
        self,
        dirs: DirsConfig,
        keep: Callable[[], RetentionConfig],
        view: Callable[[], tuple[Mapping[str, JobRecord], Collection[str], float] | None],
    ) -> None:
        self._dirs, self._keep, self._view = dirs, keep, view
        self._counted = 0
        """Folders of output at the last look. It has left what it may leave, which of several users is more."""
        self._aside = OneAside()
        """Looks and removals."""
        self._log = structlog.get_logger("retention")

    async def run(self) -> None:
        """Look now and then, and when there is too much."""
        while True:
            for _ in range(int(LOOK / COUNT)):
                await asyncio.sleep(COUNT)
                if await self.crowded():
                    break
            await self.look()

    async def crowded(self) -> bool:
        """Clearly more jobs have output here than are to be kept."""
        try:
            names = await self._aside.run(lambda: _names(self._dirs.logs), LOOK_LIMIT)
        except UntrustedError:  # the next look says why
            return False
        return sum(map(bool, map(_LOGS.fullmatch, names))) > SURPLUS * max(self._keep().jobs, self._counted)

    async def look(self) -> None:
        """Remove what is outdated now."""
        try:
            left = await self._aside.run(lambda: found(self._dirs), LOOK_LIMIT)
        except UntrustedError as error:
            self._log.warning("what ended jobs left is not looked at", why=str(error))
            return
        view = self._view()
        self._counted = sum(one.above == self._dirs.logs for one in left)
        for one in outdated(left, *view, self._keep()) if view is not None else ():
            try:
                await self._aside.run(lambda one=one: remove_tree(one.above, one.name), LOOK_LIMIT)  # type: ignore[misc]
            except PutAsideError as error:
                self._counted -= one.above == self._dirs.logs
                self._log.error("what an ended job left is not all removed", why=str(error))
            except UntrustedError as error:
                self._log.warning("what an ended job left is not removed", why=str(error))
                if isinstance(error, NotSeenError):  # the next look sees the others again
                    return
            else:
                self._counted -= one.above == self._dirs.logs
                self._log.info("removed what an ended job left", folder=str(one.above / one.name))


def _names(folder: Path) -> list[str]:
    try:
        with UntrustedFolder(folder) as opened:
            return opened.names()
    except NotSeenError:
        raise
    except UntrustedError:  # no job has run here yet
        return []


def _written(above: Path, name: str, needs: re.Pattern[str] | None = None) -> tuple[float, int] | None:
    """The newest time of the folder, of its newest generation and of that one's files, and its owner; None for what is
    none of ours."""
    times: list[float] = []
    owner = 0
    try:
        with UntrustedFolder(above, name) as opened:
            names = opened.names()
            if needs is not None and not any(map(needs.fullmatch, names)):
                return None
            times.append(opened.written)
            owner = opened.owner
        numbers = [int(entry[1:]) for entry in names if re.fullmatch(r"g[0-9]{1,9}", entry)]
        if numbers:
            with UntrustedFolder(above, name, f"g{max(numbers)}") as newest:
                times.append(newest.written)
                times += [last_written(newest.facts(entry)) for entry in newest.names(100)]
    except NotSeenError:  # it would seem older than it is
        raise
    except UntrustedError:
        return (max(times), owner) if times else None
    return max(times), owner
