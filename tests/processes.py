"""What a test reads of a process that may end while it is read (one that has ended has nothing to say); one that
carries a pod's mark; and one that lacks descriptors for a while."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from nodeagent.osutil.linux import MARK, has_mark


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


def marked_sleep(mark: str) -> subprocess.Popen[bytes]:
    """A process of the pod with this mark. Popen returns when exec has closed its files; the kernel shows the new
    environment a moment later."""
    process = subprocess.Popen(["sleep", "600"], env={MARK: mark}, start_new_session=True)
    while not has_mark(process.pid, mark, os.getuid()):
        assert process.poll() is None
        time.sleep(0.001)
    return process
