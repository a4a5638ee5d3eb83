"""The folder of checkpoints: names, manifests, markers, and removal.

Standard library only. A checkpoint is a folder. Its manifest is written last, and names each file with size and
checksum: so the checkpoint is whole. Its marker shows that it was committed. Must never remove the newest committed
checkpoint.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

MANIFEST = "nodeagent-manifest.json"
MARKER = "nodeagent-committed"
_NAME = re.compile(r"ckpt-(\d{6,})-step-(\d+)-g(\d+)(-snapshot)?")
_TALK = re.compile(r"\.writeout-g(\d+)-\w+")
_PIECE = 1 << 20
_BROKEN = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.EBADMSG, errno.EUCLEAN})
"""Errors that say that a file is gone or damaged. With any other one (a file server that is away, no right to read)
nobody knows: it may be whole."""


class CheckpointEntry(NamedTuple):
    """One checkpoint, by its name. ``order`` counts all checkpoints of the folder, in every generation."""

    order: int
    step: int
    generation: int
    snapshot: bool = False
    """Written from memory when a node was given up (``writeout.py``), not with torch.distributed.checkpoint."""

    @property
    def name(self) -> str:
        kind = "-snapshot" if self.snapshot else ""
        return f"ckpt-{self.order:06d}-step-{self.step:08d}-g{self.generation}{kind}"


def entry_of(name: str) -> CheckpointEntry | None:
    found = _NAME.fullmatch(name)
    return CheckpointEntry(int(found[1]), int(found[2]), int(found[3]), bool(found[4])) if found else None


def entries(folder: Path) -> list[CheckpointEntry]:
    """All checkpoints, whole or not, the newest first. A missing folder has none."""
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(filter(None, map(entry_of, names)), reverse=True)


def next_order(folder: Path) -> int:
    return max((e.order for e in entries(folder)), default=0) + 1


def candidates(folder: Path, pointer: str) -> list[CheckpointEntry]:
    """Checkpoints that may be loaded, the best first: the one that the store's pointer names, then older committed
    ones. Without a pointer: all with a marker."""
    committed = [e for e in entries(folder) if (folder / e.name / MARKER).exists()]
    first = entry_of(pointer)
    if first is None:
        return committed
    return [first, *(e for e in committed if e.order < first.order)]


def checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            crc = zlib.crc32(piece, crc)
    return crc


def described(folder: Path, names: Sequence[str]) -> dict[str, list[int]]:
    """Size and checksum of these files, in the form of a manifest."""
    return {name: [(folder / name).stat().st_size, checksum(folder / name)] for name in names}


def write_manifest(folder: Path, files: Mapping[str, Sequence[int]]) -> None:
    """Writes the last file of a checkpoint; the file is on the disk when this returns."""
    text = json.dumps({"version": 1, "files": files}, indent=1)
    _write(folder / MANIFEST, json.dumps({"crc": zlib.crc32(text.encode()), "content": text}))


def read_manifest(folder: Path) -> dict[str, list[int]]:
    """The files that the manifest names. Raises ValueError with the problem; OSError where it could not be
    looked at."""
    try:
        record = json.loads((folder / MANIFEST).read_text())
        text = record["content"]
        if zlib.crc32(text.encode()) != record["crc"]:
            raise ValueError("its checksum is wrong")
        files: dict[str, list[int]] = json.loads(text)["files"]
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {MANIFEST}: it was never finished") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, OSError) and error.errno not in _BROKEN:
            raise
        raise ValueError(f"{folder / MANIFEST} cannot be used: {error}") from error
    return files


def damage(folder: Path, files: Mapping[str, Sequence[int]]) -> str:
    """The problem with these files; "" if there is none. Raises OSError where they could not be looked at."""
    for name, (size, crc) in sorted(files.items()):
        try:
            found = (folder / name).stat().st_size
            if found != size:
                return f"{folder / name} has {found} bytes instead of {size}"
            if checksum(folder / name) != crc:
                return f"{folder / name} has another checksum than it was written with"
        except OSError as error:
            if error.errno not in _BROKEN:
                raise
            return f"{folder / name}: {error.strerror}"
    return ""


def mark_committed(folder: Path) -> None:
    _write(folder / MARKER, "")


def prune(folder: Path, newest: CheckpointEntry, keep: int, damaged: Collection[CheckpointEntry] = ()) -> None:
    """Call after ``newest`` was committed: keeps ``keep`` committed checkpoints that are whole as far as known, and
    removes all others that are older. Checkpoints written from memory are not counted: another number of ranks may not
    be able to load them."""
    older = [e for e in entries(folder) if e.order < newest.order]
    committed = [e for e in older if not e.snapshot and e not in damaged and (folder / e.name / MARKER).exists()]
    for entry in set(older) - set(committed[: keep - 1]):
        shutil.rmtree(folder / entry.name, ignore_errors=True)


def prune_snapshots(folder: Path, newest: CheckpointEntry) -> None:
    """Call after ``newest`` was written from memory and committed: of the earlier ones the last stays. Also removes the
    message files of older generations. Does not touch other checkpoints."""
    older = [e for e in entries(folder) if e.snapshot and e.order < newest.order]
    committed = [e for e in older if (folder / e.name / MARKER).exists()]
    for entry in set(older) - set(committed[:1]):
        shutil.rmtree(folder / entry.name, ignore_errors=True)
    for path in folder.iterdir():
        found = _TALK.fullmatch(path.name)
        if found and int(found[1]) < newest.generation:
            shutil.rmtree(path, ignore_errors=True)


def part_name(rank: int) -> str:
    """Name of the file with this rank's state in a checkpoint from memory: an unchanged snapshot (``memory.py``)."""
    return f"rank-{rank:05d}.snapshot"


def talk_folder(folder: Path, generation: int, token: str) -> Path:
    """The folder for the messages between a generation's nodes about what they write from memory."""
    return folder / f".writeout-g{generation}-{token}"


def drop(folder: Path, entry: CheckpointEntry) -> None:
    """Remove a checkpoint that was never finished."""
    shutil.rmtree(folder / entry.name, ignore_errors=True)


def room(folder: Path) -> str:
    """The free room in words, for a person whose file could not be written."""
    try:
        found = shutil.disk_usage(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return f"{found.free / 2**20:.1f} of {found.total / 2**20:.1f} MiB are free in {folder}"


def drop_uncommitted(folder: Path, newest: CheckpointEntry, but: Collection[str]) -> None:
    """Remove what the generation of ``newest`` wrote before it and could not commit."""
    for entry in entries(folder):
        own = entry.generation == newest.generation and entry.order < newest.order
        if own and entry.name not in but and not (folder / entry.name / MARKER).exists():
            shutil.rmtree(folder / entry.name, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".new")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    for folder in (path.parent, path.parent.parent):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
