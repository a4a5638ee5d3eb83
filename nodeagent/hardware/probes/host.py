"""The host probe: a process of its own that follows the kernel's log and looks at the machine, and writes JSON lines.

Standard library only. Must never judge. A disk that does not answer holds up a thread of its own and nothing else.

    {"events": [...]}    at once what is new; its repetitions along with the next "host"; fields of readings.DeviceEvent
    {"host": {...}}      every ``POLL`` seconds; fields of readings.HostReading

Argument: JSON with ``proc``, ``sys``, ``kmsg`` (paths), ``folders``, ``interfaces`` (names), ``units`` (a folder),
``poll``, ``ports`` (that were up once) and ``after`` (the number of the newest record that was reported before; null:
what is older than this process is nobody's business). Both lines tell the newest one's number: ``record``.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice

from nodeagent.hardware.probes.kernellog import KernelLines

TYPE_CHECKING = False  # without typing and pathlib: they cost 1.3 MB
if TYPE_CHECKING:
    from typing import Any

POLL = 5.0
GATHER = 0.1
"""Seconds between two looks into the kernel's log while it is written to."""
SHARE = 0.006
"""Of a core: what the kernel's log may cost, however much is written. The kernel keeps what waits; what it overwrites
meanwhile is reported as lost."""
LATE = 5.0
"""Seconds after which a folder that does not answer is reported as one that does not."""
FULL = 256 << 20
"""Free bytes below which a folder is as good as full."""
INIT_ROOT = "/proc/1/root"
HOUR = 3600.0
_MANAGER = "nvidia-fabricmanager.service"
_IMEX = "nvidia-imex.service"
_RECORD = 8192
_MOST_FLAPS = 100
FEW_FILES = 1000
"""Files that a folder's file system has room for, below which it is as good as full."""
TIME_ERROR = 5
"""What adjtimex(2) returns while nothing keeps the machine's clock right."""
_AT_ONCE = 1500
"""Records of one look."""
_ADJTIMEX = getattr(ctypes.CDLL(None), "adjtimex", None)
_TIMEX = 512
"""Bytes of a ``struct timex``, and more; zeros ask without changing anything."""


class KernelLog:
    """/dev/kmsg from its beginning: what happened while nobody looked is there too."""

    def __init__(self, path: str, after: int | None) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.folder = KernelLines(time.time() - time.clock_gettime(time.CLOCK_MONOTONIC), after)
        self._live = False
        """All that had waited was read."""

    def fileno(self) -> int:
        return self._fd

    def read(self) -> bool:
        """Take in what is there, but no more than a share: a storm must not hold up the rest. Whether there was any."""
        records: list[bytes] = []
        arrived = time.time() if self._live else None
        try:
            for data in islice(iter(partial(os.read, self._fd, _RECORD), b""), _AT_ONCE):
                records.append(data)
        except BlockingIOError:
            self._live = True
        except BrokenPipeError:  # overwritten before we came: the next read goes on with the oldest there is
            pass
        self.folder.read(records, arrived)
        return bool(records)


class Ports:
    """Network ports that were up once, in this boot or an earlier one, and those that the config names."""

    def __init__(self, sys_root: str, interfaces: Sequence[str], once: Sequence[str] = ()) -> None:
        self._sys, self._interfaces = sys_root, interfaces
        self._down: dict[str, float | None] = dict.fromkeys((*once, *interfaces))
        """Since when; None: up, or not looked at yet."""
        self._up: set[str] = set()
        self._flaps: dict[str, list[float]] = {}

    def look(self, now: float) -> dict[str, Any]:
        """Which are down, or not there any more, and for how long; which keep going down and up; which were up. As seen
        last where there is no descriptor or memory to look."""
        with suppress(OSError):
            self._see(dict(self._states()), now)
        flaps = {port: sum(now - at < HOUR for at in times) for port, times in self._flaps.items()}
        return {
            "ports_down": [[port, now - since] for port, since in self._down.items() if since is not None],
            "port_flaps": [[port, times] for port, times in flaps.items() if times],
            "ports": sorted(self._up),
        }

    def _see(self, states: Mapping[str, bool], now: float) -> None:
        for port in (*states, *(known for known in self._down if known not in states)):
            up = states.get(port, False)
            if up:
                self._up.add(port)
            if port not in self._down:
                if up:
                    self._down[port] = None
            elif up and self._down[port] is not None:
                self._down[port] = None
                self._flaps[port] = [*self._flaps.get(port, [])[-_MOST_FLAPS:], now]
            elif not up and self._down[port] is None:
                self._down[port] = now

    def _states(self) -> Iterator[tuple[str, bool]]:
        adapters = f"{self._sys}/class/infiniband"
        for adapter in _names(adapters):
            for port in _names(f"{adapters}/{adapter}/ports"):
                try:
                    state = _text(f"{adapters}/{adapter}/ports/{port}/state")
                except OSError as error:
                    if _short(error):
                        raise
                    continue
                yield f"{adapter}/{port}", "ACTIVE" in state
        for name in self._interfaces:
            try:
                yield name, _text(f"{self._sys}/class/net/{name}/carrier").strip() == "1"
            except OSError as error:  # gone, or administratively down
                if _short(error):
                    raise
                yield name, False


