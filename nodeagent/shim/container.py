"""Workers inside containers: whether this node can start them, by which command line, and which process is whose.

The job's user runs podman or Apptainer, never root for him. A container shares the node's network and shared memory,
has no cgroup of its own (it stays in the pod's), and is below the shim like any process of the pod: what fences the
pod ends it. Standard library only. Must never pull an image, nor decide when a worker ends.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nodeagent.osutil.linux import passing, short
from nodeagent.shim.processes import children_of, limit_value, parent_of

ASK_BOUND = 15.0
"""Seconds for podman to say whether it has an image; less than the checks have."""
LIST_BOUND, REMOVE_BOUND = 5.0, 14.0
"""Seconds to list what earlier pods left, and to remove some of it; together less than a look has."""
LABEL = "nodeagent"
"""Of podman's containers: host and folder of the pod."""
FREE_NAME = f'timeout -k 1 {REMOVE_BOUND:g} "$1" rm --force --ignore --time=0 "$2" >/dev/null 2>&1; shift 2; exec "$@"'
"""Removes what has the container's name, if a worker before was killed with its runtime, and becomes podman. podman
itself (``--replace``) would print that name where the worker prints."""
MOST_REMOVED = 8
"""Containers that are removed at once."""
INITS = ("/usr/libexec/podman", "/usr/local/libexec/podman", "/usr/lib/podman", "/usr/local/lib/podman", "/usr/bin")
"""Where distributions put ``catatonit``, which podman runs before a command: a first process of a container does not
end by a SIGTERM that it does not handle."""
MOST_FILES, MOST_PROCESSES = 1 << 20, 1 << 15
"""The most that podman lets itself have, and so its containers."""
KEPT = frozenset({"LANG", "USER", "LOGNAME"})
"""Of the login and the recorded shell. The rest says where things are on the node, and an image has its own."""
REMOTE = "CONTAINER_"
"""How the names of variables begin that make podman ask a service instead of starting containers itself."""
LONGEST_LINE = 1 << 15
"""Bytes of a variable in a file that podman reads; it takes twice as many."""
NVIDIA, AMD = "CUDA_VISIBLE_DEVICES", ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
LONGEST_PID, MOST_BETWEEN = 16, 8
"""Bytes of a pidfile that are read; processes between the shim and the first one of a container, at most."""
SIGNALLED = 128
"""A runtime ends with this plus the signal that its command ended by, as a shell does."""
MOST_SHOWN = 500
"""Characters of the last line that a runtime wrote."""
NOT_BEGUN = frozenset({125, 126, 127})
"""What podman ends with when it cannot start a container; a command may end so, too."""
MQUEUE = Path("/dev/mqueue")


_WARNING = re.compile(r"^WARN|level=warn")


class RuntimeMissingError(Exception):
    """``str()`` is the sentence for the person; ``passing``, as in ``Readiness``: podman gave no answer, or one to
    another question."""

    def __init__(self, text: str, *, passing: bool = False) -> None:
        super().__init__(text)
        self.passing = passing


def find_runtime(container: Mapping[str, Any], env: Mapping[str, str], cwd: str, bound: float) -> dict[str, str]:
    """Of the node: ``program``, and podman's ``init``. Looks whether the image is there; podman may take ``bound``
    seconds to say so. Raises RuntimeMissingError."""
    names = ("podman",) if container["runtime"] == "podman" else ("apptainer", "singularity")
    program = next(filter(None, (shutil.which(name, path=env["PATH"]) for name in names)), None)
    if program is None:
        raise RuntimeMissingError(f"{names[0]} was not found in PATH ({env['PATH']}); install it on this node")
    image, found = Path(container["image"]), {"program": program}
    if container["runtime"] == "podman":
        init = shutil.which("catatonit", path=os.pathsep.join([*INITS, env["PATH"]]))
        if init is None:
            raise RuntimeMissingError("podman has no catatonit, which passes signals on; install the package catatonit")
        found["init"] = init
        if not image.is_absolute():
            _find_in_store(program, container["image"], env, cwd, bound)
            return found
        if not image.is_dir():
            raise RuntimeMissingError(f"image {image} is not a folder on this node; podman takes a folder or a name")
    elif not image.exists():
        raise RuntimeMissingError(f"image {image} is not on this node")
    return found


def _find_in_store(program: str, image: str, env: Mapping[str, str], cwd: str, bound: float) -> None:
    done = _ask([program, "image", "exists", image], env, cwd, bound)
    errors = [line for line in done.stderr.splitlines() if line.strip() and not _WARNING.search(line)]
    if done.returncode == 1 and not errors:
        text = f"podman has no image {image} for user {env.get('USER', os.getuid())} on this node"
        raise RuntimeMissingError(f"{text}; as this user: podman pull {image}")
    if done.returncode:
        text = f"podman failed with exit code {done.returncode}: {_last(done.stderr)}"
        raise RuntimeMissingError(text, passing=True)


