"""A trainer: linear regression on its share of the data, with the weights on the parameter servers.

Standard library only. Every run comes to the very same weights, however often it was interrupted: the servers add up
gradients in the trainers' order, and all go on from a step that every server has.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from pathlib import Path
from typing import IO

DIMENSIONS = 8
ROWS = 64


class Server:
    """The connection to one parameter server."""

    def __init__(self, host: str, port: int) -> None:
        self._file = socket.create_connection((host, port)).makefile("rw")  # it listens: see `after` in job.yaml

    def ask(self, **what: object) -> object:
        """One question, one answer. Raises ConnectionError if the server is gone."""
        file: IO[str] = self._file
        file.write(json.dumps(what) + "\n")
        file.flush()
        line = file.readline()
        if not line:
            raise ConnectionError("a parameter server is gone")
        return json.loads(line)


def rows(rank: int) -> list[tuple[list[float], float]]:
    """This trainer's share of the data: a hidden line, and no noise."""
    source = random.Random(rank)
    points = [[source.uniform(-1, 1) for _ in range(DIMENSIONS)] for _ in range(ROWS)]
    return [(x, sum((d + 1) * v for d, v in enumerate(x))) for x in points]


def gradients(data: list[tuple[list[float], float]], weights: dict[int, float]) -> tuple[dict[int, float], float]:
    """Of the mean squared error, and that error."""
    out, loss = dict.fromkeys(range(DIMENSIONS), 0.0), 0.0
    for x, y in data:
        wrong = sum(weights[d] * x[d] for d in range(DIMENSIONS)) - y
        loss += wrong * wrong / len(data)
        for d in range(DIMENSIONS):
            out[d] += 2 * wrong * x[d] / len(data)
    return out, loss


def merged(answers: list[object]) -> dict[int, float]:
    """The weights of all servers."""
    return {int(d): float(v) for one in answers if isinstance(one, dict) for d, v in one.items()}


def main() -> None:
    """Train ``STEPS`` steps; the first trainer writes what came of it."""
    steps, pause = int(os.environ.get("STEPS", "100")), float(os.environ.get("PAUSE", "0"))
    rank = int(os.environ["RANK"])
    places = json.loads(Path(os.environ["NODEAGENT_ROLES_FILE"]).read_text())["pserver"]
    servers = [Server(place["host"], place["port"]) for place in places]
    begin = min(int(str(server.ask(op="found"))) for server in servers)
    weights = merged([server.ask(op="begin", step=begin) for server in servers])
    data, loss = rows(rank), 0.0
    for step in range(begin, steps):
        gradient, loss = gradients(data, weights)
        weights = merged([server.ask(op="push", step=step, trainer=rank, gradient=gradient) for server in servers])
        print(f"step {step + 1} loss {loss:.6f}")
        time.sleep(pause)
    if rank == 0:
        result = Path(os.environ["NODEAGENT_CHECKPOINT_DIR"]) / "result.json"
        result.write_text(json.dumps({"steps": steps, "weights": [weights[d] for d in range(DIMENSIONS)]}))


if __name__ == "__main__":
    main()
