"""What a test reads of a process that may end while it is read; a process that has ended has nothing to say."""

from __future__ import annotations

from pathlib import Path


def command_line(pid: int) -> list[str]:
    """What the process was started as, word for word; nothing of one that is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened; or after that, before it was read
        return []


def children(pid: int) -> list[int]:
    """Its children, adopted ones too; zombies are among them."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found
