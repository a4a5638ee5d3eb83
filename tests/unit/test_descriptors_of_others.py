"""House rule: nobody can pass a descriptor to a socket that root reads and another user writes to.

The kernel closes what is not taken in the thread that reads, for as long as the sender likes (a TCP socket that
lingers): one message of any account stopped root's agent. Every module with unix sockets refuses descriptors on them
(``refuse_descriptors``), or is listed with the reason why no other user writes there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nodeagent"
MAKES = frozenset({"AF_UNIX", "socketpair", "start_unix_server", "open_unix_connection"})
REFUSES = "refuse_descriptors"

ALLOWED = {
    "agent/leaseprocess.py": "it only sends, to the lease process",
    "agent/systemd.py": "it only sends, to systemd",
    "api/auth.py": "it asks the kernel who is at the other end",
    "ctl/client.py": "a person's tool, which nobody else waits for",
    "lease/main.py": "made with mode 0600: the agent's own user alone writes there",
    "lease/resp.py": "Redis writes there, at the path in root's config",
    "local/control.py": "the supervisor of a local cluster, and its agents: one user's",
    "local/supervisor.py": "in a folder of its own user's alone, mode 0600",
    "osutil/units.py": "a line of a unit",
    "shim/fence.py": "the shim is its job's user's, as its child is",
    "shim/forkserver/client.py": "the same",
    "shim/forkserver/pool.py": "the same",
    "shim/peers.py": "the shim is its job's user's; made with mode 0600",
    "shim/snapshots.py": "the shim is its job's user's",
    "local/privateredis.py": "the private Redis, which is this process's child",
    "train/link.py": "a worker, which is its job's user's",
}


def names(source: str) -> set[str]:
    """Those that matter here which a module uses, also in a text."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                found.add(name)
            case ast.Constant(value=str(text)):
                found |= {name for name in MAKES if f"={name}" in text}
            case _:
                continue
    return found


def wrong(name: str, source: str) -> str:
    """What is said of a module; empty if nothing is."""
    used = names(source)
    makes = used & MAKES
    if makes and REFUSES not in used and name not in ALLOWED:
        return f"{name} has unix sockets ({', '.join(sorted(makes))}): refuse descriptors there, or list why not"
    if name in ALLOWED and (not makes or REFUSES in used):
        return f"{name} is listed and need not be"
    return ""


def modules() -> Iterator[tuple[str, Path]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        yield str(file.relative_to(PACKAGE)), file


MODULES = dict(modules())


def test_nobody_passes_descriptors_to_root() -> None:
    assert {name: found for name, file in MODULES.items() if (found := wrong(name, file.read_text()))} == {}


def test_no_module_is_listed_that_is_gone() -> None:
    assert ALLOWED.keys() <= MODULES.keys()


@pytest.mark.parametrize("line", [
    "link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)",
    "ours, theirs = socket.socketpair()",
    "await asyncio.start_unix_server(serve, path)",
])  # fmt: skip
def test_a_socket_is_seen(line: str) -> None:
    assert "refuse descriptors there" in wrong("new.py", line)
    assert not wrong("new.py", f"{line}\nrefuse_descriptors(ours)")