def remove_left(program: str, env: Mapping[str, str], cwd: str) -> bool:
    """Remove some of what podman still knows of containers whose pods are gone: a pod that was killed with all that
    belonged to it left a record there, and a layer of what it wrote. Returns whether there are more. Raises
    RuntimeMissingError."""
    shown = f'{{{{.ID}}}} {{{{index .Labels "{LABEL}"}}}}'
    words = [program, "ps", "--all", "--no-trunc", f"--filter=label={LABEL}", f"--format={shown}"]
    listed = _ask(words, env, cwd, LIST_BOUND)
    rows = [line.partition(" ") for line in listed.stdout.splitlines()]
    here = f"{os.uname().nodename}:"
    gone = [key for key, _, pod in rows if pod.startswith(here) and not os.path.lexists(pod.removeprefix(here))]
    if gone:
        _ask([program, "rm", "--force", "--ignore", "--time=0", *gone[:MOST_REMOVED]], env, cwd, REMOVE_BOUND)
    return len(gone) > MOST_REMOVED


def _ask(words: Sequence[str], env: Mapping[str, str], cwd: str, bound: float) -> subprocess.CompletedProcess[str]:
    """Raises RuntimeMissingError if there is no answer."""
    try:
        return subprocess.run(
            words, env=_own(env), cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=bound, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        text = f"{' '.join(words[:2])} did not answer within {bound:g} s"
        raise RuntimeMissingError(text, passing=True) from None
    except OSError as error:
        raise RuntimeMissingError(f"{words[0]} cannot be run: {error.strerror}", passing=passing(error)) from None


def _own(env: Mapping[str, str]) -> dict[str, str]:
    """As podman is to have it."""
    return {key: value for key, value in env.items() if not key.startswith(REMOTE)}


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["it gave no reason"])[-1]


