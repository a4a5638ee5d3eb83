"""One machine: a real systemd, booted by systemd-nspawn on an overlay of the image, in a network namespace of its own.

Owns its boot and its ends (orderly, power cut, freeze), and a way to run commands inside. All of it ends with the
process that booted it, however that one ends (``Keeper``); its mounts are nobody else's and go with it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.bounds import Bound

BOOT_LIMIT = 180.0
END_LIMIT = 150.0
"""Seconds for an orderly power-off: the agent's drain is part of it."""
EXEC_LIMIT = 120.0
CGROUP2 = next(p for p in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")) if (p / "cgroup.procs").exists())
NAMED = Path("/sys/fs/cgroup/systemd")
"""Of a host with the old hierarchy: nspawn wants its place there as well."""
OURS = f"nodeagent-nodes-{os.getpid()}"
"""The control group above those of this process's nodes, and how systemd-nspawn knows them: it has a folder for each
name, which a run beside this one would take away from under it."""
NAMES = Path("/run/systemd/nspawn/propagate")
"""Those folders. They outlive a power cut."""
BOOT = """
for place in $1; do mkdir -p "$place"; echo $$ > "$place/cgroup.procs"; done
mount -t overlay overlay -o "lowerdir=$2,upperdir=$3/upper,workdir=$3/work" "$3/merged"
shift 3
exec systemd-nspawn "$@"
"""
END = """
read -r _
names=$1
shift
echo 1 >"$1/cgroup.kill"
rm -rf "$names"-*
for _ in $(seq 100); do
    find "$@" -depth -type d -exec rmdir {} + 2>/dev/null && break
    sleep 0.1
done
"""
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}


