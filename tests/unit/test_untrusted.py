"""House rule: what another user may write is read by root's processes through ``osutil.untrusted`` alone.

Every module that runs as root and touches files or sockets by itself is listed with the reason why nobody else can
write there. A new use, or one that is gone, fails here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nodeagent"
AS_THE_USER = ("shim/", "train/", "ctl/", "local/")
"""Run as the job's user, or as who types: shims, fork servers, helpers of scripts, the tool, a development cluster."""
TOUCHES = frozenset({
    "open", "read_text", "read_bytes", "write_text", "write_bytes", "open_unix_connection", "iterdir", "glob", "rglob",
    "scandir", "listdir", "walk", "rmtree", "chown", "fchown", "lchown", "chmod", "fchmod", "mkdir", "makedirs",
    "rename", "unlink", "rmdir", "symlink_to", "copy", "copyfile", "copytree", "move", "truncate", "mkfifo",
    "UnixDomainSocketConnection", "open_plain",
})  # fmt: skip
"""Names of functions that open, list, make, change or remove what a path names. (``replace`` has too many other
meanings: renames are seen by ``os`` in front.)"""
MEETS = frozenset({
    "raw_decode", "connect", "connect_ex", "open_connection", "create_connection", "open_unix_connection",
    "create_unix_connection",
})  # fmt: skip
"""Names of functions that decode JSON or call somebody, besides ``loads`` and ``load`` of ``json``: what comes may be
endless, or nested without end. Whose bytes they are no parser can see: that is what ``MET`` says."""

OWN = "in folders that nobody but the agent's user writes to"
ADMIN = "files that the administrator names; whose they are is checked where they hold a secret"
KERNEL = "/proc, /sys and /dev"
STORE = "a connection to the store"
ALLOWED: dict[str, tuple[str, str]] = {
    "agent/repaircommands.py": ("glob mkdir open unlink", OWN),
    "agent/identity.py": ("mkdir open open_plain read_text", OWN + "; it sees whose they are before it makes them"),
    "agent/savedview.py": ("mkdir open open_plain", OWN),
    "agent/leaseprocess.py": ("AF_UNIX mkdir open", OWN),
    "agent/repair.py": ("open_plain", OWN),
    "agent/metrics.py": ("open_plain", OWN),
    "agent/systemd.py": ("AF_UNIX read_text", KERNEL + "; systemd's own socket"),
    "api/auth.py": ("AF_UNIX", "asks which kind of socket a caller came by"),
    "api/forward.py": ("AF_UNIX", "another agent's socket: nothing is read of it unless root or the own user listens"),
    "api/server.py": ("AF_UNIX chmod mkdir rename unlink", OWN),
    "api/loopback.py": ("read_bytes", "nodeagent's own files"),
    "api/remote.py": ("open_plain", ADMIN),
    "diag/command.py": ("read_text", KERNEL),
    "diag/history.py": ("mkdir read_text", OWN),
    "diag/order.py": ("mkdir open", OWN),
    "diag/worker.py": ("read_text", KERNEL),
    "doctor/machine.py": ("read_text", KERNEL + "; /etc/subuid"),
    "hardware/accelerator.py": ("listdir open", KERNEL),
    "hardware/discovery.py": ("iterdir mkdir open_plain read_text", OWN + "; " + KERNEL),
    "hardware/probes/host.py": ("listdir open", KERNEL),
    "hardware/probes/reader.py": ("open", KERNEL),
    "hardware/saved.py": ("open_plain", OWN),
    "lease/grants.py": ("chmod chown iterdir mkdir open unlink", OWN),
    "lease/main.py": ("AF_UNIX mkdir open", OWN + "; of pods by UntrustedFolder"),
    "lease/order.py": ("glob open_plain unlink", OWN),
    "lease/peers.py": ("copy", "of the beginning of a signature"),
    "lease/resp.py": ("AF_UNIX read_text", STORE + "; the agent's own files"),
    "lease/statefiles.py": ("open open_plain unlink", OWN),
    "osutil/subuids.py": ("open", "/etc/subuid, which root alone writes; so much of it is read"),
    "osutil/untrusted.py": ("AF_UNIX fchown open rename rmdir scandir unlink", "this is the way"),
    "spec/configfile.py": ("read_bytes read_text", ADMIN),
    "spec/schema.py": ("mkdir write_text", "a developer's command"),
    "store/endpoint.py": ("open_plain", ADMIN),
    "store/inspect.py": ("open", STORE),
    "store/link.py": ("open", STORE),
    "store/scripts.py": ("iterdir read_bytes read_text", "nodeagent's own files"),
    "store/whois.py": ("open_plain", ADMIN),
    "store/wire.py": ("UnixDomainSocketConnection", STORE),
    "trust/certificate.py": ("mkdir open open_plain unlink", OWN),
    "trust/key.py": ("fchmod mkdir open open_plain unlink", ADMIN),
    "trust/ledger.py": ("mkdir open_plain", OWN),
    "pods/cgroup.py": ("iterdir mkdir read_text rmdir write_text", KERNEL),
    "pods/host.py": ("iterdir", "the folder above the pods' own, which is the agent's"),
    "osutil/lingering.py": ("open", KERNEL),
    "osutil/linux.py": (
        "AF_UNIX iterdir open read_text scandir unlink write_text",
        KERNEL + "; write_atomic is used " + OWN + "; listens is the tool's",
    ),
    "osutil/tcp.py": ("open", KERNEL),
    "pods/logs.py": ("open", "untrusted.UntrustedFolder's"),
    "pods/folder.py": (
        "chmod chown fchown glob mkdir open_plain rename unlink",
        "the agent's own records, and pods' folders above which all is the agent's, before or by name only",
    ),
}


