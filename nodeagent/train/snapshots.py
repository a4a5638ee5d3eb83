"""Snapshots in memory: the state of a training after one step, which the shim keeps so that it outlives the workers.

``take`` copies the state in the calling thread: the copy is the state of one step whatever the script does next, and
costs as much as copying memory. ``load`` is a collective: all ranks of a new generation agree on the newest snapshot
that each of them can get, and no rank reads a disk. Without nodeagent both do nothing. When a job's nodes are given up,
``writeout.py`` writes what is in memory to disk, each rank's snapshot exactly as it was; ``load_written`` loads that.

Must never fail a training: if a state cannot be kept, a message reports it, and training continues; only a state that
can be kept at no step is an error, from the first call on. Must never load a snapshot in which a byte changed.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from nodeagent.train.context import Context, context
from nodeagent.train.flat import (
    Flat,
    TensorPlace,
    TrainingState,
    UnfitStateError,
    copy_into,
    cut,
    put_back,
    put_together,
    take_apart,
    total,
)
from nodeagent.train.folder import CheckpointEntry, candidates, damage, entry_of, part_name, read_manifest
from nodeagent.train.link import Link, LinkError
from nodeagent.train.memory import HEADER, Choice, Header, SharedBuffer, SnapshotOffer, choose, header_of, size_of

BUFFERS = 2
"""Two buffers in turn: while one is being written, the other is whole."""
SLACK = 64 << 10
"""Bytes by which the part beside the tensors may grow before new memory is needed."""
TRY_AGAIN = 30.0
"""Seconds until the next attempt after a snapshot that could not be kept."""
ASK_BOUND = 2.0
"""Seconds to wait for the shim's answer."""
PIECE = 64 << 20
"""Bytes that ``hand_out`` sends in one message."""

T = TypeVar("T")
StateParts = tuple[bytes, torch.Tensor]
"""The rest of a state and its tensors' bytes, for ``flat.put_together``."""


class Buffer:
    """One shared memory, and the tensors in it in their last layout."""

    def __init__(self, memory: SharedBuffer) -> None:
        self.memory = memory
        self.data = torch.frombuffer(memory.map, dtype=torch.uint8)
        self._places: list[TensorPlace] = []
        self._views: list[torch.Tensor] = []

    def views(self, places: list[TensorPlace]) -> list[torch.Tensor]:
        if places != self._places:
            self._places, self._views = places, [cut(self.data[HEADER:], place) for place in places]
        return self._views

    def body(self, header: Header) -> torch.Tensor:
        return self.data[HEADER : HEADER + header.data_bytes]


class FoundSnapshot(NamedTuple):
    """The snapshot of one worker, under one index, that the shim keeps."""

    fd: int
    header: Header | None


FoundSnapshots = Mapping[tuple[int, int], FoundSnapshot]


