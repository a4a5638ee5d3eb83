"""Inspects this machine for ``doctor``: folders, disks, shared memory, limits, address, ports. Changes nothing;
``plan/findings/host.py`` judges the facts.

The disk of a dead file server can block an inspection for ever, so it runs in a daemon thread, which keeps no process
from ending.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import os
import resource
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from nodeagent import hardware_missing
from nodeagent.doctor.cluster import store_findings
from nodeagent.model.facts import Finding, FolderFacts, HostFacts
from nodeagent.osutil.tcp import listening
from nodeagent.osutil.threads import in_daemon
from nodeagent.plan.findings.cluster import Placed
from nodeagent.plan.findings.host import judge_host
from nodeagent.shim.container import INITS
from nodeagent.spec.agentconfig import AgentConfig, ephemeral_clash, other_name
from nodeagent.spec.configfile import default_config_path, ephemeral_ports, load_config
from nodeagent.spec.errors import Problem, SpecError
from nodeagent.spec.sections import OFF
from nodeagent.trust.certificate import certificate_digest
from nodeagent.trust.key import ClusterKey, KeyFileError

LOOK_BOUND = 5.0
"""Seconds for one inspection of the machine."""
OPENSSL_BOUND = 3.0
NEEDED = ("pydantic", "yaml", "redis", "hiredis", "psutil", "aiohttp", "structlog", "prometheus_client")
"""Modules that the agent imports; its reader of NVIDIA's driver also imports ``pynvml``, if it is installed."""
LookAtHost = Callable[[AgentConfig, str, str, int | None], HostFacts]
RUNTIMES = ("podman", "apptainer", "singularity")
HYBRID, SUBUID = Path("/sys/fs/cgroup/unified/cgroup.controllers"), Path("/etc/subuid")
PINNING = (Path("/dev/infiniband"), Path("/dev/nvidiactl"))


class Looker:
    """Makes one inspection at a time: if one hangs, this is reported, and no other one begins until it ends."""

    def __init__(self, look: LookAtHost, bound: float) -> None:
        self._look, self._bound = look, bound
        self._under_way: asyncio.Future[HostFacts] | None = None

    async def look(self, config: AgentConfig, node: str, address: str, gpus: int | None) -> HostFacts:
        """``address`` and ``gpus`` (the number offered) come from the running agent; without one they are "" and
        None."""
        if self._under_way is None or self._under_way.done():
            self._under_way = in_daemon(lambda: self._look(config, node, address, gpus), "doctor")
        try:
            async with asyncio.timeout(self._bound):
                return await asyncio.shield(self._under_way)
        except TimeoutError:
            dirs = ", ".join(str(path) for path in (config.dirs.run, config.dirs.state, config.dirs.logs))
            what = f"this machine could not be inspected within {self._bound:g} s: does a disk hang ({dirs})?"
            return HostFacts(node=node, root=os.geteuid() == 0, unknown=(what,))


def look_at(config: AgentConfig, node: str, address: str, gpus: int | None) -> HostFacts:
    """One inspection; blocks if a disk does."""
    watched = config.health is not None or config.node.gpus not in ("none", ())
    running, root, dirs = gpus is not None, os.geteuid() == 0, config.dirs
    auto = config.node.gpus == "auto"
    given_up = _given_up(dirs.state) if auto else frozenset()
    shm = _disk(Path("/dev/shm"))
    certificate = config.api.tls.cert if config.api.listen != OFF else None
    left, unknown = certificate_left(certificate) if certificate is not None else (None, "")
    clash = ephemeral_clash(config.ports.rendezvous, found) if (found := ephemeral_ports()) else None
    return HostFacts(
        node=node,
        root=root,
        other_name=other_name(config.node.id, socket.gethostname(), node) if running else "",
        folders=tuple(
            look_at_folder(f"dirs.{key}", path)
            for key, path in (("run", dirs.run), ("state", dirs.state), ("logs", dirs.logs))
        ),
        shm_free=shm[0] if shm else None,
        shm_total=shm[1] if shm else None,
        # A shell's limit says nothing about a unit's limit.
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if running else None,
        pins_memory=any(path.exists() for path in PINNING),
        gpus_missed=gpus == 0 and auto and _has_driver() and not (given_up and given_up.issuperset(_installed())),
        undriven=tuple(slot for slot in _undriven() if slot not in given_up)
        if auto and not (running and config.health)
        else (),
        given_up=tuple(sorted(given_up)),
        hardware_missing=hardware_missing() if watched else "",
        address=address,
        address_problem=_address_problem(address) if address else "",
        interface=config.node.data_interface or "",
        interface_state=_interface(config.node.data_interface),
        ports=config.ports.rendezvous,
        ports_problem=clash.what if clash else "",
        ports_right=clash.right if clash else "",
        ports_taken=_taken(config.ports.rendezvous),
        certificate="" if certificate is None else str(certificate),
        certificate_left=left,
        certificate_problem=unknown,
        certificate_digest=certificate_digest(certificate) if left is not None and certificate is not None else "",
        clock_rate=clock_rate(),
        runtimes=(runtimes := tuple(name for name in RUNTIMES if shutil.which(name))),
        podman_lacks=podman_lacks(root) if "podman" in runtimes else (),
        python=sys.executable,
        python_closed=(closed(Path(sys.executable).resolve()) or closed(Path(__file__))) if root else "",
        missing=() if running else tuple(name for name in _needed() if importlib.util.find_spec(name) is None),
    )


