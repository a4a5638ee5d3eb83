"""The firewall that docs/security.md gives for the workers' own ports, loaded as it stands there: who gets through.

In network namespaces of their own: one is a node, the other a machine beside it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"
PROGRAM = r"""
import ctypes, json, os, socket, subprocess, sys

def run(*argv, **more):
    subprocess.run(argv, check=True, **more)

def reached(address, port, uid=0, source=None):
    pid = os.fork()
    if not pid:
        os.setuid(uid)
        one = socket.socket()
        one.settimeout(1)
        if source:
            one.settimeout(4)  # a packet that comes before the link is up is sent again after 1 s
            one.bind((source, 0))
        os._exit(one.connect_ex((address, port)) != 0)
    return os.waitpid(pid, 0)[1] == 0

ends = [os.pipe() for _ in range(2)]
other = os.fork()
if not other:  # a machine beside it
    ctypes.CDLL(None).unshare(0x40000000)  # CLONE_NEWNET
    os.write(ends[0][1], b"x")
    os.read(ends[1][0], 1)
    run("ip", "addr", "add", "10.0.0.2/16", "dev", "v1")
    run("ip", "addr", "add", "10.0.7.7/16", "dev", "v1")
    run("ip", "link", "set", "v1", "up")
    found = {"member": reached("10.0.0.1", 29400, source="10.0.0.2")}
    found |= {f"stranger {port}": reached("10.0.0.1", port, source="10.0.7.7") for port in (29400, 33000, 50000)}
    os.write(ends[0][1], json.dumps(found).encode())
    os._exit(0)
os.read(ends[0][0], 1)
run("ip", "link", "set", "lo", "up")
run("ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1", "netns", str(other))
run("ip", "addr", "add", "10.0.0.1/16", "dev", "v0")
run("ip", "link", "set", "v0", "up")
run("nft", "-f", "-", input=sys.stdin.read(), text=True)
places = [(address, port) for address in ("10.0.0.1", "127.0.0.1") for port in (29400, 33000, 50000)]
listeners = [socket.create_server(place) for place in places]
here = {uid: [f"{a}:{p}" for a, p in places if reached(a, p, uid)] for uid in (1000, 65534)}
os.write(ends[1][1], b"x")
print(json.dumps([here, json.loads(os.read(ends[0][0], 4096))]))
os.waitpid(other, 0)
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("nft") is None, reason="root loads it, and nft")
def test_only_trainers_and_nodes_reach_the_workers_ports() -> None:
    (rules,) = re.findall(r"^    table inet nodeagent \{\n(?:    .*\n|\n)*?    \}$", DOCUMENT.read_text(), re.MULTILINE)
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", PROGRAM], input=rules, text=True, capture_output=True, timeout=60
    )  # fmt: skip
    if "unshare" in done.stderr:
        pytest.skip("no network namespaces here")
    assert done.returncode == 0, done.stderr
    here, elsewhere = json.loads(done.stdout)
    assert len(here["1000"]) == 6, "a trainer"
    assert here["65534"] == ["10.0.0.1:50000", "127.0.0.1:33000", "127.0.0.1:50000"], "its own services go on"
    assert elsewhere == {"member": True, "stranger 29400": False, "stranger 33000": False, "stranger 50000": True}
