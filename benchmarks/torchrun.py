"""A training under torchrun: one launcher per node on this machine, c10d rendezvous, with its best known settings.

Owns the settings and the launchers' processes. A node is a launcher and what it started; the node that hosts the
rendezvous store is never killed, since torchrun's job is dead then.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.launcher import MAX_RESTARTS, PYTHON, LaunchError, Shape, tail
from benchmarks.steplog import StepLog
from nodeagent.local import power

ADDRESS = "127.0.0.1"
TUNED_RENDEZVOUS = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
TUNED_FLAGS = ("--monitor-interval=0.05",)
ENVIRONMENT = {
    # Without it, restarted gloo workers of torch 2.13 read the dead ones' addresses and never recover.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "RES_OPTIONS": "timeout:1 attempts:1",  # as nodeagent sets it
}


class Torchrun:
    """A running training. Use as a context manager: leaves no process."""

    def __init__(self, folder: Path, shape: Shape, *, tuned: bool = True) -> None:
        self.shape = shape
        self._tuned = tuned
        self.log = StepLog(folder / "steps.jsonl")
        self._folder = folder
        self._mark = f"torchrun-{secrets.token_hex(4)}"
        self._port = free_port()
        self._launchers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        try:
            for number in range(self.shape.nodes):
                self.start_node(f"n{number + 1}")
                if number == 0:
                    self._await_store()
        except BaseException:
            self._clear_away()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._clear_away()

    def check(self) -> None:
        for node, launcher in self._launchers.items():
            if (code := launcher.poll()) is not None:
                raise LaunchError(f"torchrun's {node} ended with {code}:\n{tail(self._log_of(node))}")

    def evidence(self) -> str:
        return "\n".join(f"{node}:\n{tail(self._log_of(node))}" for node in self._launchers)

    def killable(self) -> list[str]:
        return [node for node in self._launchers if node != "n1"]

    def kill_node(self, node: str) -> float:
        at = time.monotonic()
        power.cut(self._mark, node)
        self._launchers.pop(node).wait()
        return at

    def leave_node(self, node: str) -> None:
        """Have a node leave in order, and wait until it has."""
        launcher = self._launchers.pop(node)
        launcher.terminate()
        launcher.wait()

    def start_node(self, node: str) -> None:
        arguments = rendezvous_arguments(self.shape, f"{ADDRESS}:{self._port}", host=node == "n1", tuned=self._tuned)
        command = [PYTHON, "-m", "torch.distributed.run", *arguments, *self.shape.command(self._folder)]
        environ = os.environ | (ENVIRONMENT if self._tuned else {}) | {power.MARK: power.mark(self._mark, node)}
        with self._log_of(node).open("ab") as log:
            self._launchers[node] = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def processes(self) -> set[int]:
        return power.processes(self._mark)

    def launcher_pids(self) -> list[int]:
        return [launcher.pid for launcher in self._launchers.values()]

    def _log_of(self, node: str) -> Path:
        return self._folder / f"{node}.log"

    def _await_store(self, bound: float = 60.0) -> None:
        until = time.monotonic() + bound
        while True:
            self.check()
            with socket.socket() as probe:
                if probe.connect_ex((ADDRESS, self._port)) == 0:
                    return
            if time.monotonic() > until:
                raise LaunchError(f"torchrun's store does not listen after {bound:g} s:\n{tail(self._log_of('n1'))}")
            time.sleep(0.05)

    def _clear_away(self) -> None:
        power.cut(self._mark)
        for launcher in self._launchers.values():
            launcher.wait()
        self._launchers.clear()


def rendezvous_arguments(shape: Shape, endpoint: str, *, host: bool, tuned: bool = True) -> list[str]:
    """torchrun's own arguments on one node; ``host``: it keeps the rendezvous store."""
    count = str(shape.least) if shape.least == shape.most else f"{shape.least}:{shape.most}"
    return [
        *(f"--nnodes={count}", f"--nproc-per-node={shape.workers}"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=bench", f"--local-addr={ADDRESS}"),
        f"--rdzv-conf=is_host={int(host)}" + (f",{TUNED_RENDEZVOUS}" if tuned else ""),
        *(TUNED_FLAGS if tuned else ()),
        f"--max-restarts={MAX_RESTARTS}",
    ]


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        port: int = probe.getsockname()[1]
        return port