def podman_lacks(root: bool) -> tuple[Literal["catatonit", "subuid", "cgroups"], ...]:
    """What keeps podman from running a job's container. ``root``: the agent runs jobs of several users."""
    both = any(word for word in _words(HYBRID))
    found: dict[Literal["catatonit", "subuid", "cgroups"], bool] = {
        "catatonit": shutil.which("catatonit", path=os.pathsep.join((*INITS, os.environ.get("PATH", "")))) is None,
        "subuid": root and not _words(SUBUID),
        "cgroups": both and shutil.which("crun") is not None,
    }
    return tuple(name for name, missing in found.items() if missing)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # not there
        return []


def _has_driver() -> bool:
    """There is NVIDIA's driver on this machine, as far as this installation can see."""
    if hardware_missing():
        return False
    from nodeagent.hardware.discovery import SIGNS

    return any(path.exists() for path in SIGNS)


def _undriven() -> tuple[str, ...]:
    """Where there are NVIDIA's GPUs without its driver, as far as this installation can see."""
    return () if _has_driver() else _installed()


def _installed() -> tuple[str, ...]:
    """NVIDIA's GPUs, likewise."""
    if hardware_missing():
        return ()
    from nodeagent.hardware.discovery import installed_slots

    return tuple(installed_slots())


def _given_up(state: Path) -> frozenset[str]:
    """Those that the node does without by a person's word, as far as this user may read that."""
    if hardware_missing():
        return frozenset()
    from nodeagent.hardware.saved import FILE, load_memory

    try:
        return frozenset(load_memory(state / FILE).seen.renounced)
    except (OSError, ValueError):
        return frozenset()


def _needed() -> tuple[str, ...]:
    return (*NEEDED, *(("pynvml",) if _has_driver() else ()))


class _Timex(ctypes.Structure):
    """``struct timex`` of Linux (adjtimex(2)), up to the last field that is read; the rest is padding."""

    _fields_ = (
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long), ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long), ("status", ctypes.c_int), ("constant", ctypes.c_long),
        ("precision", ctypes.c_long), ("tolerance", ctypes.c_long), ("seconds", ctypes.c_long),
        ("micros", ctypes.c_long), ("tick", ctypes.c_long), ("rest", ctypes.c_char * 256),
    )  # fmt: skip


def clock_rate() -> float | None:
    """How much faster the kernel makes its clock run, as a fraction, by tick and frequency (a time service slews with
    both); None if the kernel does not report it. Only reads: ``modes`` is 0."""
    found = _Timex()
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.byref(found))
    except (OSError, AttributeError):
        return None
    if state < 0 or found.tick <= 0:
        return None
    return rate_of(found.tick, found.freq)


def rate_of(tick: int, freq: int) -> float:
    """``tick``: microseconds per hundredth of a second; ``freq``: millionths, times 65536."""
    return tick / 10_000 - 1 + freq / 65_536e6


def certificate_left(file: Path) -> tuple[float | None, str]:
    """(seconds until the certificate expires, "") or (None, why that is not known)."""
    command = ["openssl", "x509", "-enddate", "-noout", "-in", str(file)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=OPENSSL_BOUND, check=False)
    except OSError as error:
        return None, f"openssl: {error.strerror}"
    except subprocess.TimeoutExpired:
        return None, f"openssl did not answer within {OPENSSL_BOUND:g} s"
    key, _, end = done.stdout.strip().partition("=")
    if done.returncode != 0 or key != "notAfter":
        return None, f"openssl cannot read it ({done.stderr.strip().partition(chr(10))[0]})"
    return ssl.cert_time_to_seconds(end) - time.time(), ""


