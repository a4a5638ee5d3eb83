"""The copy of an agent's view in its state folder: how it is written, and how much of it is believed when it is
read.

One line for each record, each with the cluster key's word, so that damage costs one record and no other cluster's file
is taken for this one's. What changes later is added behind, until that is as much as the whole. What is read is never
acted on: it is offered to a store that lost its own, and tells a record that somebody wrote over. Must never hold up
the agent's loop: the disk may hang.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import structlog
from pydantic import ValidationError

from nodeagent.agent.context import AgentContext
from nodeagent.agent.recovery import Known
from nodeagent.model.base import first_error
from nodeagent.model.job import Checkpoint, JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.model.queue import QueuesRecord
from nodeagent.model.usage import UsageDay
from nodeagent.model.window import WindowsRecord
from nodeagent.osutil.clock import wait_for
from nodeagent.osutil.linux import keep_damaged, open_plain, write_atomic
from nodeagent.osutil.threads import in_daemon
from nodeagent.plan.cluster import Cluster
from nodeagent.store.base import StoreError
from nodeagent.store.messages import Saved
from nodeagent.trust.key import ClusterKey

FORMAT = 1
SavedRecord = NodeRecord | JobRecord | UsageDay | QueuesRecord | WindowsRecord
MOST_ENDED = 256
"""Most jobs that have ended: the newest."""
MOST_BYTES = 256 * 1024**2
"""Jobs of sixteen users take as much if each has all that ``limits.job_bytes`` allows."""
WRITE_LIMIT = 10.0
"""Seconds that a write may take; after that its disk counts as hanging."""
LEAST_ROOM = 64 * 1024
"""Bytes that may be added to the file, however small it is, before it is written anew."""
MARK = 32
"""Characters of a line's signature."""
_QUEUES = "queues tree"
"""The key of the line of the queues."""
_WINDOWS = "windows all"
"""Likewise of the maintenance windows."""


@dataclass(slots=True)
class _Part:
    """The view as it was written whole, or what was added at a time."""

    header: dict[str, Any]
    announced: int
    records: list[tuple[str, SavedRecord | None]] = field(default_factory=list)
    """By key; None: it is no more."""
    wrong: list[str] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """Lines that should be there."""
        return max(0, self.announced - len(self.records) - len(self.wrong))


class Disk(Protocol):
    """Where the copy lies."""

    def read(self) -> bytes | None:
        """What was written last; None if nothing was. Raises OSError."""
        ...

    def keep_damaged(self) -> str:
        """What was written last cannot be read, or not all of it: keep it beside what will replace it. Where, in
        words."""
        ...

    async def write(self, data: bytes) -> None:
        """Replace it, whole or not at all; when this returns it outlives a power cut. Raises OSError."""
        ...

    async def append(self, data: bytes) -> None:
        """Add to what was written last; when this returns it outlives a power cut. Raises OSError, and then the
        beginning of it may be there."""
        ...


