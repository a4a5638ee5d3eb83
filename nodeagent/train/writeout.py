"""Writes snapshots from memory to disk when a gang, or one of its nodes, is given up: the shim's helper, one on each
node.

``python -m nodeagent.train.writeout ORDER``: ORDER is JSON (see ``WriteOrder``), with descriptors of the memory and of
a socket to the shim. The helpers of all nodes meet in the job's checkpoint_dir, which they share. Each offers what its
node has; one of them makes the choice that a new generation would have made (``choose`` in ``memory.py``). Each writes
its part, and the one that chose asks its shim to commit. Standard library only. The result must never count before the
store has accepted it; the helper ends when its time is over, done or not.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from nodeagent.train import folder as files
from nodeagent.train.folder import CheckpointEntry
from nodeagent.train.memory import Header, SnapshotOffer, choose, header_of, size_of

VERSION = 1
"""Version of the messages to the shim."""
LOOK_AGAIN = (0.01, 0.1)
"""Seconds between two polls for messages of the other nodes: at first, and at most."""
SHARED_BOUND = 3.0
"""If any copy will do: seconds to wait for nodes that have offered nothing, since a node may have no snapshot."""
PARTS_BOUND = 0.75
"""If each rank's part is needed: share of the available time, since workers elsewhere may live for half of the
grace."""
WRITERS = 8
"""Parts that one node writes at a time."""
_PIECE = 4 << 20
_MAX_LINE = 1 << 16

Commit = Callable[[CheckpointEntry], str]
"""Asks the store to commit it; returns why it did not, or "". Raises WriteOutError or OSError if nobody answers."""


class WriteOrder(NamedTuple):
    """The shim's request."""

    folder: str
    """The job's checkpoint_dir."""
    generation: int
    token: str
    node: int
    """Number of this node in the gang."""
    nodes: int
    ranks: Sequence[int]
    """Ranks of this node."""
    world: int
    memories: Sequence[tuple[int, int, int]]
    """Local rank, index and descriptor of each memory that the shim keeps."""
    since: tuple[int, int]
    """(generation, step) of the job's committed checkpoint: a state that is not newer is not written. What else is in
    the folder may be another job's, with generations of the same numbers."""
    stays: bool
    """Other nodes of the gang continue and have its state in memory, if all ranks have the same state."""
    until: float
    """CLOCK_MONOTONIC: the end of the grace."""


class Received(NamedTuple):
    """One node's offers, read from the folder."""

    ranks: Sequence[int]
    offers: Sequence[SnapshotOffer]


class WritePlan(NamedTuple):
    """What all nodes write: the first node that publishes a plan decides."""

    entry: CheckpointEntry
    parts: Mapping[int, int]
    """Rank whose state is written, to the node that has it."""
    generation: int
    """Generation of that state."""


class WriteOutError(Exception):
    """Nothing was committed as far as is known; ``str()`` gives the reason."""


class GoneError(Exception):
    """The node that chose has ended the write-out."""


Found = Mapping[tuple[int, int], tuple[int, Header]]
"""Descriptor and header of each sealed snapshot on this node, by the worker's number in its pod and index."""


def write_out(order: WriteOrder, commit: Commit) -> str:
    """Write out the snapshots. Returns the result in words, or "" if this node had nothing to do. Raises
    WriteOutError."""
    found = {(slot, half): (fd, header) for slot, half, fd in order.memories if (header := header_of(fd))}
    offers = [
        SnapshotOffer(slot, half, h.generation, h.step, h.rank, h.world, h.replicated)
        for (slot, half), (_, h) in found.items()
        if not (order.stays and h.replicated)
    ]
    try:
        return _Talk(order, found).run(offers, commit)
    except OSError as error:
        raise WriteOutError(f"{error.filename or order.folder}: {error.strerror or error}") from error