class WorkerSnapshots:
    """The snapshots of one worker."""

    def __init__(self, link: Link | None, place: Context) -> None:
        self._link, self._place = link, place
        self._buffers: dict[int, Buffer] = {}
        self._own = 0
        """This worker's number in its pod."""
        self._newest = -1
        """The buffer that is not written next."""
        self._not_before = 0.0

    def take(self, state: TrainingState, step: int, *, replicated: bool = False) -> bool:
        """See ``nodeagent.train.snapshot``."""
        if self._link is None or time.monotonic() < self._not_before:
            return False
        try:
            flat = take_apart(state)
            if replicated and flat.sharded:
                raise UnfitStateError("replicated=True, but of the state's DTensors each rank has its own part")
            self._keep(self._link, flat, int(step), replicated)
        except UnfitStateError:
            raise
        except Exception as error:  # noqa: BLE001 (the training goes on, whatever state_dict or a copy raised)
            self._not_before = time.monotonic() + TRY_AGAIN
            why = str(error) if isinstance(error, LinkError) else f"{type(error).__name__}: {error}"
            announce(f"no snapshot of step {step} ({why}); the next is tried in {TRY_AGAIN:g} s")
            return False
        return True

    def _keep(self, link: Link, flat: Flat, step: int, replicated: bool) -> None:
        index = (self._newest + 1) % BUFFERS
        buffer = self._writable(link, index, flat)
        place, memory = self._place, buffer.memory
        memory.unseal()
        copy_into(buffer.views(flat.places), flat.tensors)
        header = Header(
            place.generation, step, place.rank, place.world_size, replicated, flat.data_bytes, len(flat.rest),
            total(buffer.data[HEADER : HEADER + flat.data_bytes]), zlib.crc32(flat.rest),
        )  # fmt: skip
        memory.put_rest(header, flat.rest)
        memory.seal(header)
        self._newest = index

    def _writable(self, link: Link, index: int, flat: Flat) -> Buffer:
        """The buffer of this index; a new one if it is too small."""
        size = size_of(flat.data_bytes, len(flat.rest))
        found = self._buffers.get(index)
        if found is not None and found.memory.size >= size:
            return found
        size += SLACK
        link.ask("snapshot.put", ASK_BOUND, index=index, bytes=size)  # before the memory is allocated
        made = Buffer(SharedBuffer.of_size(size))
        try:
            link.ask("snapshot.put", ASK_BOUND, fds=(made.memory.fd,), index=index, bytes=size)
        except (LinkError, OSError):
            made.memory.close()  # else a training whose snapshots are refused fills the node's memory
            raise
        if found is not None:
            found.memory.close()
        self._buffers[index] = made
        return made

    def load(self, state: TrainingState, since: tuple[int, int] = (0, 0)) -> int | None:
        """See ``nodeagent.train.restore``. Snapshots older than ``since`` (generation, step) do not count."""
        if self._link is None:
            return None
        found = self._found(self._link)
        offers = [
            SnapshotOffer(slot, index, h.generation, h.step, h.rank, h.world, h.replicated)
            for (slot, index), (_, h) in found.items()
            if h is not None
        ]
        choice, parts = self._agree(found, offers, since)
        if choice is not None:
            if len(choice.local) < self._place.world_size:
                got = hand_out(choice.giver, parts if self._place.rank == choice.giver else None, parts is None)
                parts = got if parts is None else parts
            assert parts is not None
            put_back(state, put_together(*parts, state))
        self._adopt(found, choice)
        return choice.step if choice is not None else None

    def _found(self, link: Link) -> FoundSnapshots:
        """The snapshots of all workers of its role on this node."""
        found: dict[tuple[int, int], FoundSnapshot] = {}
        try:
            all_of_them = link.ask("snapshot.get", ASK_BOUND)
            self._own = all_of_them["own"]
            for slot in all_of_them["slots"]:
                answer = link.ask("snapshot.get", ASK_BOUND, slot=slot)
                for index, fd in zip(answer["indexes"], answer.fds, strict=True):
                    found[slot, index] = FoundSnapshot(fd, header_of(fd))
        except LinkError as error:
            announce(f"the snapshots of this node cannot be read: {error}")
        return found

    def _agree(
        self, found: FoundSnapshots, offers: list[SnapshotOffer], since: tuple[int, int]
    ) -> tuple[Choice | None, StateParts | None]:
        """The choice of all ranks, and this node's own copy of it, if it has one. A damaged snapshot is removed from
        the offers, and the ranks choose again."""
        world = self._place.world_size
        while True:
            choice = choose(gather(offers, world), since)
            mine = choice.local.get(self._place.rank) if choice is not None else None
            parts = _whole(found[mine.slot, mine.half]) if mine is not None else None
            damaged = mine is not None and parts is None
            if choice is None or not any(gather(damaged, world)):
                return choice, parts
            if mine is not None and damaged:
                offers.remove(mine)
                announce(f"the snapshot of step {mine.step} is damaged in memory and is passed over")

    def _adopt(self, found: FoundSnapshots, choice: Choice | None) -> None:
        """Continue in this worker's own memory and keep the chosen snapshot for now; release the others'
        memory."""
        for (slot, index), (fd, header) in found.items():
            if slot != self._own:
                os.close(fd)
                continue
            self._buffers[index] = Buffer(SharedBuffer(fd))
            if choice is not None and header is not None and header[:2] == (choice.generation, choice.step):
                self._newest = index


def _whole(found: FoundSnapshot) -> StateParts | None:
    """Both parts, if they are what was sealed."""
    if found.header is None:
        return None
    buffer = Buffer(SharedBuffer(found.fd))
    rest, body = buffer.memory.rest(found.header), buffer.body(found.header)
    return (rest, body) if rest is not None and total(body) == found.header.data_sum else None


def gather(mine: T, world: int) -> list[T]:
    """A collective: the values of all ranks, by rank. Raises RuntimeError before the group exists."""
    if world == 1:
        return [mine]
    if not dist.is_initialized():
        raise RuntimeError("the ranks must agree first: call torch.distributed.init_process_group() before this")
    found: list[Any] = [None] * world
    dist.all_gather_object(found, mine)
    return found


def gather_seen(look: Callable[[], T], nothing: T, gathered: Callable[[Any], list[Any]]) -> list[T]:
    """A collective: what ``look`` returns, of all ranks, by rank. Its OSError of any rank is raised on all: who waited
    for one that has raised it would wait for ever. ``nothing``: in its place; ``gathered``: as ``gather``."""
    mine, unseen = nothing, None
    try:
        mine = look()
    except OSError as error:
        unseen = error
    found = gathered((mine, unseen))
    for failed in (of_rank for _, of_rank in found):
        if failed is not None:
            raise failed
    return [one for one, _ in found]


def hand_out(giver: int, given: StateParts | None, wanted: bool) -> StateParts | None:
    """A collective: sends the giver's value (None on all others) to the ranks that want it; the other ranks
    take part and get None."""
    shared: list[Any] = [(given[0], len(given[1]))] if given is not None else [None]
    dist.broadcast_object_list(shared, src=giver)
    rest, size = shared[0]
    device = device_among([found.type for found in dist.group.WORLD._device_types])
    data = torch.empty(size if wanted else 0, dtype=torch.uint8)
    for begin in range(0, size, PIECE):
        end = min(begin + PIECE, size)
        if given is not None:
            piece = given[1][begin:end].to(device)
        else:
            piece = torch.empty(end - begin, dtype=torch.uint8, device=device)
        dist.broadcast(piece, src=giver)
        if wanted:
            data[begin:end] = piece.cpu()
    return (rest, data) if wanted else None


