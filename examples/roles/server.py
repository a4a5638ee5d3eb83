"""A parameter server: it holds every n-th weight, adds up the trainers' gradients, and saves each step.

Standard library only. One of the role ``pserver``'s places; who it serves is in NODEAGENT_ROLES_FILE.
"""

from __future__ import annotations

import json
import os
import socketserver
import threading
from pathlib import Path

DIMENSIONS = 8
RATE = 0.05
KEPT = 2
"""Checkpoints: servers are at most one step apart, so a step that all of them have is among these."""
BOUND = 120.0
"""Seconds that a trainer's gradients wait for those of the others."""


class Shard:
    """The weights of one server."""

    def __init__(self, folder: Path, index: int, servers: int, trainers: int) -> None:
        self.folder, self.trainers = folder / f"server{index}", trainers
        self.mine = list(range(index, DIMENSIONS, servers))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.found = max(self._steps(), default=0)
        """The newest step as it began: every trainer has to be told the same."""
        self.step = -1
        self.weights: dict[int, float] = {}
        self.pushed: dict[int, dict[int, float]] = {}
        self.changed = threading.Condition()

    def begin(self, step: int) -> dict[int, float]:
        """Go on from this step; once only."""
        with self.changed:
            if self.step < 0:
                saved = json.loads((self.folder / f"{step}.json").read_text()) if step else {}
                self.weights = {d: float(saved.get(str(d), 0.0)) for d in self.mine}
                self.step = step
            return dict(self.weights)

    def push(self, step: int, trainer: int, gradient: dict[int, float]) -> dict[int, float]:
        """One trainer's gradients of this step; the new weights, once all trainers' are there."""
        with self.changed:
            if step != self.step:
                raise ValueError(f"at step {self.step}, not {step}")
            self.pushed[trainer] = gradient
            if len(self.pushed) == self.trainers:
                for d in self.mine:
                    self.weights[d] -= RATE * sum(self.pushed[t][d] for t in sorted(self.pushed)) / self.trainers
                self.pushed, self.step = {}, step + 1
                self._save()
                self.changed.notify_all()
            elif not self.changed.wait_for(lambda: self.step > step, BOUND):
                raise TimeoutError(f"not all trainers came to step {step}")
            return dict(self.weights)

    def _steps(self) -> list[int]:
        return [int(path.stem) for path in self.folder.glob("*.json")]

    def _save(self) -> None:
        fresh = self.folder / "new"
        fresh.write_text(json.dumps(self.weights))
        fresh.rename(self.folder / f"{self.step}.json")
        for old in sorted(self._steps())[:-KEPT]:
            (self.folder / f"{old}.json").unlink(missing_ok=True)


def answer(shard: Shard, asked: dict[str, object]) -> object:
    """What one line of a trainer comes to."""
    step = int(str(asked.get("step", 0)))
    if asked["op"] == "found":
        return shard.found
    if asked["op"] == "begin":
        return shard.begin(step)
    gradient = asked["gradient"]
    assert asked["op"] == "push" and isinstance(gradient, dict)
    return shard.push(step, int(str(asked["trainer"])), {int(d): float(v) for d, v in gradient.items()})


def main() -> None:
    """Serve until somebody ends it: the job is over when the trainers are."""
    roles = json.loads(Path(os.environ["NODEAGENT_ROLES_FILE"]).read_text())
    index = int(os.environ["NODEAGENT_ROLE_INDEX"])
    folder = Path(os.environ["NODEAGENT_CHECKPOINT_DIR"])
    shard = Shard(folder, index, len(roles["pserver"]), len(roles["trainer"]))

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                self.wfile.write(json.dumps(answer(shard, json.loads(line))).encode() + b"\n")

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True

    port = int(os.environ["NODEAGENT_PORT"])
    with Server(("", port), Handler) as server:
        print(f"server {index} serves weights {shard.mine} on port {port}, step {shard.found}")
        server.serve_forever()


if __name__ == "__main__":
    main()