class _Talk:
    """One node's part in the write-out."""

    def __init__(self, order: WriteOrder, found: Found) -> None:
        self._order, self._found = order, found
        self._folder = Path(order.folder)
        self._path = files.talk_folder(self._folder, order.generation, order.token)
        self._began = time.monotonic()

    def run(self, offers: Sequence[SnapshotOffer], commit: Commit) -> str:
        self._path.mkdir(exist_ok=True)
        self._send(f"offers-{self._order.node}", [list(self._order.ranks), *offers])
        try:
            plan, chose = self._chosen()
        except GoneError:  # this node's offer was not needed, or another node has reported the failure
            return ""
        if chose:
            return self._lead(plan, commit)
        if plan is None or not self._write(plan):
            return ""
        return f"part of the snapshot of step {plan.entry.step} written out in {self._took():.2f} s"

    def _chosen(self) -> tuple[WritePlan | None, bool]:
        """The plan, and whether this node decided it."""
        order, may = self._order, True
        while True:
            message = self._receive("plan")
            if message is not None:
                return _read_plan(message), False
            received = {
                n: Received(t[0], [SnapshotOffer(*o) for o in t[1:]])
                for n, t in self._received_of_all("offers", order.nodes)
            }
            if (
                may
                and min(received, default=-1) == order.node
                and (len(received) == order.nodes or self._late(received))
            ):
                may = self._first("choice")
                if may:
                    plan = self._plan(received)
                    text = None if plan is None else [*plan.entry[:3], sorted(plan.parts.items()), plan.generation]
                    self._send("plan", [text])
                    return plan, True
            self._wait("what the other nodes have in memory")

    def _late(self, received: Mapping[int, Received]) -> bool:
        """Returns whether to stop waiting for nodes without an offer. If all ranks have the same state, such a node
        could bring only a slightly newer one; if parts are needed, nothing can be written without them."""
        shared = any(o.replicated for t in received.values() for o in t.offers)
        return self._took() > (SHARED_BOUND if shared else PARTS_BOUND * (self._order.until - self._began))

    def _plan(self, received: Mapping[int, Received]) -> WritePlan | None:
        order = self._order
        by_rank: list[Sequence[SnapshotOffer]] = [()] * order.world
        nodes = {}
        for node, (ranks, offers) in received.items():
            for rank in ranks:
                by_rank[rank], nodes[rank] = offers, node
        generation, step = order.since
        choice = choose(by_rank, (generation, step + 1))
        if choice is None:
            return None
        giver = choice.local[choice.giver]
        # if all ranks have the same state, one copy will do
        writers = {giver.rank: nodes[choice.giver]} if giver.replicated else {r: nodes[r] for r in choice.local}
        entry = CheckpointEntry(files.next_order(self._folder), choice.step, order.generation, True)
        return WritePlan(entry, writers, choice.generation)

    def _write(self, plan: WritePlan) -> bool:
        """Writes this node's parts, if it has any. Raises WriteOutError or OSError, and reports that to the node that
        chose."""
        mine = [(rank, _memory(self._found, rank, plan)) for rank, n in plan.parts.items() if n == self._order.node]
        if not mine:
            return False
        target = self._folder / plan.entry.name
        try:
            target.mkdir(exist_ok=True)
            with ThreadPoolExecutor(min(WRITERS, len(mine))) as threads:
                copies = {rank: threads.submit(_copy, *one, target / files.part_name(rank)) for rank, one in mine}
            written = {files.part_name(rank): copy.result() for rank, copy in copies.items()}
        except (OSError, WriteOutError) as error:
            self._send(f"done-{self._order.node}", [str(error), {}])
            raise
        self._send(f"done-{self._order.node}", ["", written])
        return True

    def _lead(self, plan: WritePlan | None, commit: Commit) -> str:
        """Runs on the node that chose: asks the store to commit when all parts are there."""
        try:
            if plan is None:
                return ""
            target = self._folder / plan.entry.name
            try:
                self._write(plan)
                files.write_manifest(target, self._all_parts(plan))
            except (OSError, WriteOutError):
                shutil.rmtree(target, ignore_errors=True)
                raise
            refused = commit(plan.entry)  # without an answer the store may have it: it stays
            if refused:
                shutil.rmtree(target, ignore_errors=True)
                raise WriteOutError(refused)
        finally:
            shutil.rmtree(self._path, ignore_errors=True)
        files.mark_committed(target)
        files.prune_snapshots(self._folder, plan.entry)
        return f"snapshot of step {plan.entry.step} written out in {self._took():.2f} s"

    def _all_parts(self, plan: WritePlan) -> dict[str, list[int]]:
        """All files, in the form of a manifest, when all nodes have written theirs."""
        writers = set(plan.parts.values())
        while True:
            done = dict(self._received_of_all("done", self._order.nodes))
            for node, (problem, _) in done.items():
                if problem:
                    raise WriteOutError(f"node {node} of the gang: {problem}")
            if writers <= set(done):
                return {name: found for _, written in done.values() for name, found in written.items()}
            self._wait("the parts of the other nodes")

    # -- the folder with the messages between the nodes

    def _send(self, name: str, content: Any) -> None:
        """Writes a message, whole or not at all."""
        draft = self._path / f"{name}.new"
        draft.write_text(json.dumps(content))
        draft.replace(self._path / name)

    def _first(self, name: str) -> bool:
        """Returns whether this node is the first to write this message."""
        try:
            os.close(os.open(self._path / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        except FileExistsError:
            return False
        return True

    def _receive(self, name: str) -> Any:
        try:
            return json.loads((self._path / name).read_text())
        except FileNotFoundError:
            return None

    def _received_of_all(self, name: str, nodes: int) -> list[tuple[int, Any]]:
        return [(node, message) for node in range(nodes) if (message := self._receive(f"{name}-{node}")) is not None]

    def _took(self) -> float:
        return time.monotonic() - self._began

    def _wait(self, what: str) -> None:
        """Sleeps until the next poll. Raises WriteOutError when no time is left."""
        if time.monotonic() >= self._order.until:
            raise WriteOutError(f"{what} did not come within the grace")
        least, most = LOOK_AGAIN
        time.sleep(min(most, max(least, self._took() / 10)))
        try:
            os.utime(self._path)  # a file server's client may show an old folder, but not after a change of its own
        except FileNotFoundError:
            raise GoneError from None


def _read_plan(message: Sequence[Any]) -> WritePlan | None:
    if message[0] is None:
        return None
    order, step, token_number, parts, generation = message[0]
    return WritePlan(CheckpointEntry(order, step, token_number, True), dict(parts), generation)


def _memory(found: Found, rank: int, plan: WritePlan) -> tuple[int, Header]:
    """The memory with this rank's state of the plan."""
    for fd, header in found.values():
        if (header.rank, header.generation, header.step) == (rank, plan.generation, plan.entry.step):
            return fd, header
    raise AssertionError(f"rank {rank} was not offered")


def _copy(fd: int, header: Header, path: Path) -> list[int]:
    """Size and checksum of the written file. Raises WriteOutError if a worker wrote to the memory meanwhile."""
    size, crc = size_of(header.data_bytes, header.rest_bytes), 0
    with path.open("wb") as out:
        for begin in range(0, size, _PIECE):
            piece = os.pread(fd, min(_PIECE, size - begin), begin)
            crc = zlib.crc32(piece, crc)
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())
    if header_of(fd) != header:
        raise WriteOutError(f"rank {header.rank} took another snapshot meanwhile")
    return [size, crc]


class WriteLink:
    """The connection to the shim: one question, one answer, one final message."""

    def __init__(self, fd: int, until: float) -> None:
        self._socket, self._until = socket.socket(fileno=fd), until

    def commit(self, entry: CheckpointEntry) -> str:
        """A ``Commit``. Raises WriteOutError."""
        self.send(op="commit", name=entry.name, step=entry.step, order=entry.order)
        data = b""
        try:
            while b"\n" not in data and len(data) < _MAX_LINE:
                self._socket.settimeout(max(0.001, self._until - time.monotonic()))
                more = self._socket.recv(_MAX_LINE)
                if not more:
                    raise WriteOutError("the shim has gone")
                data += more
        except TimeoutError:
            raise WriteOutError("the store did not take it within the grace") from None
        refused: str = json.loads(data)["refused"]
        return refused

    def send(self, **fields: Any) -> None:
        self._socket.settimeout(max(1.0, self._until - time.monotonic()))
        self._socket.sendall(json.dumps({"v": VERSION, **fields}).encode() + b"\n")


def main() -> None:
    message = json.loads(sys.argv[1])
    order = WriteOrder(**message["order"])
    line = WriteLink(message["line"], order.until)
    try:
        text = write_out(order, line.commit)
    except WriteOutError as error:
        text = f"snapshots not written out: {error}"
    line.send(op="done", text=text)


if __name__ == "__main__":
    main()
