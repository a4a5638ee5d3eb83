"""The seam to a vendor's devices: what a plug-in provides, and what the agent gives it to do so (docs/accelerators.md).

A plug-in is a subclass of ``Accelerator``, named in the entry point group ``nodeagent.accelerators``. It runs in a
process of its own that the agent replaces when it hangs or ends: it may call a driver, must never be trusted, and never
judges beyond its rules. Every process that reads devices imports this file: the standard library's smallest parts only.
"""

from __future__ import annotations

import os
import pwd
import time

TYPE_CHECKING = False  # without typing: it costs 0.7 MB
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from nodeagent.hardware.readings import Heals
    from nodeagent.model.health import Action, Severity

DIES = 1.0
"""Seconds in which a killed command is gone, unless the kernel holds it."""
MOST_OUTPUT = 4 << 20
"""Bytes of a command's output that are read."""
MOST_BELOW = 256
"""Processes that are killed with a command that started them."""


class ProblemError(Exception):
    """Nothing can be read now. The process ends and is started again, or (``again``) tries again by itself."""

    def __init__(self, why: str, again: bool = False) -> None:
        super().__init__(why)
        self.again = again


class AbsentError(ProblemError):
    """This machine has no driver of this kind: nobody need ask again."""


class Event:
    """Something that happened to a device. ``what`` is the id of one of the plug-in's rules (of NVIDIA's: an Xid)."""

    __slots__ = ("at", "count", "device", "raw", "what")

    def __init__(self, device: str, what: str | int, at: float, count: int = 1, raw: str = "") -> None:
        self.device, self.what, self.at, self.count, self.raw = device, what, at, count, raw


class Persistence:
    """How long, or how often, a rule must hold before it fires: ``after`` seconds without a break, or altogether within
    ``window`` seconds; and beginning anew at least ``times`` times within those."""

    __slots__ = ("after", "times", "window")

    def __init__(self, after: float = 0.0, window: float = 0.0, times: int = 0) -> None:
        self.after, self.window, self.times = after, window, times


AT_ONCE = Persistence()


class DeviceRule:
    """A rule on one device. ``check`` gets the device as ``look`` returned it: None is not known, false is fine, and
    true or a text fires; the text says which value did it. Without a ``check`` it fires by events alone."""

    def __init__(
        self,
        id: str,  # noqa: A002 (the rule's, as in the table)
        severity: Severity,
        action: Action,
        heals: Heals,
        text: str,
        source: str,
        check: Callable[[dict[str, Any]], bool | str | None] | None = None,
        persistence: Persistence = AT_ONCE,
    ) -> None:
        self.check = check
        self.row: dict[str, Any] = {
            "id": id, "severity": severity, "action": action, "heals": heals, "text": text, "source": source,
            "after": persistence.after, "window": persistence.window, "times": persistence.times,
        }  # fmt: skip
        """As ``judging.rules.Rule`` has it."""


class Accelerator:
    """The devices of one vendor. The class is made without arguments, and ``open`` is called once, before all else."""

    name = ""
    """The entry point's name. Ids of devices begin with it and a ``-``, ids of rules with it and a dot."""
    variable = ""
    """The environment variable that hides devices from a program."""
    rules: Sequence[DeviceRule] = ()

    progress: Callable[[], None] = staticmethod(lambda: None)
    """To be called in ``look`` after each device that it may take seconds to bring up: the agent takes that for a sign
    of life, and waits for the end of a look that it would else take for a hang."""

    @property
    def due(self) -> bool:
        """Something happened of which a look has to say more: look at once."""
        return False

    def open(self) -> None:
        """Connect to the driver. Raises AbsentError where there is none, ProblemError."""

    def devices(self) -> list[dict[str, Any]]:
        """Id, index and name of every device (``uuid``, ``index``, ``name``), and nothing that takes longer. Raises
        ProblemError."""
        return [{key: device.get(key, "") for key in ("uuid", "index", "name")} for device in self.look()]

    def look(self) -> list[dict[str, Any]]:
        """Every device now, with fields of ``readings.GpuReading``; what is not known is left out, never made up. The
        rules may use further keys, if they begin with ``_``. Raises ProblemError."""
        raise NotImplementedError

    def events(self, seconds: float) -> list[Event]:
        """Wait for events, for at most so long; those that came, at once. Raises ProblemError."""
        time.sleep(seconds)
        return []


