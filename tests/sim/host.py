"""The PodHost that one agent process sees of its simulated machine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping

from nodeagent.lease.grants import NOTHING, Grant
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.world import Token
from nodeagent.pods.base import NOBODY, CommitRequest, GivenUp, PodStatus, StartOrder
from tests.sim.machine import SimMachine, SimPod
from tests.sim.network import Gate

RECEIVED_WITHIN = 0.3
"""Seconds until a new agent has heard each shim that outlived the one before."""


class SimHost:
    """What one agent process sees of its machine. Commands of a stopped agent happen when it goes on."""

    def __init__(self, machine: SimMachine, gate: Gate, granted: Callable[[], None]) -> None:
        self._machine, self._gate, self._granted = machine, gate, granted
        self._queue: list[Callable[[], None]] = []
        self.changed = machine.changed
        self.dead = False
        self._unseen: set[str] = set()

    def status(self) -> Mapping[str, PodStatus]:
        found = {uid: self._received(uid, _shown(pod)) for uid, pod in self._machine.pods.items()}
        return found | self._machine.unending

    def _received(self, uid: str, status: PodStatus) -> PodStatus:
        silent_nodes = uid in self._unseen and status.phase != "gone"
        return PodStatus(uid=uid, phase="unknown") if silent_nodes else status

    async def adopt(self) -> None:
        await self._gate.passed()
        rng = random.Random(f"{self._machine.name} {asyncio.get_running_loop().time()}")
        self._unseen = set(self._machine.pods)
        for uid in self._machine.pods:
            self._machine.later(rng.uniform(0, RECEIVED_WITHIN), lambda uid=uid: self._hear(uid))  # type: ignore[misc]

    def _hear(self, uid: str) -> None:
        pod = self._machine.pods.get(uid)
        if pod is not None and pod.ordered is not None:  # of the agent before: its shim reads that first
            pod.behind.append(lambda: self._hear(uid))
            return
        self._unseen.discard(uid)
        self.changed.set()

    async def promised(self, uids: Iterable[str]) -> Mapping[str, int]:
        return {uid: token.number for uid in uids if (token := self._machine.promised.get(uid)) is not None}

    def _do(self, action: Callable[[], None]) -> None:
        if self.dead:
            return
        if self._gate.closed:
            self._queue.append(action)
        else:
            action()

    def _order(self, uid: str, action: Callable[[], None]) -> None:
        self._do(lambda: self._machine.in_turn(uid, action))

    def thaw(self) -> None:
        queue, self._queue = self._queue, []
        for action in queue:
            self._do(action)

    def prepare(self, uid: str, spec: JobSpec) -> None:
        def prepare() -> None:
            self._machine.prepare(uid, {role.name: role.after for role in spec.roles} if spec.ordered else {})
            self._granted()

        self._do(prepare)

    def promise(self, uid: str, token: Token, rendezvous: bool, ports: int = 0, above: int = 0) -> None:
        self._order(uid, lambda: self._machine.promise(uid, token, rendezvous, ports))

    def start(self, uid: str, order: StartOrder) -> None:
        self._order(uid, lambda: self._machine.order_start(uid, order))

    def release(self, uid: str, token: Token, roles: tuple[str, ...]) -> None:
        self._order(uid, lambda: self._machine.release(uid, token, roles))

    def stop_role(self, uid: str, token: Token, role: str, number: int) -> None:
        self._order(uid, lambda: self._machine.stop_role(uid, token, role, number))

    def start_role(self, uid: str, token: Token, role: str, number: int, wait: float) -> None:
        self._order(uid, lambda: self._machine.start_role(uid, token, role, number, wait))

    def stop(
        self,
        uid: str,
        grace: float | None,
        given_up: GivenUp | None = None,
        broken: bool = False,
        sooner: Mapping[str, float] = NOBODY,
        later: tuple[str, ...] = (),
    ) -> None:
        self._order(uid, lambda: self._machine.stop(uid, grace, given_up, broken, later))

    def look(self, uid: str, limit: float | None = None) -> None:
        if limit is None:  # simulated workers that others outlive do nothing for ever
            self._do(lambda: self._machine.look(uid))

    def retire(self, uid: str) -> None:
        self._order(uid, lambda: self._machine.retire(uid))

    def committed(self, uid: str, commit_request: CommitRequest, refused: str) -> None:
        self._do(lambda: self._machine.committed(uid, commit_request))

    def granted(self, uid: str) -> Grant:
        return self._machine.grants.get(uid, NOTHING)

    def ping(self) -> None:
        self._do(self._machine.ping)

    async def close(self) -> None:
        self.dead = True


def _shown(pod: SimPod) -> PodStatus:
    """As ``pods/pod.py`` shows it: the answer to a ping comes after a start that was ordered before."""
    status = pod.status()
    return status if pod.ordered is None or status.phase == "gone" else status.starting(pod.ordered)
