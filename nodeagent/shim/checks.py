"""Whether this node could run the pod: folders, command, limits, env_file, all looked at as the job's user; and which
folder its checkpoint_dir is.

Standard library only. The checks run in a forked child of the shim, because a dead file server blocks the process that
looks. Decides nothing about phases: it answers with a verdict.
"""

from __future__ import annotations

import json
import os
import re
import resource
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any

from nodeagent.osutil.linux import passing, write_atomic
from nodeagent.shim.container import ASK_BOUND, RuntimeMissingError, find_runtime, remove_left
from nodeagent.shim.environment import ModulesError, base_environment, read_env_file, with_modules
from nodeagent.shim.processes import RLIMITS, limit_value

MARKER = ".nodeagent-folder"
"""The file in checkpoint_dir that holds the folder's random id: nodes that read the same one share the folder."""
MARKER_BOUND = 5.0
"""Seconds that a marker without a whole id is waited for: another node is just writing it."""
MARKER_AGAIN = 0.05
"""Seconds between two looks at it."""


class UnfitError(Exception):
    """``str()`` is the sentence for the person, ``code`` what a shell would exit with (127, 126) or 0; ``passing``, as
    in ``Readiness``, follows from the system's error behind it."""

    def __init__(self, text: str, code: int = 0, error: OSError | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.passing = error is not None and passing(error)


def check(pod: Mapping[str, Any]) -> dict[str, Any]:
    """What the shim needs to know of the job's folders: ``base`` (the environment before the job's own, with the site's
    modules loaded), ``env_file`` (its content), ``container`` (what ``find_runtime`` found), ``local_address`` (what
    the node's address means here), ``fork_server`` (whether the command is one it can stand in for), ``programs`` (the
    roles' commands that it can, too), ``path0`` (what its ``sys.path`` begins with), and what ``see_folder`` tells.
    Raises UnfitError for the first thing that is wrong."""
    cwd, command = pod["working_dir"], pod["command"]
    _check_room(Path(pod["state"]))
    _check_folder(cwd)
    base = base_environment(os.getuid(), pod["environ"], pod["own_user"])
    if pod["modules"]:
        base = _load(pod["modules"], base)
    from_file = _read_file(str(Path(cwd, pod["env_file"]))) if pod["env_file"] else {}
    env = base | from_file | pod["env"]
    container = None
    if pod["container"] is not None:
        container = _runtime(pod["container"], base, cwd)
    else:
        for words in (command, *(role["command"] for role in pod["roles"].values())):
            resolve(words[0], cwd, env["PATH"])
    folder = see_folder(pod)
    check_limits(pod["limits"])
    program = python_program(command, cwd) if pod["fork_server"] else None
    path0 = "" if program is None else cwd if program == "-m" else str(Path(cwd, program).resolve().parent)
    programs: list[Sequence[str]] = []
    if program is not None:
        own = resolve(command[0], cwd, env["PATH"])
        commands = [command, *(role["command"] for role in pod["roles"].values())]
        programs = [one for one in commands if resolve(one[0], cwd, env["PATH"]) == own and python_program(one, cwd)]
    found = {"base": base, "env_file": from_file, "container": container, "local_address": _looked_up(pod["address"])}
    return found | {"fork_server": program is not None, "programs": programs, "path0": path0} | folder


def _looked_up(host: str) -> str:
    """A name may take long to look up."""
    try:
        return str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        unknown = UnfitError(f"the node's address {host} cannot be looked up: {error}")
        unknown.passing = True
        raise unknown from None


def _load(names: Sequence[str], base: Mapping[str, str]) -> dict[str, str]:
    try:
        return with_modules(names, base)
    except ModulesError as error:
        raise UnfitError(str(error)) from None


def _runtime(container: Mapping[str, Any], base: Mapping[str, str], cwd: str) -> dict[str, str]:
    """By the environment before the job's own, which is for the inside."""
    try:
        return find_runtime(container, base, cwd, ASK_BOUND)
    except RuntimeMissingError as error:
        unfit = UnfitError(f"container: {error}", 127)
        unfit.passing = error.passing
        raise unfit from None


def clear_containers(found: Mapping[str, Any], pod: Mapping[str, Any]) -> dict[str, Any]:
    """Remove some of what earlier pods left in podman's store. ``found``: as of ``check``. Returns whether there is
    ``more``. Raises UnfitError."""
    try:
        return {"more": remove_left(found["container"]["program"], found["base"], pod["working_dir"])}
    except RuntimeMissingError as error:
        raise UnfitError(str(error)) from None


def see_folders(pod: Mapping[str, Any]) -> dict[str, Any]:
    """As ``see_folder``; the working_dir has to be there, too."""
    _check_folder(pod["working_dir"])
    return see_folder(pod)


def see_folder(pod: Mapping[str, Any]) -> dict[str, Any]:
    """``folder``: the id of the job's checkpoint_dir, "" for a job without one. Raises UnfitError."""
    if not pod["checkpoint_dir"]:
        return {"folder": ""}
    path = Path(pod["working_dir"], pod["checkpoint_dir"])
    _check_writable(path)
    return {"folder": folder_id(path)}


def folder_id(folder: Path, patience: float = MARKER_BOUND) -> str:
    """The id in the folder's marker; the first that comes makes it. Raises UnfitError."""
    marker = folder / MARKER
    end = time.monotonic() + patience
    while True:
        try:
            found = _read_marker(marker) or _make_marker(marker)
        except OSError as error:
            text = f"checkpoint_dir {folder}: {MARKER} in it cannot be written or read: {error.strerror}"
            raise UnfitError(f"{text} (as user {_me()})", error=error) from None
        if re.fullmatch("[0-9a-f]{32}", found):
            return found
        if time.monotonic() >= end:
            raise UnfitError(f"checkpoint_dir {folder}: {MARKER} in it holds no id; remove that file")
        time.sleep(MARKER_AGAIN)


def verdict(look: Callable[[Mapping[str, Any]], dict[str, Any]], pod: Mapping[str, Any]) -> str:
    """``check`` or ``see_folder`` as one line of JSON; ``reason``, ``code`` and ``passing`` if the node is unfit."""
    try:
        return json.dumps(look(pod))
    except UnfitError as error:
        return json.dumps({"reason": str(error), "code": error.code, "passing": error.passing})
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        text = f"the job's folders could not be looked at as user {_me()}: {error.strerror}{where}"
        return json.dumps({"reason": text, "code": 0, "passing": passing(error)})


def resolve(command: str, cwd: str, path: str) -> str:
    """The program a shell in ``cwd`` with this PATH would run. Raises UnfitError with code 127 or 126."""
    if "/" in command:
        found = Path(cwd, command)
        try:
            if not found.exists():
                raise UnfitError(f"command '{command}' does not exist", 127)
            if found.is_file() and os.access(found, os.X_OK):
                return str(found)
        except OSError as error:  # a folder above it that the user may not enter, say
            text = f"command '{command}' is not to be reached as user {_me()}: {error.strerror}"
            raise UnfitError(text, 126, error) from None
        raise UnfitError(f"command '{command}' is not executable for user {_me()}", 126)
    absolute = os.pathsep.join(str(Path(cwd, part)) for part in path.split(os.pathsep))
    which = shutil.which(command, path=absolute)
    if which is None:
        raise UnfitError(f"command '{command}' was not found in PATH ({path})", 127)
    return which


def program_words(command: Sequence[str]) -> list[str]:
    """What follows the interpreter and its -u."""
    return list(dropwhile(lambda word: word == "-u", command[1:]))


def python_program(command: Sequence[str], cwd: str) -> str | None:
    """The script, or "-m", of a command that a fork server can stand in for: python [-u] script|-m module
    [argument...]."""
    if not re.fullmatch(r"python(3(\.\d+)?)?", Path(command[0]).name):
        return None
    rest = program_words(command)
    if not rest or (rest[0] == "-m" and len(rest) < 2):
        return None
    if rest[0] == "-m":
        return "-m"
    if rest[0].startswith("-") or rest[0].endswith((".pyc", ".pyz", ".zip")) or Path(cwd, rest[0]).is_dir():
        return None
    return rest[0]


def check_limits(limits: Mapping[str, int | str]) -> None:
    """The user may set these limits. Raises UnfitError."""
    for name, wanted in limits.items():
        if name not in RLIMITS:
            raise UnfitError(f"limit '{name}' is not known; there are {', '.join(RLIMITS)}")
        value, hard = limit_value(wanted), resource.getrlimit(RLIMITS[name])[1]
        if hard == resource.RLIM_INFINITY or os.geteuid() == 0:
            continue
        if value == resource.RLIM_INFINITY or value > hard:
            raise UnfitError(f"limit {name}={wanted} is above what user {_me()} may have ({hard})")


def _me() -> str:
    return base_environment(os.getuid(), {}, True).get("USER", str(os.getuid()))


def _check_folder(path: str) -> None:
    try:
        mode = Path(path).stat().st_mode
    except FileNotFoundError:
        raise UnfitError(f"working_dir {path} is missing") from None
    except OSError as error:
        raise UnfitError(f"working_dir {path}: {error.strerror} (as user {_me()})", error=error) from None
    if not stat.S_ISDIR(mode):
        raise UnfitError(f"working_dir {path} is not a folder")
    if not os.access(path, os.X_OK):
        raise UnfitError(f"working_dir {path} may not be entered by user {_me()}")


def _check_room(state: Path) -> None:
    """A promise, and what became of the workers, can be written down."""
    probe = state / f"room-{os.getpid()}"
    try:
        write_atomic(probe, bytes(4096), durable=True)
    except OSError as error:
        text = f"{state} cannot be written to: {error.strerror} (as user {_me()})"
        raise UnfitError(text, error=error) from None
    finally:
        probe.unlink(missing_ok=True)


def _check_writable(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"checkpoint_dir {path} cannot be created: {error.strerror} (as user {_me()})"
        raise UnfitError(text, error=error) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise UnfitError(f"checkpoint_dir {path} is not writable for user {_me()}")


def _read_marker(marker: Path) -> str:
    """What it holds, "" if it is not there. Never more than an id's length and a little: it may be anything."""
    try:
        with marker.open("rb") as file:
            return file.read(64).decode("ascii", "replace")
    except FileNotFoundError:
        return ""


def _make_marker(marker: Path) -> str:
    """The id written to it, "" if it is there already."""
    found = secrets.token_hex(16)
    try:
        fd = os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return ""
    try:
        with os.fdopen(fd, "w") as file:
            file.write(found)
            file.flush()
            os.fsync(fd)
    except OSError:  # a full disk, say: what is left there would keep every node out
        marker.unlink(missing_ok=True)
        raise
    return found


def _read_file(path: str) -> dict[str, str]:
    try:
        return read_env_file(path)
    except OSError as error:
        raise UnfitError(f"env_file {path}: {error.strerror} (as user {_me()})", error=error) from None
    except ValueError as error:
        raise UnfitError(f"env_file {error}") from None
