"""The disk of a node: a small system of this machine's own distribution, built once, and layers on top of it.

Owns a folder of the user's cache: ``base-KEY`` (debootstrap), ``deps-KEY`` (a virtual environment in /opt/nodeagent
with everything that nodeagent needs), ``wheels-KEY`` (what that was installed from) and ``debs-KEY`` (packages that a
test has apt install in a node, which has no way out). A key is a hash of the recipe:
a changed recipe makes a new one. Must never write outside that folder, nor name a host: packages come from where apt
gets this machine's own.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "systemd", "systemd-sysv", "dbus", "libpam-systemd", "python3", "python3-venv", "python3-apt", "openssh-server",
    "sudo", "iproute2", "iputils-ping", "procps", "nftables", "ca-certificates", "redis-server", "redis-sentinel",
    "logrotate",
)  # fmt: skip
MASKED = (
    "getty@tty1.service", "console-getty.service", "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer",
    "fstrim.timer", "e2scrub_all.timer", "e2scrub_reap.service", "systemd-timesyncd.service",
    "systemd-networkd.service", "systemd-resolved.service", "ssh.socket", "systemd-ask-password-console.path",
    "systemd-ask-password-wall.path",
)  # fmt: skip
"""Nothing that needs hardware, seats or a way out."""
PRIVATE = ("unshare", "--mount", "--propagation", "private")
"""A mount namespace of its own, which takes its mounts with it."""
BUILD_LIMIT = 900.0
"""Seconds for one step of the building: a slow mirror."""
VENV = Path("/opt/nodeagent")
"""Where the product is installed in a node."""


def why_not() -> str:
    """Why no image can be made here; empty if it can, or if there is one."""
    if os.geteuid() != 0:
        return "only root can build and boot nodes"
    if shutil.which("debootstrap") is None:
        return "no debootstrap here: install debootstrap"
    if _mirror() is None:
        return "apt has no source of this distribution's release"
    return ""


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "nodeagent-nodes"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def base() -> Path:
    """The root of a bare node: systemd, sshd, Python and Redis (not started), no way in but a key."""
    mirror = _mirror()
    assert mirror is not None, why_not()
    uri, components, keyring = mirror
    codename = platform.freedesktop_os_release()["VERSION_CODENAME"]
    recipe = (codename, *PACKAGES, *MASKED, inspect.getsource(_settle))
    with _made("base", recipe) as folder:
        if folder is not None:
            arguments = ["--variant=minbase", f"--include={','.join(PACKAGES)}", f"--components={components}"]
            arguments += [f"--keyring={keyring}"] if keyring.startswith("/") else []
            # what it mounts there must not stay if it is killed: whoever removes the draft would remove /proc
            run([*PRIVATE, "debootstrap", *arguments, codename, str(folder), uri])
            _settle(folder)
    return _place("base", recipe)


def _settle(root: Path) -> None:
    """What every node has alike: quiet units, a journal in memory, a user who trains."""
    units = root / "etc/systemd/system"
    for unit in MASKED:
        (units / unit).unlink(missing_ok=True)
        (units / unit).symlink_to("/dev/null")
    for server in ("redis-server", "redis-sentinel"):  # installed, not started
        (units / f"multi-user.target.wants/{server}.service").unlink(missing_ok=True)
    (units / "redis.service").unlink(missing_ok=True)
    (units / "sentinel.service").unlink(missing_ok=True)
    journal = root / "etc/systemd/journald.conf.d/lab.conf"
    journal.parent.mkdir(parents=True)
    journal.write_text("[Journal]\nStorage=volatile\nRuntimeMaxUse=32M\nRateLimitIntervalSec=0\n")
    (root / "etc/machine-id").write_text("")
    (root / "var/lib/dbus/machine-id").unlink(missing_ok=True)  # of all nodes the same, and taken as theirs
    (root / "root").chmod(0o711)  # this machine's Python may lie below it
    (root / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
    run(["chroot", str(root), "useradd", "--create-home", "--uid", "2000", "--shell", "/bin/bash", "train"])


def python_version(root: Path) -> str:
    """Of the node's own Python: 3.11, say."""
    return (root / "usr/bin/python3").readlink().name.removeprefix("python")