class FolderProbe:
    """Folders that jobs use, looked at in a thread: a dead file server answers never."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._found: dict[str, str] = {}
        self._asked: dict[str, float] = {}

    def look(self, now: float) -> list[str]:
        """``path: what is wrong`` of each."""
        for path in self._paths:
            if path not in self._asked:
                self._asked[path] = now
                threading.Thread(target=self._ask, args=(path,), daemon=True).start()
        # a copy: a thread that has its answer deletes from it meanwhile
        late = {p: "does not answer" for p, asked in list(self._asked.items()) if now - asked > LATE}
        return [f"{path}: {what}" for path, what in sorted((self._found | late).items()) if what]

    def _ask(self, path: str) -> None:
        try:
            state = os.statvfs(as_init_sees(path))
            free = state.f_bavail * state.f_frsize
            wrong = no_room(bool(state.f_flag & os.ST_RDONLY), free, state.f_files, state.f_favail)
        except OSError as error:
            wrong = error.strerror or str(error)
        self._found[path] = wrong
        del self._asked[path]


def no_room(read_only: bool, free: int, files: int, free_files: int) -> str:
    """Why nothing more can be written to a file system; empty if it can. Without ``files`` it has no such bound."""
    if read_only:
        return "read-only"
    if free < FULL:
        return f"{free >> 20} MiB free"
    return f"room for {free_files} more files" if files and free_files < FEW_FILES else ""


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _names(folder: str) -> list[str]:
    """What is in it, in order; nothing where there is none. Raises OSError if there is no descriptor or memory to
    look."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        if _short(error):
            raise
        return []


def _short(error: OSError) -> bool:
    """Nothing was learned (``osutil.linux.short``, which would load more than this process has use for)."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def as_init_sees(path: str) -> str:
    """The path as it is on the node, not in the agent's sandbox, where it may be read-only or hidden. Only root can
    look from there."""
    outside = f"{INIT_ROOT}{os.path.realpath(path)}"
    return outside if os.geteuid() == 0 and os.access(INIT_ROOT, os.X_OK) else path


def available_memory(proc: str) -> float | None:
    """Share of the memory that new processes could have."""
    values = {}
    for line in _text(f"{proc}/meminfo").splitlines():
        name, _, rest = line.partition(":")
        values[name] = rest.split()
    total, free = values.get("MemTotal"), values.get("MemAvailable")
    return int(free[0]) / int(total[0]) if total and free else None


def pressure(proc: str, resource: str) -> float | None:
    """Share of the last minute in which nothing that ran could go on for want of it."""
    try:
        lines = _text(f"{proc}/pressure/{resource}").splitlines()
    except OSError:  # a kernel that does not keep it, or is configured not to
        return None
    fields = next((line.split() for line in lines if line.startswith("full ")), [])
    values = [field[6:] for field in fields if field.startswith("avg60=")]
    return _number(values[0]) / 100 if values else None


def handles(proc: str) -> dict[str, float | None]:
    """Shares of the open files, and of the processes and threads, that the kernel allows."""
    found: dict[str, float | None] = {"files_used": None, "processes_used": None}
    try:
        used, _, most = _text(f"{proc}/sys/fs/file-nr").split()
        found["files_used"] = int(used) / max(1, int(most))
        running = _text(f"{proc}/loadavg").split()[3].partition("/")[2]
        bounds = [int(_text(f"{proc}/sys/kernel/{name}")) for name in ("pid_max", "threads-max")]
        found["processes_used"] = int(running) / max(1, min(bounds))
    except (OSError, ValueError, IndexError):
        pass  # a kernel that writes it otherwise: not known
    return found


def clock_synchronised() -> bool | None:
    """Whether anything keeps the machine's clock right; None: the kernel does not say."""
    state = _ADJTIMEX(ctypes.create_string_buffer(_TIMEX)) if _ADJTIMEX is not None else -1
    return None if state < 0 else bool(state != TIME_ERROR)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def fabric_manager(sys_root: str, units: str) -> bool | None:
    """Whether its unit has processes; None if it is not installed, or its control group is not to be seen."""
    return _runs(sys_root, _MANAGER) if os.path.exists(f"{units}/{_MANAGER}") else None