class Command:
    """A vendor's command line tool, asked again and again. One that hangs is killed; while one does not die, no other
    is started."""

    def __init__(self, *argv: str, bound: float) -> None:
        self._argv, self._bound = argv, bound
        self._stuck: Any = None

    def output(self, *more: str) -> str:
        """What it writes, with these arguments added. Raises AbsentError if it is not installed, ProblemError if it
        fails, writes too much, or does not end within ``bound`` seconds."""
        import subprocess

        name = self._argv[0]
        if self._stuck is not None and self._stuck.poll() is None:
            raise ProblemError(f"{name} hangs and cannot be killed", again=True)
        try:
            process = subprocess.Popen(
                [*self._argv, *more], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except FileNotFoundError:
            raise AbsentError(f"{name} is not installed") from None
        except OSError as error:
            raise ProblemError(f"{name} cannot be started: {error.strerror}", again=True) from error
        assert process.stdout is not None
        text, late = _read_all(process.stdout.fileno(), time.monotonic() + self._bound)
        if not late and len(text) <= MOST_OUTPUT:
            try:
                code = process.wait(DIES)
            except subprocess.TimeoutExpired:
                late = True
        process.stdout.close()
        if late or len(text) > MOST_OUTPUT:
            _kill_all(process)
            try:
                process.wait(DIES)
            except subprocess.TimeoutExpired:
                self._stuck = process
            raise ProblemError(
                f"{name} did not answer within {self._bound:g} s" if late else f"{name} writes without an end",
                again=True,
            )
        if code != 0:
            last = text.decode(errors="replace").strip().splitlines()[-1:]
            raise ProblemError(f"{name} failed (exit code {code}): {''.join(last)}", again=True)
        return text.decode(errors="replace")


def _kill_all(process: Any) -> None:
    """SIGKILL the command and all that it has started: many a vendor's tool is a script around a program. They stay in
    the group of this process, so that who kills that reaches them too."""
    import signal

    found = [os.pidfd_open(process.pid)]  # not reaped yet, so its number is its own
    for pid in _below(process.pid):
        try:
            found.append(os.pidfd_open(pid))
        except ProcessLookupError:  # it has ended meanwhile
            continue
    for fd in found:
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(fd)


def _below(pid: int) -> list[int]:
    """Its children and theirs, as they are now; at most ``MOST_BELOW``."""
    found: list[int] = []
    ask = [pid]
    while ask and len(found) < MOST_BELOW:
        above = ask.pop()
        try:
            threads = os.listdir(f"/proc/{above}/task")  # noqa: PTH208 (pathlib costs memory)
        except OSError:
            continue
        for thread in threads:
            children = [int(child) for child in read_proc(f"/proc/{above}/task/{thread}/children").split()]
            found += children
            ask += children
    return found[:MOST_BELOW]


def _read_all(fd: int, until: float) -> tuple[bytes, bool]:
    """What is written to a pipe, up to a bound, and whether the time was over before its end."""
    import select

    poll = select.poll()
    poll.register(fd, select.POLLIN)
    text = b""
    while len(text) <= MOST_OUTPUT:
        left = until - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            return text, True
        more = os.read(fd, 1 << 16)
        if not more:
            return text, False
        text += more
    return text, False


def who(pid: int) -> str:
    """``pid 4711 (train1: python3)``, with what its cgroup says of its job; empty for one that has gone, or that is not
    to be seen from this container. Nothing here may need the memory of the process, as its command line and environment
    do: its user can hold that, and who reads devices would seem to hang."""
    try:
        user = user_of(os.stat(f"/proc/{pid}").st_uid)  # noqa: PTH116 (a third of what pathlib takes)
    except OSError:
        return ""
    name = " ".join(read_proc(f"/proc/{pid}/comm").decode(errors="replace").split())
    job = job_of(read_proc(f"/proc/{pid}/cgroup").decode(errors="replace"))
    return f"pid {pid} ({user}: {name}{f', {job}' if job else ''})"


def job_of(cgroups: str) -> str:
    """Whose job a process is part of, from its ``/proc/PID/cgroup``: Slurm's, or the pod of an agent on this machine
    (its unit, whose description names the job). Empty: they do not say."""
    for line in cgroups.splitlines():
        parts = line.split("/")
        for at, part in enumerate(parts):
            if part.startswith("nodeagent-pod-"):
                return f"of {part}"
            if part.startswith("job_") and any("slurm" in above for above in parts[:at]):
                return f"of job {part[4:]} of Slurm"
    return ""


def read_proc(path: str) -> bytes:
    """A small file of /proc; empty where it is not to be had."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 1 << 14)
    except OSError:
        return b""
    finally:
        os.close(fd)


def user_of(uid: int) -> str:
    """The name of a user of this machine, else its number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def numa_of(pci: str, root: str = "") -> int | None:
    """The NUMA node that the device ``pci`` (``0000:3b:00``) is near to, as the kernel says; None: it does not say, or
    the machine has only one. ``root``: of another file tree. A broken driver can block its reader."""
    try:
        with open(f"{root}/sys/bus/pci/devices/{pci}.0/numa_node") as file:  # noqa: PTH123  # pathlib costs memory
            node = int(file.read())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