class Keeper:
    """Ends all nodes of this process when it ends itself, even by SIGKILL."""

    def __init__(self) -> None:
        groups = [CGROUP2 / OURS, *([NAMED / OURS] if NAMED.is_dir() else [])]
        for group in groups:
            group.mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            ["sh", "-c", END, "sh", str(NAMES / OURS), *map(str, groups)], stdin=subprocess.PIPE, start_new_session=True
        )

    def close(self) -> None:
        """End what is left, now."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(END_LIMIT)
        for group in (CGROUP2 / OURS, NAMED / OURS):
            remove_group(group)


def remove_group(group: Path) -> None:
    """Once its last processes are gone, and those of the groups below."""
    end = time.monotonic() + END_LIMIT
    while group.exists():
        try:
            for below, _, _ in os.walk(group, topdown=False):
                Path(below).rmdir()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


class Node:
    """See above. ``space`` is the network namespace's file; ``layers`` are folders, the topmost first."""

    def __init__(self, name: str, address: str, space: Path, layers: Sequence[Path], folder: Path) -> None:
        self.name, self.address = name, address
        self._space, self._layers, self._folder = space, list(layers), folder
        self.binds: dict[Path, Path] = {}
        """Of this machine's folders to the node's: read-only, or shared where ``shared`` names them."""
        self.shared: dict[Path, Path] = {}
        group = f"{OURS}/{name}"
        self._groups = [CGROUP2 / group, *([NAMED / group] if NAMED.is_dir() else [])]
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._leader = 0
        self.is_frozen = False
        self.image_anew()

    @property
    def disk(self) -> Path:
        """What the node has written; before its first boot, what it will find."""
        return self._folder / "upper"

    @property
    def is_up(self) -> bool:
        return self._nspawn is not None and self._nspawn.poll() is None

    # --- life

    def image_anew(self) -> None:
        """A new disk; the node must be down."""
        assert not self.is_up
        shutil.rmtree(self._folder, ignore_errors=True)
        for name in ("upper", "work", "merged"):
            (self._folder / name).mkdir(parents=True)
        self._uuid = uuid.uuid4().hex
        self.write("/etc/hostname", f"{self.name}\n")

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """A file of the node. While it runs, through it."""
        if self.is_up:
            self.run(
                "sh", "-c", 'mkdir -p "${1%/*}" && cat >"$1" && chmod "$2" "$1"', "sh", path, f"{mode:o}", given=text
            )
            return
        file = self.disk / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)

    def boot(self) -> None:
        """Switch on; ``wait_up`` waits."""
        assert not self.is_up
        flags = [
            "--quiet", "--boot", f"--directory={self._folder / 'merged'}", f"--machine={OURS}-{self.name}",
            f"--hostname={self.name}", "--register=no", "--keep-unit", "--console=pipe",
            f"--network-namespace-path={self._space}", "--resolv-conf=off", "--timezone=off",
            "--private-users=no", "--kill-signal=SIGRTMIN+3", "--link-journal=no", f"--uuid={self._uuid}",
            *(f"--bind-ro={here}:{there}" for here, there in self.binds.items()),
            *(f"--bind={here}:{there}" for here, there in self.shared.items()),
        ]  # fmt: skip
        lower = ":".join(map(str, self._layers))
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", BOOT, "sh"]
        command += [" ".join(map(str, self._groups)), lower, str(self._folder), *flags]
        with (self._folder / "console").open("ab") as console:
            self._nspawn = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=console, stderr=console,
                env=ENVIRONMENT | {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1", "SYSTEMD_NSPAWN_LOCK": "0"},
                start_new_session=True,
            )  # fmt: skip
        self._leader = 0

    def wait_up(self) -> None:
        """Until systemd says that all has been started. Raises AssertionError with the console's last lines."""
        wait_for(lambda: self._find_leader() and self._is_running(), BOOT_LIMIT, f"{self.name} is up", self.console)

    def _find_leader(self) -> bool:
        if self._leader == 0:
            assert self._nspawn is not None and self._nspawn.poll() is None, self.console()
            for child in Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children").read_text().split():
                status = Path(f"/proc/{child}/status").read_text()
                if next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[2:] == ["1"]:
                    self._leader = int(child)
        return self._leader != 0

    def _is_running(self) -> bool:
        output = self.run("systemctl", "is-system-running", check=False).stdout.strip()
        return output in ("running", "degraded")

    def cut_power(self) -> None:
        """Everything ends at once, nothing is told."""
        (self._groups[0] / "cgroup.kill").write_text("1")
        self._down()

    def power_off(self) -> None:
        """As the button does: systemd stops all in order."""
        os.kill(self._leader, signal.SIGRTMIN + 4)
        self._down()

    def _down(self) -> None:
        assert self._nspawn is not None
        self._nspawn.wait(END_LIMIT)
        self.is_frozen = False
        for group in self._groups:
            remove_group(group)

    def freeze(self) -> None:
        """The machine stops in the middle of everything, systemd too."""
        (self._groups[0] / "cgroup.freeze").write_text("1")
        events = self._groups[0] / "cgroup.events"
        wait_for(lambda: "frozen 1" in events.read_text(), 10.0, f"{self.name} is frozen")
        self.is_frozen = True

    def thaw(self) -> None:
        (self._groups[0] / "cgroup.freeze").write_text("0")
        self.is_frozen = False

    def remove(self) -> None:
        """End it, and forget its disk."""
        if self.is_up:
            self.cut_power()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- inside

    def here(self, path: str) -> Path:
        """A path of the running node as this machine can open it."""
        return Path(f"/proc/{self._leader}/root{path}")

    def outside(self, pid: int) -> int:
        """This machine's number of a process of the node."""
        for file in self._groups[0].rglob("cgroup.procs"):
            for seen in file.read_text().split():
                status = Path(f"/proc/{seen}/status").read_text().splitlines()
                if next(line for line in status if line.startswith("NSpid:")).split()[2:] == [str(pid)]:
                    return int(seen)
        raise AssertionError(f"{self.name} has no process {pid}")

    def run(
        self, *command: str, check: bool = True, given: str = "", limit: float = EXEC_LIMIT,
        user: str = "", environ: Mapping[str, str] = {},
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a command in the node, as root or another user of it."""
        done = subprocess.run(
            self.inside(*command, user=user), input=given, capture_output=True, text=True, timeout=limit,
            env={**ENVIRONMENT, **environ},
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(
                f"{self.name}: {' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
        return done

    def start(self, *command: str, user: str = "", to: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        """Run a command in the node and do not wait for it."""
        return subprocess.Popen(
            self.inside(*command, user=user), stdin=subprocess.DEVNULL, stdout=to, stderr=subprocess.STDOUT, text=True,
            env=ENVIRONMENT,
        )  # fmt: skip

    def inside(self, *command: str, user: str = "") -> list[str]:
        """The command line, for this machine, that runs ``command`` in the node."""
        as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--"] if user else []
        return ["nsenter", "-t", str(self._leader), "-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w", "--",
                *as_user, *command]  # fmt: skip

    def console(self) -> str:
        return (self._folder / "console").read_text(errors="replace")[-4000:]

    def journal(self, unit: str = "nodeagent", lines: int = 200) -> str:
        return self.run("journalctl", "--no-pager", "-q", "-o", "short-monotonic", "-u", unit, "-n", str(lines)).stdout


def wait_for(holds: Callable[[], object], limit: float, what: str, state: Callable[[], str] = str) -> float:
    """Poll until it holds; the seconds it took. AssertionError with the state once ``limit`` seconds have passed that
    count (``tests/bounds.py``)."""
    bound = Bound(limit)
    while not holds():
        if bound.over:
            raise AssertionError(f"not within {limit:g} s ({bound.passed:.1f} s): {what}\n{state()}")
        time.sleep(0.05)
    return bound.passed
