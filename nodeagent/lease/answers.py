"""What the shims of pods answer to their grants: read by the lease process alone, since the answers are the users'.

Standard library only, and no part of what a shim loads. Must never decide.
"""

from __future__ import annotations

from pathlib import Path

from nodeagent.lease.grants import OBEYED, OBEYED_FORM, read_twice
from nodeagent.osutil.untrusted import UntrustedError, UntrustedFolder


def read_obeyed(folder: Path, key: str) -> float:
    """No workers run in this pod that were started before this time; 0 if its shim has not said. The record is the
    job's user's, in a folder that is not: what lies in it may be any number, and concerns that user's pod only."""
    try:
        with UntrustedFolder(folder) as answers, answers.open(key + OBEYED, anyones=True) as file:
            found = read_twice(file.fileno(), OBEYED_FORM)
    except UntrustedError:
        return 0.0
    return found[0] if found is not None else 0.0