class FileDisk:
    """The real one: one file in the state folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ours: tuple[int, int, int] | None = None
        """Device, inode and size of the file as this process left it."""
        self._write: asyncio.Future[None] | None = None

    def read(self) -> bytes | None:
        try:
            with open_plain(self._path) as file:
                data = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return None
        if len(data) > MOST_BYTES:
            raise OSError(f"it is larger than {MOST_BYTES} bytes")
        return data

    def keep_damaged(self) -> str:
        return keep_damaged(self._path)

    async def write(self, data: bytes) -> None:
        await self._beside(partial(self._put, data))

    async def append(self, data: bytes) -> None:
        await self._beside(partial(self._add, data))

    async def _beside(self, put: Callable[[], None]) -> None:
        """In a thread of its own, one at a time: one that hangs costs nobody else theirs."""
        if self._write is not None and not self._write.done():
            raise OSError("the last write has not ended yet: the disk hangs")
        self._write = in_daemon(put, "savedview")
        try:
            async with asyncio.timeout(WRITE_LIMIT):
                await asyncio.shield(self._write)
        except TimeoutError:
            raise OSError(f"the disk has not answered for {WRITE_LIMIT:.0f} s") from None

    def _put(self, data: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._ours = None
        write_atomic(self._path, data, durable=True)
        found = self._path.stat()
        self._ours = found.st_dev, found.st_ino, found.st_size

    def _add(self, data: bytes) -> None:
        ours, self._ours = self._ours, None
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if (found.st_dev, found.st_ino, found.st_size) != ours:
                raise OSError("somebody else has written to it")
            left = memoryview(data)
            while left:
                left = left[os.write(fd, left) :]
            os.fsync(fd)
            self._ours = found.st_dev, found.st_ino, found.st_size + len(data)
        finally:
            os.close(fd)


class Writing:
    """Views to bytes and back. Keeps the lines of records that did not change."""

    def __init__(self, key: ClusterKey, cluster: str) -> None:
        self._key = key.derive(f"view {cluster}")
        self._lines: dict[str, tuple[int, bytes]] = {}
        self._room: int | None = None
        """Bytes that may still be added to what was packed last; None: it may not be on the disk."""

    def pack(self, known: Known) -> bytes:
        """The whole view. Raises OSError if that is more than may be saved."""
        self._room = None
        lines = self._renewed(known)
        data = b"".join([self._header("view", known, records=len(lines)), *(line for _, line in lines.values())])
        if len(data) > MOST_BYTES:
            jobs = [len(line) for key, (_, line) in lines.items() if key.startswith("job ")]
            raise OSError(
                f"it would be larger than {MOST_BYTES} bytes, and {len(jobs)} jobs take {sum(jobs)} of it: stop and "
                "delete some, and lower limits.job_bytes"
            )
        self._lines, self._room = lines, min(max(len(data), LEAST_ROOM), MOST_BYTES - len(data))
        return data

    def news(self, known: Known) -> bytes | None:
        """What is to be added to what this packed or added last; None: the whole is to be written."""
        if self._room is None:
            return None
        lines = self._renewed(known)
        changed = [line for key, (rev, line) in lines.items() if self._lines.get(key, (None, b""))[0] != rev]
        gone = [self._line("gone", key) for key in self._lines if key not in lines]
        data = b"".join([self._header("more", known, records=len(changed) + len(gone)), *changed, *gone])
        if len(data) > self._room:
            return None
        self._lines, self._room = lines, self._room - len(data)
        return data

    def doubt(self) -> None:
        """What was packed or added last may not be there, or not whole."""
        self._room = None

    def unpack(self, data: bytes) -> tuple[Known | None, list[str]]:
        """The view, and a sentence for each thing that could not be read; without its header nothing is believed. An
        addition that was not written to its end counts as none."""
        lines = data.split(b"\n")
        if len(lines) > 1:
            lines.pop()  # nothing, or a line that was not written to its end
        try:
            part = self._part("view", lines[0])
        except (ValueError, KeyError, TypeError) as error:
            return None, [f"line 1: {error}"]
        parts = [part]
        for number, line in enumerate(lines[1:], 2):
            try:
                kind, text = self._checked(line)
                if kind == "more":
                    part = self._part("more", line)
                    parts.append(part)
                elif kind == "gone":
                    part.records.append((text, None))
                elif kind == "node":
                    node = NodeRecord.from_json(text)
                    part.records.append((f"node {node.id}", node))
                elif kind == "queues":
                    part.records.append((_QUEUES, QueuesRecord.from_json(text)))
                elif kind == "windows":
                    part.records.append((_WINDOWS, WindowsRecord.from_json(text)))
                elif kind == "usage":
                    usage = UsageDay.from_json(text)
                    part.records.append((f"usage {usage.day}", usage))
                else:
                    job = JobRecord.from_json(text)
                    part.records.append((f"job {job.uid}", job))
            except ValidationError as error:
                part.wrong.append(f"line {number}: {first_error(error)}")
            except (ValueError, KeyError, TypeError) as error:
                part.wrong.append(f"line {number}: {error}")
        if len(parts) > 1 and parts[-1].missing:
            parts.pop()
        wrong = [text for one in parts for text in one.wrong]
        if (missing := sum(one.missing for one in parts)) > 0:
            wrong.append(f"{missing} records are missing")
        there: dict[str, SavedRecord] = {}
        for key, record in (entry for one in parts for entry in one.records):
            there.pop(key, None)
            if record is not None:
                there[key] = record
        header = parts[-1].header
        known = Known(
            cluster_uid=str(header["cluster_uid"]), era=str(header["era"]), rev=int(header["rev"]),
            served=int(header["served"]), nodes=tuple(one for one in there.values() if isinstance(one, NodeRecord)),
            jobs=tuple(one for one in there.values() if isinstance(one, JobRecord)),
            usage=tuple(one for one in there.values() if isinstance(one, UsageDay)),
            lapsed=frozenset(map(str, header["lapsed"])), whole=not wrong,
            queues=next((one for one in there.values() if isinstance(one, QueuesRecord)), None),
            windows=next((one for one in there.values() if isinstance(one, WindowsRecord)), None),
        )  # fmt: skip
        return known, wrong

    def _renewed(self, known: Known) -> dict[str, tuple[int, bytes]]:
        """Revision and line of each record."""
        ended = sorted((j for j in known.jobs if j.ended is not None), key=lambda job: job.ended or 0.0)
        dropped = {job.uid for job in ended[: max(0, len(ended) - MOST_ENDED)]}
        jobs = [job for job in known.jobs if job.uid not in dropped]
        lines: dict[str, tuple[int, bytes]] = {}
        records: list[tuple[str, SavedRecord]] = [(f"node {node.id}", node) for node in known.nodes]
        records += [(f"usage {usage.day}", usage) for usage in known.usage]
        records += [(f"job {job.uid}", job) for job in jobs]
        records += [(_QUEUES, known.queues)] if known.queues is not None else []
        records += [(_WINDOWS, known.windows)] if known.windows is not None else []
        for key, record in records:
            line = self._lines.get(key)
            if line is None or line[0] != record.rev:
                line = record.rev, self._record(key.partition(" ")[0], record)
            lines[key] = line
        return lines

    def _header(self, kind: str, known: Known, records: int) -> bytes:
        header = {
            "format": FORMAT, "cluster_uid": known.cluster_uid, "era": known.era, "rev": known.rev,
            "served": known.served, "lapsed": sorted(known.lapsed), "records": records,
        }  # fmt: skip
        return self._line(kind, json.dumps(header))

    def _part(self, wanted: str, line: bytes) -> _Part:
        """What a header begins. Raises ValueError, KeyError and TypeError."""
        kind, text = self._checked(line)
        header = json.loads(text)
        if kind != wanted or header["format"] != FORMAT:
            raise ValueError("it is of another format")
        return _Part(header, int(header["records"]))

    def _record(self, kind: str, record: SavedRecord) -> bytes:
        return self._line(kind, record.to_json())

    def _line(self, kind: str, text: str) -> bytes:
        body = f"{kind} {text}".encode()
        return self._mark(body) + b" " + body + b"\n"

    def _checked(self, line: bytes) -> tuple[str, str]:
        """Kind and JSON. Raises ValueError."""
        mark, body = line[:MARK], line[MARK + 1 :]
        if not hmac.compare_digest(mark, self._mark(body)):
            raise ValueError("it is damaged, or was written with another cluster key")
        kind, _, text = body.decode().partition(" ")
        return kind, text

    def _mark(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, hashlib.sha256).hex()[:MARK].encode()


SETTLE = 1.0
"""Seconds from a change that nobody waits for to its write: at most one in as long."""
GAP = 0.02
"""Seconds between two writes at least, even if a command waits."""
RETRY = 5.0
"""Seconds after a write that failed."""


class Saver:
    """One agent's copy. ``notify`` is called when others wait for a save that has just been made."""

    def __init__(self, context: AgentContext, disk: Disk, writing: Writing, notify: Callable[[], None]) -> None:
        self._disk, self._writing, self._notify = disk, writing, notify
        self._snapshot, self._clock, self._metrics = context.snapshot, context.clock, context.metrics
        self._log = structlog.get_logger("savedview").bind(node=context.node)
        self._pointers: dict[str, Checkpoint | None] = {}
        self._news = asyncio.Event()
        self.saved: Saved | None = None
        """What is on the disk."""
        self.trouble = ""
        """Why the last write failed; empty if it did not."""

    def load(self) -> Known | None:
        """What was saved before this start. The next save replaces the file: one that cannot be read whole stays beside
        it, for who has the right key, or a better disk."""
        try:
            data = self._disk.read()
        except OSError as error:
            aside = self._disk.keep_damaged()
            self._log.error(
                "the jobs saved on this disk cannot be read: unknown from now on", why=str(error),
                damaged_copy=aside,
            )  # fmt: skip
            return None
        if data is None:
            return None
        known, wrong = self._writing.unpack(data)
        if wrong:
            what = "the jobs saved on this disk" if known is None else "a part of the jobs saved on this disk"
            aside = self._disk.keep_damaged()
            self._log.error(
                f"{what} cannot be read: unknown from now on", why=wrong[:10], wrong=len(wrong),
                damaged_copy=aside,
            )  # fmt: skip
        if known is not None:
            self._log.info("jobs saved on this disk", jobs=len(known.jobs), rev=known.rev, damaged=len(wrong))
        return known

    async def run(self) -> None:
        """Write whatever changes, until cancelled."""
        while True:
            await self._snapshot.touched.wait()
            due = self._clock.now() + SETTLE
            while not self._urgent() and (left := due - self._clock.now()) > 0:
                self._snapshot.touched.clear()
                await wait_for(self._snapshot.touched, left)
            self._snapshot.touched.clear()
            if not self._current():
                continue
            await self._save()
            await asyncio.sleep(RETRY if self.trouble else GAP)

    async def reached(self, wanted: Saved) -> None:
        """Until everything up to this is on the disk."""
        while self.saved is None or self.saved.era != wanted.era or self.saved.rev < wanted.rev:
            self._news.clear()
            await self._news.wait()

    def _current(self) -> bool:
        """The view is the store's: what a store that lost writes brings must not replace what is saved."""
        return self._snapshot.complete and not self._snapshot.recovering and not self._snapshot.rereads

    def _urgent(self) -> bool:
        """Somebody waits for what is not on the disk yet."""
        saved = self.saved
        if saved is None or saved.rev < self._snapshot.wanted <= self._snapshot.rev:
            return True
        return any(self._pointers.get(uid) != job.checkpoint for uid, job in self._snapshot.jobs.items())

    async def _save(self) -> None:
        known = self._snapshot.known(self._clock.now())
        pointers = {job.uid: job.checkpoint for job in known.jobs}
        started = self._clock.now()
        try:
            news = self._writing.news(known)
            if news is None:
                await self._disk.write(self._writing.pack(known))
            else:
                await self._disk.append(news)
        except OSError as error:
            self._writing.doubt()
            self._metrics.save_errors.inc()
            if str(error) != self.trouble:
                self._log.error("jobs cannot be saved on this disk; trying again", why=str(error))
            self.trouble = str(error)
            self._snapshot.touched.set()
            return
        except BaseException:  # a part of it may be written
            self._writing.doubt()
            raise
        if self.trouble:
            self._log.info("jobs are saved on this disk again")
        self.trouble, self._pointers = "", pointers
        self._metrics.save_seconds.observe(self._clock.now() - started)
        before, self.saved = self.saved, Saved(era=known.era, rev=known.rev)
        self._news.set()
        if (before.rev if before is not None else 0) < self._snapshot.wanted <= known.rev:
            self._notify()