def look_at_folder(key: str, path: Path) -> FolderFacts:
    """A folder that the agent uses, or would make."""
    there, problem, mode = path, "", 0
    try:
        found = path.stat()
        mode = found.st_mode
        if not stat.S_ISDIR(mode):
            problem = "is no folder"
        elif found.st_uid not in (0, os.geteuid()):
            problem = f"belongs to another user (uid {found.st_uid})"
        elif not os.access(path, os.W_OK | os.X_OK):
            problem = "may not be written to"
    except FileNotFoundError:
        there = next(p for p in path.parents if p.exists())
        if not os.access(there, os.W_OK | os.X_OK):
            problem = f"does not exist and cannot be made, since {there} may not be written to"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    disk = None if problem else _disk(there)
    return FolderFacts(
        key=key,
        path=str(path),
        problem=problem,
        others_write=bool(mode & stat.S_IWOTH and not mode & stat.S_ISVTX),
        closed="" if problem else closed(there / "."),
        free=disk[0] if disk else None,
        total=disk[1] if disk else None,
        free_files=disk[2] if disk else None,
    )


def closed(path: Path) -> str:
    """The first folder on the path that other users cannot enter; empty if there is none."""
    for folder in reversed((path / "x").parents):
        with suppress(OSError):
            mode = folder.stat().st_mode
            if stat.S_ISDIR(mode) and not mode & stat.S_IXOTH:
                return str(folder)
    return ""


def _disk(path: Path) -> tuple[int, int, int | None] | None:
    """(bytes free for us, bytes, free inodes)."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    files = found.f_favail if found.f_files else None
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, files


def _address_problem(address: str) -> str:
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(target)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _interface(name: str | None) -> str | None:
    if name is None:
        return None
    folder = Path("/sys/class/net", name)
    try:
        return (folder / "operstate").read_text().strip()
    except OSError:
        return "missing" if not folder.exists() else None


def _taken(ports: tuple[int, int]) -> int | None:
    """How many of the ports are in use by a listening program."""
    try:
        return len({port for port in listening() if ports[0] <= port <= ports[1]})
    except OSError:
        return None


SYSTEMD = Path("/run/systemd/system")
"""This folder exists if systemd is the init system."""
UNITS = tuple(Path(folder, "nodeagent.service") for folder in ("/etc/systemd/system", "/usr/lib/systemd/system"))


async def without_agent(why: str, file: Path | None, environ: Mapping[str, str], peers: bool) -> list[Placed]:
    """All problems of this machine. ``why``: how the caller knows that no agent answers; ``file``: the config, if there
    is one; ``peers``: the user asked for the peers too."""
    config, problems = read_config(file, environ)
    found: list[Placed] = [("agent", Finding(severity="error", what=why, fix=how_to_start(file, SYSTEMD, UNITS)))]
    if peers:
        found.append(("agent", Finding(severity="warning", what="unknown: without an agent no peer is known", fix="")))
    for problem in problems:
        place = f"{problem.file}:{problem.line}:{problem.col}" if problem.line else problem.file
        fix = problem.right or f"correct it, then: nodeagent check-config {problem.file}"
        found.append((place, Finding(severity="error", what=problem.what, fix=fix)))
    if config is None:
        return found
    here = socket.gethostname()
    found += [("this machine", f) for f in judge_host(await Looker(look_at, LOOK_BOUND).look(config, here, "", None))]
    if file is not None:
        found += [("cluster_key", f) for f in _key_findings(config)]
        found += [("store", f) for f in await store_findings(config)]
    return found


def _key_findings(config: AgentConfig) -> list[Finding]:
    """Findings about the cluster's key: without it an agent does not start."""
    try:
        ClusterKey.load(config.cluster_key)
    except KeyFileError as error:
        what, _, fix = str(error).partition(": ")
        return [Finding(severity="error", what=what, fix=fix)]
    return []


def config_file(environ: Mapping[str, str]) -> Path | None:
    """The config that an agent started here would read, if there is one."""
    path = default_config_path(os.geteuid(), environ)
    return path if path is not None and path.exists() else None


def read_config(file: Path | None, environ: Mapping[str, str]) -> tuple[AgentConfig | None, tuple[Problem, ...]]:
    """The config that ``nodeagent run`` would use, or every mistake in it."""
    try:
        return load_config(file, environ), ()
    except SpecError as error:
        return None, error.problems


def how_to_start(file: Path | None, systemd: Path, units: tuple[Path, ...]) -> str:
    """The command that starts an agent on this machine."""
    if systemd.exists() and any(unit.exists() for unit in units):
        return "systemctl start nodeagent; if it does not stay up: journalctl -u nodeagent -n 50"
    run = f"nodeagent run --config {file}" if file is not None else "nodeagent run"
    return f"{run}; or, for development: nodeagentctl local up --nodes 2"
