"""Starting a program the plain way: fork, own session, tied to the shim's life, exec.

Standard library only. The shim's main thread must be the caller: the death signal is tied to the forking thread.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Mapping, Sequence

from nodeagent.workers.linux import allow_tracer, die_with_parent, prefer_no_more, prefer_session

RLIMITS: dict[str, int] = {
    name.removeprefix("RLIMIT_").lower(): getattr(resource, name)
    for name in dir(resource)
    if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"
}
"""``nofile``, ``memlock``, ...: all that this system knows."""


def limit_value(value: int | str) -> int:
    return resource.RLIM_INFINITY if value == "infinity" else int(value)


def own_limits(limits: Mapping[str, int | str]) -> list[tuple[int, int]]:
    """A job's limits as (number, value), for its own processes only: a shim that had them could not end what runs."""
    return [(RLIMITS[name], limit_value(value)) for name, value in limits.items() if name in RLIMITS]


def start_program(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    out: int,
    err: int,
    keep: Sequence[int] = (),
    limits: Sequence[tuple[int, int]] = (),
    first: Callable[[], None] = lambda: None,
) -> int:
    """Run a program, found as a shell in ``cwd`` with this environment would find it, in a new session with /dev/null
    as input; returns its pid. What goes wrong after the fork is told on ``err`` with exit code 126 or 127, as a shell
    does. ``keep``: descriptors it inherits under their numbers. ``limits``: as of ``own_limits``. ``first``: what
    the child does before it is the program."""

    def program() -> None:
        first()
        os.chdir(cwd)
        for fd in keep:
            os.set_inheritable(fd, True)
        for number, value in limits:
            resource.setrlimit(number, (value, value))
        os.execvpe(argv[0], list(argv), dict(env))

    return start_function(program, out, err, argv[0])


def start_function(body: Callable[[], None], out: int, err: int, what: str, *, preferred: bool = False) -> int:
    """Run ``body`` in a forked child with the same care as a program; it ends with code 0 when ``body`` returns.
    ``preferred``: at the shim's own priority, not at the usual one."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 126
    try:
        os.setsid()
        die_with_parent(parent)
        allow_tracer(parent)
        _default_signals()
        if preferred:
            prefer_session(os.getpid())
        else:
            prefer_no_more()
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        body()
        code = 0
    except OSError as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        os.write(2, f"nodeagent: cannot run {what}: {error.strerror}\n".encode())
    except ValueError as error:  # a limit above what may be
        os.write(2, f"nodeagent: cannot run {what}: {error}\n".encode())
    finally:
        os._exit(code)


def _default_signals() -> None:
    """As a login's process has them: nothing ignored, nothing blocked."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
