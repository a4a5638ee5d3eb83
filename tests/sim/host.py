"""The PodHost that one agent process sees of its simulated machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from nodeagent.model.jobspec import JobSpec
from nodeagent.model.world import Token
from nodeagent.workers.base import CommitWish, GivenUp, PodStatus, StartOrder
from tests.sim.machine import SimMachine
from tests.sim.network import Gate


class SimHost:
    """What one agent process sees of its machine. Commands of a stopped agent happen when it goes on."""

    def __init__(self, machine: SimMachine, gate: Gate) -> None:
        self._machine, self._gate = machine, gate
        self._queue: list[Callable[[], None]] = []
        self.changed = machine.changed
        self.dead = False

    def status(self) -> Mapping[str, PodStatus]:
        return {uid: pod.status() for uid, pod in self._machine.pods.items()}

    async def adopt(self) -> None:
        await self._gate.passed()

    def promised(self, uids: Iterable[str]) -> Mapping[str, int]:
        return {uid: token.number for uid in uids if (token := self._machine.promised.get(uid)) is not None}

    def _do(self, action: Callable[[], None]) -> None:
        if self.dead:
            return
        if self._gate.closed:
            self._queue.append(action)
        else:
            action()

    def thaw(self) -> None:
        queue, self._queue = self._queue, []
        for action in queue:
            self._do(action)

    def prepare(self, uid: str, spec: JobSpec) -> None:
        self._do(lambda: self._machine.prepare(uid))

    def promise(self, uid: str, token: Token, rendezvous: bool) -> None:
        self._do(lambda: self._machine.promise(uid, token, rendezvous))

    def start(self, uid: str, order: StartOrder) -> None:
        self._do(lambda: self._machine.start(uid, order))

    def stop(self, uid: str, grace: float | None, given_up: GivenUp | None = None, broken: bool = False) -> None:
        self._do(lambda: self._machine.stop(uid, grace, given_up, broken))

    def look(self, uid: str) -> None:
        self._do(lambda: self._machine.look(uid))

    def retire(self, uid: str) -> None:
        self._do(lambda: self._machine.retire(uid))

    def committed(self, uid: str, wish: CommitWish, refused: str) -> None:
        self._do(lambda: self._machine.committed(uid, wish))

    def grant(self, until: float, seq: int, uid: str | None = None) -> None:
        self._do(lambda: self._machine.grant(until, seq, uid))

    async def close(self) -> None:
        self.dead = True
