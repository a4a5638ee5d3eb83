"""The folder of checkpoints: their names, what says that one is whole and that it counts, and which are removed.

Standard library only. A checkpoint is a folder; its manifest, written last, names each file with size and checksum; its
marker says that it was committed. Must never remove the newest that is committed.
"""

from __future__ import annotations

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


class CheckpointEntry(NamedTuple):
    """One checkpoint, by its name. ``order`` counts the checkpoints of the folder, whoever wrote them."""

    order: int
    step: int
    generation: int
    snapshot: bool = False
    """Written out of memory when a node was given up (``writeout.py``), not with torch.distributed.checkpoint."""

    @property
    def name(self) -> str:
        kind = "-snapshot" if self.snapshot else ""
        return f"ckpt-{self.order:06d}-step-{self.step:08d}-g{self.generation}{kind}"


def entry_of(name: str) -> CheckpointEntry | None:
    found = _NAME.fullmatch(name)
    return CheckpointEntry(int(found[1]), int(found[2]), int(found[3]), bool(found[4])) if found else None


def entries(folder: Path) -> list[CheckpointEntry]:
    """All, whole or not, the newest first. A folder that is not there has none."""
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(filter(None, map(entry_of, names)), reverse=True)


def next_order(folder: Path) -> int:
    return max((e.order for e in entries(folder)), default=0) + 1


def candidates(folder: Path, pointer: str) -> list[CheckpointEntry]:
    """Those that may be loaded, the best first: the one that the store says was committed last, then older committed
    ones. Without a pointer: all that have a marker."""
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
    """Size and checksum of these files, as a manifest has them."""
    return {name: [(folder / name).stat().st_size, checksum(folder / name)] for name in names}


def write_manifest(folder: Path, files: Mapping[str, Sequence[int]]) -> None:
    """The last file of a checkpoint; it is on the disk when this returns."""
    text = json.dumps({"version": 1, "files": files}, indent=1)
    _write(folder / MANIFEST, json.dumps({"crc": zlib.crc32(text.encode()), "content": text}))


def read_manifest(folder: Path) -> dict[str, list[int]]:
    """Raises ValueError, saying what is wrong."""
    try:
        record = json.loads((folder / MANIFEST).read_text())
        text = record["content"]
        if zlib.crc32(text.encode()) != record["crc"]:
            raise ValueError("its checksum is wrong")
        files: dict[str, list[int]] = json.loads(text)["files"]
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {MANIFEST}: it was never finished") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / MANIFEST} cannot be used: {error}") from error
    return files


def damage(folder: Path, files: Mapping[str, Sequence[int]]) -> str:
    """What is wrong with these files; "" if nothing is."""
    for name, (size, crc) in sorted(files.items()):
        try:
            found = (folder / name).stat().st_size
            if found != size:
                return f"{folder / name} has {found} bytes instead of {size}"
            if checksum(folder / name) != crc:
                return f"{folder / name} has another checksum than it was written with"
        except OSError as error:
            return f"{folder / name}: {error.strerror}"
    return ""


def mark_committed(folder: Path) -> None:
    _write(folder / MARKER, "")


def prune(folder: Path, newest: CheckpointEntry, keep: int, damaged: Collection[CheckpointEntry] = ()) -> None:
    """After ``newest`` was committed: keep that many committed ones that are whole as far as is known, and nothing else
    that is older. What was written out of memory is not counted: another number of ranks may not be able to load it."""
    older = [e for e in entries(folder) if e.order < newest.order]
    committed = [e for e in older if not e.snapshot and e not in damaged and (folder / e.name / MARKER).exists()]
    for entry in set(older) - set(committed[: keep - 1]):
        shutil.rmtree(folder / entry.name, ignore_errors=True)


def prune_snapshots(folder: Path, newest: CheckpointEntry) -> None:
    """After ``newest`` was written out and committed: of those before it the last stays, and what older generations
    talked over is removed. Checkpoints are left alone."""
    older = [e for e in entries(folder) if e.snapshot and e.order < newest.order]
    committed = [e for e in older if (folder / e.name / MARKER).exists()]
    for entry in set(older) - set(committed[:1]):
        shutil.rmtree(folder / entry.name, ignore_errors=True)
    for path in folder.iterdir():
        found = _TALK.fullmatch(path.name)
        if found and int(found[1]) < newest.generation:
            shutil.rmtree(path, ignore_errors=True)


def part_name(rank: int) -> str:
    """The file with this rank's state in what was written out of memory: a snapshot as it lay there (``memory.py``)."""
    return f"rank-{rank:05d}.snapshot"


def talk_folder(folder: Path, generation: int, token: str) -> Path:
    """Where the nodes of a generation talk over what they write out."""
    return folder / f".writeout-g{generation}-{token}"


def drop(folder: Path, entry: CheckpointEntry) -> None:
    """Remove one that was never finished."""
    shutil.rmtree(folder / entry.name, ignore_errors=True)


def room(folder: Path) -> str:
    """In words, for somebody whose file could not be written."""
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
