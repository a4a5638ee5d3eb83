"""A training without a framework, for faults that are none of a framework's: its ranks make each step together, as in a
collective, its state holds every step before, and it goes on from its checkpoint. It starts in a tenth of a second,
torch in three.

As with gloo, a rank that loses another one fails, and one whose peer is silent waits. The losses are the same at every
world size: ``losses`` gives them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SAMPLES = 96
"""In each step, over all ranks."""
PRIME = 2**31 - 1
STEPS = 600
"""Of a job that outlasts its test."""
FRAME = struct.Struct("!QQ")
"""A step's number, and a sum: of this rank's samples, or of all."""
PATIENCE = 60.0
"""Seconds for all ranks to meet."""


def part(step: int, rank: int, world: int) -> int:
    """What this rank adds to a step."""
    return sum(step * 7919 + sample * sample for sample in range(rank, SAMPLES, world))


def next_state(state: int, total: int) -> int:
    """After one more step: a step left out, or made twice, changes all that follow."""
    return (state * 48271 + total) % PRIME


def losses(steps: int = STEPS) -> dict[int, float]:
    """Loss of each step of an undisturbed run."""
    state, found = 1, {}
    for step in range(1, steps + 1):
        state = next_state(state, part(step, 0, 1))
        found[step] = state / PRIME
    return found


class Peers:
    """The other ranks, over TCP: rank 0 adds up. Ends the process if one is gone or makes another step."""

    def __init__(self, rank: int, world: int, address: str, port: int) -> None:
        self.rank = rank
        self.links = list(self._from_others(port, world - 1) if rank == 0 else self._to_first(address, port))

    @staticmethod
    def _from_others(port: int, count: int) -> Iterator[socket.socket]:
        if count:
            with socket.create_server(("", port)) as server:
                server.settimeout(PATIENCE)
                for _ in range(count):
                    link, _ = server.accept()
                    link.settimeout(None)
                    yield link

    @staticmethod
    def _to_first(address: str, port: int) -> Iterator[socket.socket]:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with suppress(ConnectionRefusedError):  # it does not listen yet
                link = socket.create_connection((address, port), PATIENCE)
                link.settimeout(None)
                yield link
                return
            time.sleep(0.02)
        sys.exit(f"rank 0 was not there within {PATIENCE:g} s")

    def add_up(self, step: int, mine: int) -> int:
        """The sum of what all ranks add to this step."""
        if self.rank:
            self._send(self.links[0], step, mine)
            return self._receive(self.links[0], step)
        total = mine + sum([self._receive(link, step) for link in self.links])
        for link in self.links:
            self._send(link, step, total)
        return total

    @staticmethod
    def _send(link: socket.socket, step: int, value: int) -> None:
        try:
            link.sendall(FRAME.pack(step, value))
        except OSError as error:
            sys.exit(f"another rank is gone: {error}")

    @staticmethod
    def _receive(link: socket.socket, step: int) -> int:
        try:
            frame = link.recv(FRAME.size, socket.MSG_WAITALL)
        except OSError as error:
            sys.exit(f"another rank is gone: {error}")
        if len(frame) < FRAME.size:
            sys.exit("another rank is gone: it closed the connection")
        theirs, value = FRAME.unpack(frame)
        if theirs != step:
            sys.exit(f"another rank makes step {theirs}, this one {step}")
        return int(value)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-delay", type=float, required=True, metavar="SECONDS")
    parser.add_argument("--ckpt-every", type=int, required=True, metavar="STEPS")
    parser.add_argument("--step-log", type=Path, required=True)
    args = parser.parse_args()

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    who = {"rank": rank, "world": world, "pid": os.getpid(), "generation": int(os.environ["NODEAGENT_GENERATION"])}
    folder = Path(os.environ["NODEAGENT_CHECKPOINT_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "state.json"
    step, state = json.loads(checkpoint.read_text()) if checkpoint.exists() else (0, 1)

    log = os.open(args.step_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    peers = Peers(rank, world, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    while step < args.steps:
        time.sleep(args.step_delay)
        step += 1
        state = next_state(state, peers.add_up(step, part(step, rank, world)))
        now = {"step": step, "loss": state / PRIME, "mono": time.clock_gettime(time.CLOCK_MONOTONIC)}
        os.write(log, (json.dumps(who | now) + "\n").encode())
        if rank == 0 and step % args.ckpt_every == 0:
            draft = folder / f"state.{who['generation']}.tmp"
            draft.write_text(json.dumps([step, state]))
            draft.replace(checkpoint)


if __name__ == "__main__":
    main()
