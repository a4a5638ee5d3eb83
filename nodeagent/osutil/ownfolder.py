"""Folders that must belong to this process's user: made, or checked, before anything in them is trusted.

In a folder that every user may write to (/tmp), another user may have created the path first. Must never take over a
folder of another user.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


class NotOurFolderError(Exception):
    """Another user could read or change files there; ``str()`` says what to do."""


def own(path: Path) -> None:
    """Make the folder if it is missing. Raises NotOurFolderError if another user owns it, or if its path leads through
    an entry that another user put into a folder that every user may write to; OSError if it cannot be made."""
    check(path)
    path.mkdir(parents=True, exist_ok=True)
    check(path)  # another user may have been faster
    _whose(path, path.stat(), {os.geteuid()})


def check(path: Path) -> None:
    """Checks that only this user or root made the existing part of the path. Raises NotOurFolderError."""
    here = Path(path.anchor)
    for name in path.parts[1:]:
        open_to_all = here.stat().st_mode & stat.S_IWOTH
        here = here / name
        try:
            if open_to_all:
                _whose(here, here.lstat(), {0, os.geteuid()})
            here.stat()
        except FileNotFoundError:
            return


def _whose(path: Path, found: os.stat_result, owners: set[int]) -> None:
    wrong = ""
    if found.st_uid not in owners:
        wrong = f"belongs to uid {found.st_uid}, not to {os.geteuid()}"
    elif stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        wrong = "may be written to by everybody"
    if wrong:
        raise NotOurFolderError(
            f"{path} {wrong}: what is in it could be anybody's. Remove it, or use a folder of your own (dirs.run, "
            f"dirs.state and dirs.logs in the agent's config; or set XDG_RUNTIME_DIR and HOME)"
        )