def dependencies(root: Path) -> tuple[Path, Path]:
    """A layer on the base with all that nodeagent needs in VENV, and the folder of wheels that it came from."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    recipe = (python_version(root), root.name, *wanted, inspect.getsource(dependencies))
    with _made("wheels", recipe) as folder:
        if folder is not None:
            pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
            version = ["--only-binary=:all:", "--python-version", python_version(root)]
            run([*pip, *version, "--dest", str(folder), *wanted])
    wheels = _place("wheels", recipe)
    with _made("deps", recipe) as folder:
        if folder is not None:
            for name in ("upper", "work", "merged"):
                (folder / name).mkdir()
            script = (
                'mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/merged" && '
                'mkdir -p "$2/merged/mnt/w" && mount --bind "$3" "$2/merged/mnt/w" && '
                'chroot "$2/merged" python3 -m venv /opt/nodeagent && '
                'chroot "$2/merged" /opt/nodeagent/bin/pip install --no-index --no-deps --no-cache-dir --quiet $4'
            )
            files = " ".join(f"/mnt/w/{wheel.name}" for wheel in sorted(wheels.glob("*.whl")))
            run([*PRIVATE, "sh", "-ec", script, "sh", str(root), str(folder), str(wheels), files])
    return _place("deps", recipe) / "upper", wheels


def packages(root: Path, *names: str) -> Path:
    """A repository for a node's apt, as an operator's mirror: these packages, and what they need that ``root`` lacks.
    ``deb [trusted=yes] file:FOLDER ./`` reads it."""
    recipe = (root.name, *names, inspect.getsource(packages))
    with _made("debs", recipe) as folder:
        if folder is not None:
            (folder / "partial").mkdir()
            settings = {
                "Dir::State::status": root / "var/lib/dpkg/status", "Dir::Cache::archives": folder,
                "Dir::Cache::pkgcache": "", "Dir::Cache::srcpkgcache": "", "Debug::NoLocking": "1",
            }  # fmt: skip
            options = [f"--option={key}={value}" for key, value in settings.items()]
            run(["apt-get", "--yes", "--no-install-recommends", "--download-only", *options, "install", *names])
            index = []
            for deb in sorted(folder.glob("*.deb")):
                digest = hashlib.sha256(deb.read_bytes()).hexdigest()
                place = f"Filename: ./{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {digest}\n"
                index.append(run(["dpkg-deb", "--field", str(deb)]).rstrip() + f"\n{place}")
            (folder / "Packages").write_text("\n".join(index))
    return _place("debs", recipe)


def build_wheel(to: Path, source: Path = ROOT) -> Path:
    """nodeagent itself."""
    run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(to), str(source)])
    return max(to.glob("nodeagent-*.whl"), key=lambda wheel: wheel.stat().st_mtime)


def run(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=BUILD_LIMIT, stdin=subprocess.DEVNULL,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"} | _of_pip(),
    )  # fmt: skip
    if done.returncode:
        raise OSError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def _of_pip() -> dict[str, str]:
    """How this machine's pip finds its packages."""
    return {k: v for k, v in os.environ.items() if k.startswith("PIP_") or k == "HOME" or k.lower().endswith("_proxy")}


def _mirror() -> tuple[str, str, str] | None:
    """Where apt gets this release from: address, components, keyring."""
    codename = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    if shutil.which("apt-get") is None:
        return None
    wanted = ["--format", "$(REPO_URI) $(RELEASE) $(COMPONENT) $(SIGNED_BY)", "Created-By: Packages"]
    lines = [line.split() for line in run(["apt-get", "indextargets", *wanted]).splitlines()]
    mine = [line for line in lines if line[1] == codename]
    if not mine:
        return None
    first = mine[0]
    components = dict.fromkeys(line[2] for line in mine if line[0] == first[0])
    return first[0], ",".join(components), first[3] if len(first) > 3 else ""


def _place(kind: str, recipe: Sequence[str]) -> Path:
    return cache() / f"{kind}-{hashlib.sha256(chr(0).join(recipe).encode()).hexdigest()[:12]}"


@contextmanager
def _made(kind: str, recipe: Sequence[str]) -> Iterator[Path | None]:
    """A fresh folder to be filled, which gets its name when that went well; None if it is there. One at a time."""
    place = _place(kind, recipe)
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            yield None
            return
        draft = place.with_suffix(".new")
        if draft.exists():
            run(["rm", "-rf", "--one-file-system", str(draft)])
        draft.mkdir()
        yield draft
        draft.rename(place)