def nvswitches(proc: str) -> bool:
    """Whether the driver has any, as far as is to be seen: without them nothing is judged."""
    try:
        return bool(_names(f"{proc}/driver/nvidia-nvswitch/devices"))
    except OSError:
        return False


def imex(sys_root: str, etc: str) -> bool | None:
    """Whether the service runs that lets GPUs of several machines share memory; None unless it is to run from boot on
    and its domain has another machine: it is also installed on a single one, where it rightly does not run, and where
    jobs start it for themselves it rests between them."""
    if not os.path.lexists(f"{etc}/systemd/system/multi-user.target.wants/{_IMEX}"):
        return None
    try:
        lines = map(str.strip, _text(f"{etc}/nvidia-imex/nodes_config.cfg").splitlines())
    except OSError:
        return None
    domain = {line for line in lines if line and not line.startswith("#")}
    return _runs(sys_root, _IMEX) if len(domain) > 1 else None


def _runs(sys_root: str, unit: str) -> bool | None:
    """Whether its control group has processes; None without a group of systemd's (a container's /sys, for one), or
    if there is no descriptor or memory to look."""
    for root, file in (("", "cgroup.events"), ("/systemd", "cgroup.procs")):
        if os.path.isdir(services := f"{sys_root}/fs/cgroup{root}/system.slice"):
            try:
                text = _text(f"{services}/{unit}/{file}")
            except OSError as error:
                return None if _short(error) else False
            return bool(text.strip()) if root else "populated 1" in text
    return None


def pause(spent: float) -> float:
    """Seconds to wait after a look that took so many of CPU time."""
    return max(GATHER, spent / SHARE)


def write(what: dict[str, Any]) -> None:
    """One line; the pipe's end is the end of this process."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Look and follow, for as long as somebody reads."""
    given = json.loads(sys.argv[1])
    proc, sys_root = given["proc"], given["sys"]
    ports, folders = Ports(sys_root, given["interfaces"], given["ports"]), FolderProbe(given["folders"])
    log: KernelLog | None = None
    wrong = ""
    try:
        log = KernelLog(given["kmsg"], given["after"])
    except OSError as error:
        wrong = f"{given['kmsg']}: {error.strerror}"
    poll = select.poll()
    if log is not None:
        poll.register(log, select.POLLIN)
    due, spent = 0.0, time.process_time()
    while True:
        busy = log is not None and log.read()
        if log is not None and (events := log.folder.news()):
            write({"events": events, "record": log.folder.number})
        now = time.monotonic()
        if now >= due:
            host = {
                "memory_available": available_memory(proc),
                "full_disks": folders.look(now),
                "fabric_manager": fabric_manager(sys_root, given["units"]),
                "nvswitches": nvswitches(proc),
                "imex": imex(sys_root, given["etc"]),
                "kernel_log": wrong,
                "memory_pressure": pressure(proc, "memory"),
                "io_pressure": pressure(proc, "io"),
                "clock_synchronised": clock_synchronised(),
            }
            repeated = log.folder.take() if log is not None else []
            host |= handles(proc) | ports.look(now)
            number = log.folder.number if log is not None else None
            write({"host": host, "record": number} | ({"events": repeated} if repeated else {}))
            due = now + given["poll"]
        if busy:
            time.sleep(pause(time.process_time() - spent))
        spent = time.process_time()
        poll.poll(1000 * max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        sys.exit(0)
