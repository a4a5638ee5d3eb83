"""Snapshots that outlive their workers: the shim keeps the memory, gives it to the next generation, and has it written
out before the pod is given up.

``worker.snapshot.put`` brings a memory of the worker's own (two each, 0 and 1, by turns), ``worker.snapshot.get`` hands
out those of its role, by the worker's number in its pod: ``LOCAL_RANK`` may say another one. Freed when the shim ends,
as it does when the job ends on this node. The helper that writes them out (``train/writeout.py``) is a program of its
own, with the memory's descriptors, a line to the shim, and the rest of the grace; what it asks to commit goes the way
of a worker's request. Standard library only. Must never read or map what it keeps, nor hold up the pod's end when the
grace is over, also where the helper cannot even die.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nodeagent.shim.hook import Hook, Program, Supervision
from nodeagent.shim.link import Asker, Call, PendingCommits, WorkerLink
from nodeagent.shim.output import RotatingFile
from nodeagent.shim.peers import VERSION, AgentCommand, Peer
from nodeagent.shim.worker import Worker

BUFFERS = 2
"""Memories of each worker: one whole, one being written."""
SHARE = 0.5
"""Of the memory that this machine could give now, one more buffer may take this much at most."""


class KeptSnapshots:
    """What is kept, by the worker's number in its pod and index. ``changed`` is called when ``bytes`` is another."""

    def __init__(self, link: WorkerLink, changed: Callable[[], None], available: Callable[[], int]) -> None:
        self._kept: dict[tuple[int, int], int] = {}
        self._roles: dict[int, str] = {}
        """Whose those of each number are."""
        self._granted: dict[tuple[int, int], tuple[Worker, int]] = {}
        """Who may make a memory and has not brought it yet, and its bytes: they look available still."""
        self._changed, self._available = changed, available
        self.bytes = 0
        link.add("snapshot.put", self._put)
        link.add("snapshot.get", self._get)

    def _put(self, call: Call) -> None:
        index = int(call.message["index"])
        size = int(call.message["bytes"])
        if not 0 <= index < BUFFERS:
            raise ValueError(f"index {index}")
        place = (call.local_rank, index)
        old = self._kept.get(place)
        freed = os.fstat(old).st_size if old is not None else 0
        self._granted.pop(place, None)
        if call.fds:
            own = os.fstat(call.fds[0]).st_blocks * 512  # not available any more: it was, before
        else:
            own = -sum(granted for worker, granted in self._granted.values() if not worker.ended)
        most = max(0, int((self._available() + own + freed) * SHARE))
        if size > most:
            call.refuse(f"a snapshot of {size >> 20} MiB is more than this node has memory for ({most >> 20} MiB)")
            return
        if not call.fds:  # only asked whether it may
            self._granted[place] = call.worker, size
            call.answer()
            return
        if os.fstat(call.fds[0]).st_size > size:
            raise ValueError("the memory is larger than announced")
        self._drop_of_others(call)
        self._kept[place] = call.fds.pop(0)
        if old is not None:
            os.close(old)
        self.bytes = sum(os.fstat(fd).st_size for fd in self._kept.values())
        call.answer()
        self._changed()

    def _drop_of_others(self, call: Call) -> None:
        """A worker of another role had this number in an earlier generation: what it left is not this one's."""
        slot, role = call.local_rank, call.worker.role
        if self._roles.setdefault(slot, role) != role:
            self._roles[slot] = role
            for place in [place for place in self._kept if place[0] == slot and place[1] != call.message["index"]]:
                os.close(self._kept.pop(place))

    def memories(self) -> list[tuple[int, int, int]]:
        """Number, index and descriptor of each that is kept; the descriptors stay the shim's."""
        return [(slot, index, fd) for (slot, index), fd in sorted(self._kept.items())]

    def _get(self, call: Call) -> None:
        role = call.worker.role
        own = {place: fd for place, fd in sorted(self._kept.items()) if self._roles[place[0]] == role}
        if "slot" not in call.message:
            call.answer(slots=sorted({slot for slot, _ in own}), own=call.local_rank)
            return
        found = {index: fd for (slot, index), fd in own.items() if slot == call.message["slot"]}
        call.answer(fds=tuple(found.values()), indexes=list(found))


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that this machine could give without swapping."""
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    raise OSError(0, f"{meminfo} does not say how much memory is available")


LAST_CALL, LAST_CALL_MAX = 0.1, 2.0
"""Of the grace, and at most so many seconds: what workers that still live leave to the commit."""
PROGRAM = (sys.executable, "-sP", "-m", "nodeagent.train.writeout")
"""Not the job's Python: it needs no torch, and the shim does not know where torch is."""
MOST_TEXT = 500