COPIES = 2
"""Nodes that must have a write on their disks: as many as are live, where those are fewer."""
AGAIN = 0.1
"""Seconds until the store is asked again after it did not answer."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """On which disks a write is."""

    nodes: tuple[str, ...]
    wanted: int
    waited: float

    @property
    def safe(self) -> bool:
        return len(self.nodes) >= self.wanted


class Acknowledger:
    """Waits for one write after the other, each within ``bound`` seconds."""

    def __init__(self, context: AgentContext, saver: Saver, cluster: Callable[[], Cluster], bound: float) -> None:
        self._node, self._store, self._clock = context.node, context.store, context.clock
        self._saver, self._cluster, self._bound = saver, cluster, bound
        self._others: dict[str, Saved] = {}

    async def __call__(self, write: Saved) -> Acknowledged:
        """``write``: its revision, and the era in which it was made."""
        started = self._clock.now()
        own = asyncio.ensure_future(self._saver.reached(write))
        notify = asyncio.ensure_future(self._notify(write))
        try:
            async with asyncio.timeout(self._bound):
                while not self._look(write, started).safe:
                    await asyncio.wait({t for t in (own, notify) if not t.done()}, return_when=asyncio.FIRST_COMPLETED)
                    if notify.done():
                        notify.result()
                        if self._look(write, started).safe:
                            break
                        notify = asyncio.ensure_future(self._notify(write))
        except TimeoutError:
            pass
        finally:
            own.cancel()
            notify.cancel()
        return self._look(write, started)

    async def _notify(self, write: Saved) -> None:
        """Until other nodes have reported enough saves that cover the write."""
        if self._look(write, 0.0).wanted < COPIES:
            await self._saver.reached(write)
        at = ""
        while True:
            try:
                saves = await self._store.saved(at, self._bound, self._live())
            except StoreError:
                await asyncio.sleep(AGAIN)
                continue
            at, self._others = saves.at, saves.nodes
            if self._look(write, 0.0).safe:
                return

    def _look(self, write: Saved, started: float) -> Acknowledged:
        live = self._live()
        known = dict(self._others)
        if self._saver.saved is not None:
            known[self._node] = self._saver.saved
        there = tuple(
            node for node in live
            if node in known and known[node].era == write.era and known[node].rev >= write.rev
        )  # fmt: skip
        wanted = min(COPIES, max(1, len(live)))  # this node lives, even where it has not read so yet
        return Acknowledged(nodes=there, wanted=wanted, waited=self._clock.now() - started)

    def _live(self) -> list[str]:
        cluster = self._cluster()
        return [node for node in sorted(cluster.nodes) if cluster.live(node)]