def device_among(types: Sequence[str]) -> torch.device:
    """The device on which a group that communicates on devices of these types sends bytes of the CPU's memory."""
    if "cpu" in types:
        return torch.device("cpu")
    return torch.device(types[0], torch.get_device_module(types[0]).current_device())


def read_written(path: Path, rank: int, world: int) -> StateParts:
    """The parts of a written snapshot from which this rank of a gang of ``world`` ranks continues. Raises ValueError
    with the reason if it cannot; OSError where they could not be looked at."""
    named = read_manifest(path)
    own = part_name(rank)
    name = own if own in named else min(named, default="")
    problem = damage(path, {name: named[name]}) if name else f"{path} has no part at all"
    if problem:
        raise ValueError(problem)
    with (path / name).open("rb") as file:
        header = header_of(file.fileno())
        if header is None:
            raise ValueError(f"{path / name} is no snapshot that this nodeagent can read")
        if not header.replicated and (header.rank, header.world) != (rank, world):
            raise ValueError(f"{path} has a part of its own for each of {header.world} ranks, and there are {world}")
        # private and copied on write: torch accepts only writable memory
        content = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size, access=mmap.ACCESS_COPY)
    return _checked(path / name, content, header)


def _checked(path: Path, content: mmap.mmap, header: Header) -> StateParts:
    end = HEADER + header.data_bytes
    rest, body = content[end : end + header.rest_bytes], torch.frombuffer(content, dtype=torch.uint8)[HEADER:end]
    if zlib.crc32(rest) != header.rest_crc or total(body) != header.data_sum:
        raise ValueError(f"{path} was damaged in memory before it was written")
    return rest, body


def load_written(state: TrainingState, path: Path, rank: int, world: int) -> str:
    """Load a written snapshot into the state, in place. Every rank calls it. Returns the first problem of any
    rank, or "". Raises OSError where its files could not be looked at."""
    parts, found = list[StateParts](), {}

    def read() -> str:
        try:
            parts.append(read_written(path, rank, world))
        except ValueError as error:
            return str(error)
        return ""

    problem = next(filter(None, gather_seen(read, "", partial(gather, world=world))), "")
    if problem:
        return problem
    try:
        found = put_together(*parts[0], state)
    except ValueError as error:
        problem = str(error)
    problem = next(filter(None, gather(problem, world)), "")
    if not problem:
        put_back(state, found)
    return problem


def announce(text: str) -> None:
    """Prints one line for people, in the worker's own output."""
    print(f"nodeagent: {text}", file=sys.stderr, flush=True)


_own: list[WorkerSnapshots] = []


def own_snapshots() -> WorkerSnapshots:
    """This worker's snapshots, from its environment."""
    if not _own:
        _own.append(WorkerSnapshots(Link.of_environment(), context()))
    return _own[0]


def snapshot(state: TrainingState, step: int, *, replicated: bool = False) -> bool:
    """Keep the state of ``step`` in this node's memory; returns whether it is kept (under torchrun it is not).

    Every rank calls it at the same steps. ``replicated``: all ranks have the same state, as with
    DistributedDataParallel; then a rank whose node is lost gets another rank's.
    """
    return own_snapshots().take(state, step, replicated=replicated)


def restore(state: TrainingState) -> int | None:
    """Load the newest snapshot that every rank can get into ``state``, in place; returns its step. It comes from
    memory, or from the disk if it was written there when the nodes of this job, or of an earlier one with the same
    checkpoint_dir, were given up; damaged ones are named and passed over. None: there is none, and nothing was changed.
    Every rank calls it once, after ``init_process_group``."""
    place = context()
    entry = entry_of(place.checkpoint)
    written = entry.snapshot if entry is not None else not place.checkpoint
    if place.checkpoint_dir is None or not written:
        return own_snapshots().load(state)
    step = own_snapshots().load(state, (entry.generation, entry.step) if entry is not None else (0, 0))
    if step is not None:
        return step
    for one in _written(place.checkpoint_dir, place):
        problem = load_written(state, place.checkpoint_dir / one.name, place.rank, place.world_size)
        if not problem:
            return one.step
        if place.rank == 0:
            announce(f"the snapshot of step {one.step} is passed over: {problem}")
    return None


def _written(folder: Path, place: Context) -> list[CheckpointEntry]:
    """A collective: the written snapshots that may be loaded, the newest first, as rank 0 sees them. Those older than a
    checkpoint of the script's own do not count: it is better, and the script's to load."""
    pointer = entry_of(place.checkpoint)
    mine = [pointer] if pointer is not None else []

    def look() -> list[CheckpointEntry]:
        if place.rank:
            return []
        try:
            return candidates(folder, place.checkpoint)
        except OSError:
            if not mine:  # else reading the newest reports the error
                raise
            return mine

    return [
        *takewhile(lambda entry: entry.snapshot, gather_seen(look, mine, partial(gather, world=place.world_size))[0])
    ]
