"""Start processes in the pods of another role, without ssh: what ``horovodrun`` and ``mpirun`` need of their hosts.

    reach.py serve                    the command of the role worker: runs what the launcher asks for
    reach.py hosts                    worker-0:2,worker-1:2, for horovodrun -H (SLOTS of each)
    reach.py to [OPTION ...] HOST COMMAND ...     as ssh, and as Open MPI's rsh agent: HOST is worker-0, worker-1, ...

Who asks must know the secret in REACH_SECRET (default: the file reach.secret in the working directory, made by whoever
comes first, and readable by its owner only). What is asked, and what processes write, goes over the network in clear.
Python 3.11 or newer.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

ROLE = "worker"
WITH_VALUE = ("-o", "-p", "-i", "-l", "-F")
"""Options of ssh that are followed by something; all are ignored."""
OUT, ERR, END = b"1", b"2", b"x"
TALK_BOUND, STOP_BOUND = 30.0, 5.0
"""Seconds for a question to come whole; from SIGTERM to SIGKILL for a process whose launcher is gone."""
MOST = 1 << 20
"""Bytes of a question."""


def secret() -> bytes:
    """The same on all nodes: the folder is a shared one."""
    path = Path(os.environ.get("REACH_SECRET", "reach.secret"))
    if not path.exists():
        mine = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        mine.touch(0o600, exist_ok=False)
        mine.write_text(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):  # somebody was first
            os.link(mine, path)
        mine.unlink()
    return path.read_bytes()


def sealed(nonce: str, question: str) -> str:
    return hmac.new(secret(), f"{nonce} {question}".encode(), "sha256").hexdigest()


def place(host: str) -> dict[str, object]:
    """Of worker-1. Raises SystemExit."""
    found = json.loads(Path(os.environ["NODEAGENT_ROLES_FILE"]).read_text())[ROLE]
    for one in found:
        if f"{ROLE}-{one['index']}" == host:
            return dict(one)
    sys.exit(f"reach: there is no host {host}: this job has {ROLE}-0 to {ROLE}-{len(found) - 1}")


def hosts() -> str:
    found = json.loads(Path(os.environ["NODEAGENT_ROLES_FILE"]).read_text())[ROLE]
    return ",".join(f"{ROLE}-{one['index']}:{os.environ.get('SLOTS', '1')}" for one in found)


def reach(words: list[str]) -> int:
    """Run a command there, with its output here; its exit code."""
    while words and words[0].startswith("-"):
        words = words[2 if words[0] in WITH_VALUE else 1 :]
    host, words = words[0], words[1:]
    while words and words[0].startswith("-"):  # horovodrun has -p and -i after the host
        words = words[2 if words[0] in WITH_VALUE else 1 :]
    there = place(host)
    with socket.create_connection((str(there["host"]), int(str(there["port"]))), TALK_BOUND) as link:
        stream = link.makefile("rb")
        nonce = stream.readline(100).decode().strip()
        question = json.dumps({"command": " ".join(words), "cwd": str(Path.cwd())})  # as ssh: a shell there reads it
        link.sendall(f"{sealed(nonce, question)} {question}\n".encode())
        link.settimeout(None)
        while len(generation := stream.read(5)) == 5:
            kind, size = generation[:1], int.from_bytes(generation[1:], "big", signed=True)
            if kind == END:
                return size if size >= 0 else 128 - size
            out = sys.stdout if kind == OUT else sys.stderr
            out.buffer.write(stream.read(size))
            out.buffer.flush()
    print(f"reach: {host} has gone, or does not know our secret", file=sys.stderr)
    return 255


def serve() -> None:
    """Until the job stops it. What it starts stays in its session, so that nodeagent knows whose it is."""
    with socket.create_server((os.environ.get("REACH_ADDRESS", ""), int(os.environ["NODEAGENT_PORT"]))) as server:
        while True:
            link, _ = server.accept()
            threading.Thread(target=answer, args=(link,), daemon=True).start()


def answer(link: socket.socket) -> None:
    """One command."""
    with link, contextlib.suppress(OSError):  # the launcher may go at any moment
        link.settimeout(TALK_BOUND)
        nonce = secrets.token_hex(16)
        link.sendall(f"{nonce}\n".encode())
        seal, _, question = link.makefile("rb").readline(MOST).decode(errors="replace").strip().partition(" ")
        if not hmac.compare_digest(seal.encode(), sealed(nonce, question).encode()):
            return
        link.settimeout(None)
        asked = json.loads(question)
        run(link, asked["command"], asked["cwd"])


def run(link: socket.socket, command: str, cwd: str) -> None:
    process = subprocess.Popen(
        ["/bin/sh", "-c", command], cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        process_group=0,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, OUT)
            selector.register(process.stderr, selectors.EVENT_READ, ERR)
            selector.register(link, selectors.EVENT_READ)
            while len(selector.get_map()) > 1:
                for key, _ in selector.select():
                    if key.fileobj is link:
                        return  # the launcher has gone: it says nothing more otherwise
                    data = os.read(key.fd, 1 << 16)
                    if data:
                        link.sendall(key.data + struct.pack("!i", len(data)) + data)
                    else:
                        selector.unregister(key.fileobj)
        link.sendall(END + struct.pack("!i", process.wait()))
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """All that the command has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_BOUND)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    elif sys.argv[1:] == ["hosts"]:
        print(hosts())
    elif len(sys.argv) > 3 and sys.argv[1] == "to":
        sys.exit(reach(sys.argv[2:]))
    else:
        sys.exit(__doc__)