class Containers:
    """Those of one pod. ``found``: as of ``find_runtime``; ``base``: the environment before the job's own, by which the
    runtime itself goes; ``from_file``: of the job's env_file."""

    def __init__(
        self,
        pod: Mapping[str, Any],
        folder: Path,
        found: Mapping[str, str],
        base: Mapping[str, str],
        from_file: Mapping[str, str],
    ) -> None:
        self._pod, self._folder, self._found, self._base = pod, folder, found, base
        self._of_job = pod["env"].keys() | from_file.keys()
        self._podman = pod["container"]["runtime"] == "podman"
        self._key = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]

    def start(self, argv: Sequence[str], env: Mapping[str, str], local_rank: int) -> tuple[list[str], dict[str, str]]:
        """What runs the command in a container, and in which environment. Raises OSError."""
        inside = {k: v for k, v in env.items() if k in KEPT or self._base.get(k) != v}
        before = {key: value for key, value in self._base.items() if key in self._of_job}
        outside = _own({key: value for key, value in env.items() if key not in self._of_job} | before)
        if not self._podman:
            return [*self._apptainer_words(inside), *argv], outside | {f"APPTAINERENV_{k}": inside[k] for k in inside}
        self._pidfile(local_rank).unlink(missing_ok=True)
        filed = {key: inside[key] for key in sorted(inside.keys() & self._of_job) if _is_line(key, inside[key])}
        for key in inside.keys() & self._of_job - filed.keys():
            if key in outside:
                raise OSError(errno.EINVAL, "a value of more than one line, or too long, for podman", key)
            outside[key] = inside[key]
        words = [*self._podman_words(inside, local_rank), f"--env-file={self._write(filed, local_rank)}"]
        words += [f"--env={name}" for name in sorted(inside.keys() - filed.keys())]
        return [*words, *self._image_words(), *argv], outside

    def _write(self, env: Mapping[str, str], local_rank: int) -> Path:
        """The job's own variables, for the inside alone: podman would go by its HOME, or its LD_PRELOAD. And neither
        file nor environment is seen by other users of the node, as a command line is."""
        path = self._folder / f"environment-{local_rank}"
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(b"".join(os.fsencode(f"{key}={value}\n") for key, value in env.items()))
        return path

    def limits(self, limits: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """Those that the runtime itself is started with: podman could not work within small ones."""
        return () if self._podman else limits

    def process(self, pid: int, local_rank: int) -> int:
        """The process of a worker's own command; ``pid``, the runtime's, while there is none. Raises OSError if there
        is no descriptor or memory to look."""
        if not self._podman:
            return pid
        try:
            fd = os.open(self._pidfile(local_rank), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:  # not made yet
            if short(error):
                raise
            return pid
        try:
            first = int(os.read(fd, LONGEST_PID))
        except (OSError, ValueError):  # half written, or no file
            return pid
        finally:
            os.close(fd)
        # The container can write there, too: only what this shim started is believed.
        return next(iter(children_of(first)), first) if self._is_ours(first) else pid

    @staticmethod
    def _is_ours(pid: int) -> bool:
        """It is below this process, as the runtime's monitor is, whose child it is."""
        for _ in range(MOST_BETWEEN):
            pid = parent_of(pid) if pid > 1 else 0
            if pid == os.getpid():
                return True
        return False

    @staticmethod
    def status(status: int) -> int:
        """A wait status, as if there were no runtime between."""
        code = os.waitstatus_to_exitcode(status)
        return code - SIGNALLED if SIGNALLED < code <= SIGNALLED + 64 else status

    def failure(self, status: int, local_rank: int, errors: str) -> str:
        """Why the runtime could not start a container, by the last of what it wrote; "" if it ended otherwise.
        Apptainer becomes the command itself: how that ended is all that can be seen of it."""
        began = os.path.lexists(self._pidfile(local_rank))
        if not self._podman or began or os.waitstatus_to_exitcode(status) not in NOT_BEGUN:
            return ""
        return f"podman failed: {_last(errors)[-MOST_SHOWN:]}"

    def _pidfile(self, local_rank: int) -> Path:
        return self._folder / f"container-{local_rank}"

    def _podman_words(self, inside: Mapping[str, str], local_rank: int) -> list[str]:
        """All but the variables' names and the image."""
        pod, name = self._pod, f"nodeagent-{self._key}-{local_rank}"
        words = [
            "/bin/sh", "-c", FREE_NAME, "sh", self._found["program"], name,
            self._found["program"], "--cgroup-manager=cgroupfs", "run", "--rm", "--pull=never",
            f"--name={name}", f"--pidfile={self._pidfile(local_rank)}",
            f"--label={LABEL}={os.uname().nodename}:{self._folder}",
            "--log-driver=passthrough", "--network=host", "--cgroups=disabled", "--security-opt=label=disable",
            "--init", f"--init-path={self._found['init']}", f"--workdir={pod['working_dir']}",
        ]  # fmt: skip
        words += ["--ipc=host"] if MQUEUE.is_dir() else ["--ipc=private", "--volume=/dev/shm:/dev/shm"]
        words += ["--userns=keep-id"] if os.getuid() else []
        words += [f"--ulimit={name}={value}:{value}" for name, value in self._ulimits().items()]
        words += [f"--volume={bind}" for bind in self._binds()]
        if inside.get(NVIDIA):
            words.append("--device=nvidia.com/gpu=all")
        if any(inside.get(name) for name in AMD):
            words += ["--device=/dev/kfd", "--device=/dev/dri"]
        return words

    def _image_words(self) -> list[str]:
        image = self._pod["container"]["image"]
        return ["--rootfs", image] if image.startswith("/") else ["--entrypoint=", image]

    def _apptainer_words(self, inside: Mapping[str, str]) -> list[str]:
        words = [self._found["program"], "exec", "--cleanenv", f"--pwd={self._pod['working_dir']}"]
        words += [word for bind in self._binds() for word in ("--bind", bind)]
        words += ["--nv"] if inside.get(NVIDIA) else []
        words += ["--rocm"] if any(inside.get(name) for name in AMD) else []
        return [*words, self._pod["container"]["image"]]

    def _binds(self) -> list[str]:
        """The job's folders, what the shim and its workers share, and what the job asks for."""
        pod = self._pod
        folders = [pod["working_dir"], str(self._folder), pod["state"]]
        if pod["checkpoint_dir"]:
            folders.append(str(Path(pod["working_dir"], pod["checkpoint_dir"])))
        asked = list(pod["container"]["binds"])
        taken = {bind.split(":")[1] for bind in asked}
        return [*(f"{folder}:{folder}" for folder in dict.fromkeys(folders) if folder not in taken), *asked]

    def _ulimits(self) -> dict[str, int]:
        """By name; podman's own defaults may be more than this user may have."""
        most = {"nofile": (resource.RLIMIT_NOFILE, MOST_FILES), "nproc": (resource.RLIMIT_NPROC, MOST_PROCESSES)}
        found = {}
        for name, (number, bound) in most.items():
            hard = resource.getrlimit(number)[1]
            found[name] = bound if hard == resource.RLIM_INFINITY else min(hard, bound)
        return found | {name: limit_value(value) for name, value in self._pod["limits"].items()}


def _is_line(key: str, value: str) -> bool:
    """podman reads it from a file as it is."""
    return "\n" not in value and "\r" not in value and len(os.fsencode(f"{key}={value}")) <= LONGEST_LINE
