"""A node without an agent: a real lease process on a real store, and the test as its agent and its shims."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nodeagent.lease.grants import Grant, GrantAnswer, answer_file, grants_folder, make_grant, read_grant_of
from nodeagent.lease.order import LeaseOrder, LeasePort, Server, remove_order, write_order
from nodeagent.lease.statefiles import (
    NOBODY,
    LeaseStatus,
    Pulse,
    lease_folder,
    pulse_file,
    read_pulse,
    read_status,
    wake_socket,
)
from nodeagent.model.base import RECORD_VERSION
from nodeagent.osutil.linux import boot_id, socket_path
from nodeagent.store.keys import prefix
from nodeagent.store.scripts import load

BOUND = 60.0
"""Seconds that a test waits for anything."""
CLUSTER = "test"
NODE, LIFE = "n1", "n1-a"
POD = "p1"
SECRET = "73656372657421"


def order(server: Server, **changes: Any) -> LeaseOrder:
    """For ``NODE``: as an agent with a quick heartbeat gives it."""
    plain = LeaseOrder(
        boot=boot_id(), node=NODE, life=LIFE, start=1, era="", cluster_uid="", heartbeat=0.1, lease=3.0, fence=2.2,
        kill=0.2, promise=0.1, timeout=0.5, failsafe=1.0, failsafe_limit=3600.0, patience=3600.0, grace=3600.0,
        prefix=prefix(CLUSTER), record_version=str(RECORD_VERSION), server=server,
        renew=load("renew_lease").sha, leave=load("leave").sha, let_go=load("let_go").sha,
        door=LeasePort("127.0.0.1", (0, 0), SECRET),
    )  # fmt: skip
    return plain._replace(**changes)


class Node:
    """One run folder."""

    def __init__(self, run: Path) -> None:
        self.run, self.folder, self.grants = run, lease_folder(run), grants_folder(run)
        self.folder.mkdir(mode=0o700, parents=True)
        self.process: subprocess.Popen[bytes] | None = None
        self._all: list[subprocess.Popen[bytes]] = []
        self._mouth = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    # --- as the agent

    def give(self, order: LeaseOrder | None) -> None:
        if order is None:
            remove_order(self.folder)
        else:
            steps = map(load, ("renew_lease", "leave", "let_go"))
            write_order(self.folder, order, {step.sha: step.source for step in steps})

    def say(self, word: object) -> None:
        """Waits until somebody listens."""
        deadline = time.monotonic() + BOUND
        while True:
            try:
                with socket_path(wake_socket(self.folder)) as path:
                    self._mouth.sendto(word if isinstance(word, bytes) else json.dumps(word).encode(), path)
                return
            except (FileNotFoundError, ConnectionRefusedError):
                assert time.monotonic() < deadline
                time.sleep(0.002)

    def add(self, key: str = POD) -> None:
        make_grant(self.grants, key, os.getuid(), os.getgid())

    def start(self) -> None:
        command = [sys.executable, "-sP", "-m", "nodeagent.lease", str(self.run)]
        with (self.run / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
        self._all.append(self.process)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(BOUND)

    async def ended(self) -> int:
        """Its exit code."""
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, BOUND)

    def close(self) -> None:
        for process in self._all:
            process.kill()
            process.wait(BOUND)
        self._mouth.close()

    # --- as a shim

    def grant(self, key: str = POD) -> Grant:
        return read_grant_of(self.grants, key)

    def obey(self, at: float, key: str = POD) -> None:
        GrantAnswer(answer_file(self.grants / key)).obeyed(at)

    # --- what it shows

    @property
    def pulse(self) -> Pulse:
        return read_pulse(pulse_file(self.folder)) or Pulse(0.0, 0.0, 0.0, 0.0)

    @property
    def status(self) -> LeaseStatus:
        return read_status(self.folder) or LeaseStatus("idle", "", NOBODY)

    @property
    def log(self) -> str:
        return (self.run / "log").read_text()

    async def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + BOUND
        while not condition():
            assert time.monotonic() < deadline, (self.status, self.pulse, self.grant(), self.log)
            await asyncio.sleep(0.005)

    async def renewed_again(self) -> None:
        before = self.pulse.renewed
        await self.until(lambda: self.pulse.renewed > before)