FILE = "a file of its own, in a folder that nobody but the agent's user writes to"
CHILD = "what a process that it started itself writes, within a bound"
CALLERS = "a caller's bytes: their length is bounded, and what cannot be decoded, or is nested too deeply, is refused"
MET: dict[str, tuple[str, str]] = {
    "agent/diagnosis.py": ("loads", CHILD),
    "agent/identity.py": ("loads", FILE),
    "agent/machine.py": ("connect", "a datagram socket that sends nothing: the kernel chooses a route"),
    "agent/metrics.py": ("loads", FILE),
    "agent/repair.py": ("loads", FILE),
    "agent/repaircommands.py": ("raw_decode", CHILD),
    "agent/savedview.py": ("loads", FILE + "; each line is signed"),
    "agent/serve.py": ("connect", "the store"),
    "api/forward.py": (
        "connect create_unix_connection loads",
        "another agent, by https with the cluster's certificate, or at the socket of root or the agent's own user; "
        "bounded, and what is no JSON, or is nested too deeply, is refused",
    ),
    "api/requests.py": ("loads", CALLERS),
    "api/server.py": ("connect", "its own socket's path: whether somebody listens there"),
    "diag/crew.py": ("loads", CHILD),
    "diag/order.py": ("loads", CHILD),
    "diag/history.py": ("loads", FILE),
    "diag/worker.py": ("loads", "its command line, from the agent"),
    "doctor/cluster.py": ("open_connection", "an address of another agent; nothing is read"),
    "hardware/discovery.py": ("loads", FILE + "; " + CHILD),
    "hardware/probes/amd.py": ("loads", CHILD),
    "hardware/probes/host.py": ("loads", "its command line, from the agent"),
    "hardware/probes/process.py": ("loads", CHILD),
    "lease/main.py": ("loads", CALLERS),
    "lease/order.py": ("loads", FILE),
    "lease/peers.py": ("loads", CALLERS + "; datagrams, and only signed ones get here"),
    "lease/resp.py": ("connect connect_ex", "the store, and its socket where the administrator names one"),
    "lease/statefiles.py": ("loads", FILE),
    "osutil/linux.py": ("connect", "the tool: whether somebody listens; nothing is read"),
    "osutil/untrusted.py": ("connect loads", "this is the way"),
    "pods/folder.py": ("loads", "the agent's own records of pods"),
    "pods/shimlink.py": ("connect", "UntrustedFolder's"),
    "store/wire.py": ("connect", "the store"),
    "trust/ledger.py": ("loads", FILE),
}
"""What decodes JSON or calls somebody, and whose bytes come. Records of the store go through ``codec.py``: pydantic
bounds their depth, and ``tests/fuzz`` tries them."""


def meets(source: str) -> set[str]:
    """Names of calls in a module that decode JSON, or call somebody."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)) if name in MEETS:
                found.add(name)
            case ast.Call(func=ast.Attribute(attr="load" | "loads" as name, value=ast.Name(id="json"))):
                found.add(name)
            case ast.ImportFrom(module="json", names=names):
                found.update(f"json.{alias.name}" for alias in names)  # under which other name, who knows
            case _:
                continue
    return found


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
    for found, table in ((touches(source), ALLOWED), (meets(source), MET)):
        allowed = set(table[name][0].split()) if name in table else set()
        new, gone = sorted(found - allowed), sorted(allowed - found)
        if new:
            return f"{name} uses {new}: go through osutil.untrusted, or say here whose bytes come, and what bounds them"
        if gone:
            return f"{name} does not use {gone} any more"
    return ""


MODULES = dict(modules())


def test_others_files_are_read_through_one_module() -> None:
    assert {name: found for name, file in MODULES.items() if (found := wrong(name, file.read_text()))} == {}


OWN_PROGRAM = re.compile(r'(.*)"-m", "nodeagent\.')
SAFE_PATH = re.compile(r'"-[A-Za-z]*P[A-Za-z]*", $')


def test_our_own_programs_find_no_module_in_the_folder_that_they_are_started_in() -> None:
    """``python -m`` looks there first. A command that is given in /tmp could find a stranger's http.py."""
    found = [OWN_PROGRAM.search(line) for file in PACKAGE.rglob("*.py") for line in file.read_text().splitlines()]
    begins = [match[1] for match in found if match is not None]
    assert len(begins) > 7
    assert [begin for begin in begins if not SAFE_PATH.search(begin)] == []


def test_no_module_is_listed_that_is_gone() -> None:
    assert ALLOWED.keys() | MET.keys() <= MODULES.keys()


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
        ("agent/loop.py", "json.loads(received)"),
        ("agent/loop.py", "from json import loads"),
        ("agent/loop.py", "sock.connect(path)"),
        ("agent/loop.py", "await asyncio.open_connection(host, port)"),
        ("trust/ledger.py", "p.mkdir()\nopen_plain(p)"),
    ],
)
def test_this_check_can_fail(name: str, source: str) -> None:
    assert wrong(name, source)