class WriteOut:
    """One try, of one generation that is being stopped on this node. ``changed`` is called when it is over."""

    def __init__(
        self,
        supervision: Supervision,
        snapshots: KeptSnapshots,
        commits: PendingCommits,
        log: RotatingFile,
        changed: Callable[[], None],
    ) -> None:
        self._supervision, self._log = supervision, log
        self._snapshots, self._commits, self._changed = snapshots, commits, changed
        self._hook: Hook | None = None
        self._peer: Peer | None = None
        self._token: dict[str, Any] = {}
        self._world = 0
        self._held: Callable[[], None] | None = None
        self._ended_all = self._outdone = self._reported = False
        self.over = False
        self.text = ""
        """What became of it; "" if there was nothing to write."""

    def begin(
        self,
        pod: Mapping[str, Any],
        token: dict[str, Any],
        environment: Mapping[str, str],
        ranks: Sequence[int],
        given_up: Mapping[str, Any],
        until: float,
    ) -> None:
        """``environment``: a worker's. ``given_up``: as base.GivenUp. ``until``: CLOCK_MONOTONIC."""
        memories, world = self._snapshots.memories(), int(environment.get("WORLD_SIZE", 1))
        self._world = world
        if not memories or self._useless(given_up):
            self.over = True
        elif len(pod["roles"]) > 1:  # each has ranks of its own, and the gang one checkpoint
            self._give_up("the job has several roles")
        elif not pod["checkpoint_dir"]:
            self._give_up("the job has no checkpoint_dir")
        elif time.monotonic() >= until:
            self._give_up("the workers took all of the grace")
        else:
            self._token = token
            since = max(tuple(given_up["since"]), self._commits.newest(token))
            order = {
                "folder": str(Path(pod["working_dir"], pod["checkpoint_dir"])), "generation": token["number"],
                "token": token["id"], "node": int(environment.get("GROUP_RANK", 0)),
                "nodes": int(environment.get("GROUP_WORLD_SIZE", 1)), "ranks": list(ranks), "world": world,
                "memories": memories, "since": since, "stays": given_up["stays"], "until": until,
            }  # fmt: skip
            left = until - time.monotonic()
            self._supervision.loop.after(left - min(LAST_CALL_MAX, LAST_CALL * left), self.workers_ended)
            try:
                self._start(order, left)
            except OSError as error:
                self._give_up(f"its helper could not be started: {error.strerror}")

    def _start(self, order: dict[str, Any], bound: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            argv = [*PROGRAM, json.dumps({"line": theirs.fileno(), "order": order})]
            keep = [theirs.fileno(), *(fd for _, _, fd in order["memories"])]
            self._peer = Peer(self._supervision.loop, ours, self._received, lambda _: None)
            program = Program(argv, dict(os.environ), "/", keep)
            self._hook = Hook("the helper", program, bound, self._log, self._supervision, self._ended)

    def asked_again(self, given_up: Mapping[str, Any]) -> None:
        """The gang that goes on may have become another one since it was begun: formed anew without a node that was
        lost, say. Other nodes that were not so far yet do not write for it, and would be waited for in vain."""
        if self._useless(given_up):
            self.kill("a gang of another size goes on")

    def _useless(self, given_up: Mapping[str, Any]) -> bool:
        """What is the same on all ranks stays with those that go on; parts need a gang of the same size."""
        return bool(given_up["stays"] and given_up["world"] != self._world)

    def kill(self, why: str) -> None:
        """SIGKILL if it is under way, and wait for nothing: it can run no more code of its own. If it has reported
        its result already, that result counts."""
        if self._hook is not None and not self.over:
            self._hook.kill(why)
            self.over = True
            if not self._reported:
                self._give_up(why)
            self._changed()

    def workers_ended(self) -> None:
        """They save nothing any more. Called as often as wanted."""
        self._ended_all = True
        if self._held is not None:
            held, self._held = self._held, None
            held()

    def _received(self, peer: Peer, asked: AgentCommand) -> None:
        """A commit is held back while workers live: theirs may be on its way, and is later."""
        if self.over:
            return
        if asked.get("op") == "commit":
            self._held = lambda: self._request(peer, asked)
            if self._ended_all:
                self.workers_ended()
        else:
            self._reported = True
            self.text = "" if self._outdone else str(asked.get("text", ""))[:MOST_TEXT]

    def _request(self, peer: Peer, asked: AgentCommand) -> None:
        def answer(refused: str) -> None:
            peer.send(json.dumps({"v": VERSION, "refused": refused}))

        if self.over:
            return
        self._outdone = self._commits.newest(self._token) >= (self._token["number"], asked["step"])
        if self._outdone:
            answer("the workers have saved a later checkpoint")
        else:
            asker = Asker(lambda: not self.over, answer)
            self._commits.request_commit(self._token, asked["name"], asked["step"], asked["order"], asker)

    def _ended(self, problem: str) -> None:
        if self._peer is not None:
            self._peer.close()
        if self.over:
            return
        self.over = True
        if problem and not self._reported:
            self._give_up(problem.partition(": ")[0])  # what it printed is in the pod's log
        self._changed()

    def _give_up(self, why: str) -> None:
        self.over = True
        self.text = f"snapshots not written out: {why}"[:MOST_TEXT]
