"""Run a command that always ends with the process that started it.

Owns the few lines between a supervisor and its child: request SIGKILL from the kernel at the parent's death, then
become the command. Run as a script by its path, so that it imports nothing of the package and the command starts only a
few hundredths of a second later. Must never stay between the two: the pid is the command's own.

The kernel ties this to the *thread* that started the process: start tethered commands from the main thread.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
SIGKILL = 9


def tethered(command: Sequence[str]) -> list[str]:
    """The argument list that runs ``command`` as a child that dies with the calling process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"cannot tie {command[0]} to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # the parent ended before the request, so no signal will come
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
