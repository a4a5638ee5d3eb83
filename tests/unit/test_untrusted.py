"""House rule: what another user may write is read by root's processes through ``osutil.untrusted`` alone.

Every module that runs as root and touches files or sockets by itself is listed with the reason why nobody else can
write there. A new use, or one that is gone, fails here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nodeagent"
AS_THE_USER = ("shim/", "train/", "ctl/", "local/")
"""Run as the job's user, or as who types: shims, standbys, helpers of scripts, the tool, a development cluster."""
TOUCHES = frozenset({
    "open", "read_text", "read_bytes", "write_text", "write_bytes", "open_unix_connection", "iterdir", "glob", "rglob",
    "scandir", "listdir", "walk", "rmtree", "chown", "fchown", "lchown", "chmod", "fchmod", "mkdir", "makedirs",
    "rename", "unlink", "rmdir", "symlink_to", "copy", "copyfile", "copytree", "move", "truncate", "mkfifo",
    "UnixDomainSocketConnection",
})  # fmt: skip
"""Names of functions that open, list, make, change or remove what a path names. (``connect`` and ``replace`` have too
many other meanings; sockets are seen by ``AF_UNIX``, renames by ``os`` in front.)"""

OWN = "in folders that nobody but the agent's user writes to"
ADMIN = "files that the administrator names; whose they are is checked where they hold a secret"
KERNEL = "/proc, /sys and /dev"
STORE = "a connection to the store"
ALLOWED: dict[str, tuple[str, str]] = {
    "agent/repaircommands.py": ("glob mkdir open unlink", OWN),
    "agent/identity.py": ("mkdir open read_text", OWN + "; it sees whose they are before it makes them"),
    "agent/savedview.py": ("mkdir open", OWN),
    "agent/leaseprocess.py": ("AF_UNIX mkdir open unlink", OWN),
    "agent/repair.py": ("read_text", OWN),
    "agent/metrics.py": ("open", OWN),
    "agent/systemd.py": ("AF_UNIX read_text", KERNEL + "; systemd's own socket"),
    "api/auth.py": ("AF_UNIX", "asks which kind of socket a caller came by"),
    "api/loopback.py": ("read_text", KERNEL),
    "api/server.py": ("AF_UNIX chmod mkdir rename unlink", OWN),
    "api/remote.py": ("open", ADMIN),
    "diag/command.py": ("read_text", KERNEL),
    "diag/history.py": ("mkdir read_text", OWN),
    "diag/order.py": ("mkdir open", OWN),
    "diag/worker.py": ("read_text", KERNEL),
    "doctor/machine.py": ("open read_text", KERNEL),
    "hardware/accelerator.py": ("open", KERNEL),
    "hardware/discovery.py": ("mkdir read_text", OWN),
    "hardware/monitor.py": ("read_text", OWN),
    "hardware/probes/host.py": ("listdir open", KERNEL),
    "hardware/probes/reader.py": ("open", KERNEL),
    "lease/grants.py": (
        "chmod chown iterdir mkdir open unlink",
        OWN + "; of an answer, which is its user's, a few bytes are read",
    ),
    "lease/main.py": ("AF_UNIX mkdir open", OWN),
    "lease/order.py": ("read_text", OWN),
    "lease/peers.py": ("copy", "of the beginning of a signature"),
    "lease/resp.py": ("AF_UNIX", STORE),
    "lease/signs.py": ("open read_text unlink", OWN),
    "lease/table.py": ("open", OWN),
    "osutil/untrusted.py": ("AF_UNIX fchown open rename rmdir scandir unlink", "this is the way"),
    "spec/configfile.py": ("read_bytes read_text", ADMIN),
    "spec/schema.py": ("mkdir write_text", "a developer's command"),
    "store/door.py": ("open", ADMIN),
    "store/inspect.py": ("open", STORE),
    "store/link.py": ("open", STORE),
    "store/scripts.py": ("iterdir read_bytes read_text", "nodeagent's own files"),
    "store/server.py": ("AF_UNIX chmod mkdir open read_bytes rmtree unlink", OWN),
    "store/wire.py": ("UnixDomainSocketConnection", STORE),
    "trust/certificate.py": ("mkdir open unlink", OWN),
    "trust/key.py": ("fchmod mkdir open unlink", ADMIN),
    "trust/ledger.py": ("mkdir read_text", OWN),
    "pods/cgroup.py": ("mkdir read_text rmdir write_text", KERNEL),
    "pods/host.py": ("iterdir", "the folder above the pods' own, which is the agent's"),
    "osutil/linux.py": ("iterdir open read_text scandir unlink write_text", KERNEL + "; write_atomic is used " + OWN),
    "pods/logs.py": ("open", "untrusted.UntrustedFolder's"),
    "pods/folder.py": (
        "chmod chown fchown glob mkdir read_text rename unlink",
        "the agent's own records, and pods' folders above which all is the agent's, before or by name only",
    ),
}


def touches(source: str) -> set[str]:
    """Names of calls in a module that touch files or unix sockets."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)) if name in TOUCHES:
                found.add(name)
            case ast.Call(func=ast.Attribute(attr="replace", value=ast.Name(id="os"))):
                found.add("replace")
            case ast.Attribute(attr="AF_UNIX"):
                found.add("AF_UNIX")
            case _:
                continue
    return found


def modules() -> Iterator[tuple[str, Path]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE))
        if not name.startswith(AS_THE_USER):
            yield name, file


def wrong(name: str, source: str) -> str:
    """What is said of a module; empty if nothing is."""
    allowed = set(ALLOWED[name][0].split()) if name in ALLOWED else set()
    found = touches(source)
    new, gone = sorted(found - allowed), sorted(allowed - found)
    if new:
        return f"{name} uses {new}: go through osutil.untrusted, or say here why no other user can write there"
    return f"{name} does not use {gone} any more" if gone else ""


MODULES = dict(modules())


@pytest.mark.parametrize("name", MODULES)
def test_others_files_are_read_through_one_module(name: str) -> None:
    assert not wrong(name, MODULES[name].read_text())


def test_no_module_is_listed_that_is_gone() -> None:
    assert ALLOWED.keys() <= MODULES.keys()


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("pods/host.py", 'for x in p.iterdir():\n    json.loads((folder / "pod.json").read_text())'),
        ("pods/host.py", "p.iterdir()\nshutil.rmtree(folder)"),
        ("pods/host.py", "p.iterdir()\nos.chown(folder, 1, 1)"),
        ("pods/pod.py", "socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).connect(path)"),
        ("pods/pod.py", "os.replace(a, b)"),
        ("agent/loop.py", "open(path)"),
        ("agent/loop.py", "import os\nos.open(path, os.O_RDONLY)"),
        ("api/logs.py", "path.open()"),
        ("agent/repaircommands.py", "pass"),
    ],
)
def test_this_check_can_fail(name: str, source: str) -> None:
    assert wrong(name, source)
