"""Folders that are to be this process's own: made, or found as such, before anything in them is believed.

Where everybody may write (/tmp), somebody else may have been there first. Must never make a stranger's folder ours.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


class NotOurFolderError(Exception):
    """Somebody else could read or change what would be kept there; ``str()`` says what to do."""


def own(path: Path) -> None:
    """Make the folder where it is missing. Raises NotOurFolderError where it is not this user's, or leads through what
    a stranger has put into a folder that everybody may write to; OSError where it cannot be made."""
    check(path)
    path.mkdir(parents=True, exist_ok=True)
    check(path)  # a stranger may have been faster
    _whose(path, path.stat(), {os.geteuid()})


def check(path: Path) -> None:
    """As far as the folder is there, nobody but this user or root has put it there. Raises NotOurFolderError."""
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
