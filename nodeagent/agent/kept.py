"""The copy of an agent's view in its state folder: how it is written, and how much of it is believed when it is read.

One line for each record, each with the cluster key's word, so that damage costs one record and no other cluster's file
is taken for this one's. What is read is never acted on: it is offered to a store that lost its own. Must never hold up
the loop that renews the lease: the disk may hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import threading
from pathlib import Path
from typing import Protocol

from nodeagent.agent.known import Known
from nodeagent.model.job import JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.trust.key import ClusterKey
from nodeagent.workers.linux import write_atomic

FORMAT = 1
ENDED_KEPT = 256
"""Most jobs that have ended: the newest."""
MOST_BYTES = 64 * 1024**2
PATIENCE = 10.0
"""Seconds after which a disk that has not answered counts as hanging."""
MARK = 32
"""Characters of a line's signature."""


class Disk(Protocol):
    """Where the copy lies."""

    def read(self) -> bytes | None:
        """What was written last; None if nothing was. Raises OSError."""
        ...

    async def write(self, data: bytes) -> None:
        """Replace it, whole or not at all; when this returns it outlives a power cut. Raises OSError."""
        ...


class FileDisk:
    """The real one: one file in the state folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: threading.Thread | None = None
        self._busy = False

    def read(self) -> bytes | None:
        try:
            with self._path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return None
        if len(data) > MOST_BYTES:
            raise OSError(f"it is larger than {MOST_BYTES} bytes")
        return data

    async def write(self, data: bytes) -> None:
        """In a thread of its own, one at a time: one that hangs costs nobody else theirs."""
        if self._busy and self._writer is not None and self._writer.is_alive():  # a stand-in's is not
            raise OSError("the last write has not ended yet: the disk hangs")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(error: OSError | None) -> None:
            self._busy = False
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        def work() -> None:
            failure = None
            try:
                self._put(data)
            except OSError as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop ended meanwhile: nobody waits
                loop.call_soon_threadsafe(settle, failure)

        self._busy = True
        self._writer = threading.Thread(target=work, name="kept", daemon=True)
        self._writer.start()
        try:
            async with asyncio.timeout(PATIENCE):
                await done
        except TimeoutError:
            raise OSError(f"the disk has not answered for {PATIENCE:.0f} s") from None

    def _put(self, data: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path, data, durable=True)


class Writing:
    """Views to bytes and back. Keeps the lines of records that did not change."""

    def __init__(self, key: ClusterKey, cluster: str) -> None:
        self._key = key.derive(f"view {cluster}")
        self._lines: dict[str, tuple[int, bytes]] = {}

    def pack(self, known: Known) -> bytes:
        """Raises OSError if that is more than may be kept."""
        ended = sorted((j for j in known.jobs if j.ended is not None), key=lambda job: job.ended or 0.0)
        dropped = {job.uid for job in ended[: max(0, len(ended) - ENDED_KEPT)]}
        jobs = [job for job in known.jobs if job.uid not in dropped]
        lines: dict[str, tuple[int, bytes]] = {}
        for key, record in [(f"node {n.id}", n) for n in known.nodes] + [(f"job {j.uid}", j) for j in jobs]:
            kept = self._lines.get(key)
            if kept is None or kept[0] != record.rev:
                kept = record.rev, self._record(key.partition(" ")[0], record)
            lines[key] = kept
        header = {
            "format": FORMAT, "cluster_uid": known.cluster_uid, "era": known.era, "rev": known.rev,
            "served": known.served, "lapsed": sorted(known.lapsed), "records": len(lines),
        }  # fmt: skip
        data = b"".join([self._line("view", json.dumps(header)), *(line for _, line in lines.values())])
        if len(data) > MOST_BYTES:
            raise OSError(f"it would be larger than {MOST_BYTES} bytes: delete jobs that have ended")
        self._lines = lines
        return data

    def unpack(self, data: bytes) -> tuple[Known | None, list[str]]:
        """The view, and a sentence for each thing that could not be read; without its header nothing is believed."""
        first, *rest = data.split(b"\n")
        try:
            kind, text = self._checked(first)
            header = json.loads(text)
            if kind != "view" or header["format"] != FORMAT:
                raise ValueError("it is of another format")
            count = int(header["records"])
        except (ValueError, KeyError, TypeError) as error:
            return None, [f"line 1: {error}"]
        nodes, jobs, wrong = [], [], []
        for number, line in enumerate(rest, 2):
            if not line:
                continue
            try:
                kind, text = self._checked(line)
                if kind == "node":
                    nodes.append(NodeRecord.from_json(text))
                else:
                    jobs.append(JobRecord.from_json(text))
            except ValueError as error:  # pydantic's is one
                wrong.append(f"line {number}: {error}")
        if (missing := count - len(nodes) - len(jobs) - len(wrong)) > 0:
            wrong.append(f"{missing} records are missing")
        known = Known(
            cluster_uid=str(header["cluster_uid"]), era=str(header["era"]), rev=int(header["rev"]),
            served=int(header["served"]), nodes=tuple(nodes), jobs=tuple(jobs),
            lapsed=frozenset(map(str, header["lapsed"])), whole=not wrong,
        )  # fmt: skip
        return known, wrong

    def _record(self, kind: str, record: NodeRecord | JobRecord) -> bytes:
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
