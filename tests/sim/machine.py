"""One simulated machine: shims and workers that outlive agents, the fence, power."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from nodeagent.lease.grants import NOTHING, Grant
from nodeagent.model.pod import PodPhase, RankFacts, Stall, WorkerState
from nodeagent.model.world import Starved, Token, WorkerExit
from nodeagent.pods.base import CommitRequest, GivenUp, PodStatus, Rendezvous, StartOrder
from nodeagent.shim.grace import HALF, Turns
from nodeagent.shim.rendezvous import LOOK_AGAIN
from tests.sim.network import Gate
from tests.sim.virtual import SimClock

GRACE = 5.0
"""Seconds that a job gives its workers to end in order."""
WARM_UP = 0.3
"""Seconds until the first workers of a pod that is ready are pre-forked."""


HIDDEN: tuple[tuple[int | None, int | None, str], ...] = (
    (7, None, "training aborted: see the log"),
    (1, None, "ValueError: step 12 failed"),
    (None, 6, "terminate called: another task died"),
    (1, None, ""),
)
"""Code, signal and last words of workers that do not say that a peer was gone."""
TREE = 0.05
"""Seconds, at most, until what has left its worker's group is dead, too."""
SILENT = 2.0
"""Seconds that a shim has to answer a ping (as pods/pod.py)."""
TICK = 0.25
"""Seconds between two looks of a shim at its grant (as shim/main.py)."""
FAREWELLS = ((1, None, "RuntimeError: Connection closed by peer [10.0.0.1]:4242"), *HIDDEN)


@dataclass(frozen=True)
class Guilt:
    """A worker, or with rank None a whole pod, that failed by itself."""

    uid: str
    token: Token | None
    """What it ran, or had run: a pod may die before it starts the newest."""
    node: str
    rank: int | None
    sudden: bool
    """No peer can be the reason, and everybody can see that (a shim leaves nobody to tell, once its job moves on)."""


@dataclass
class SimPod:
    """One shim with its workers."""

    uid: str
    shim_pid: int
    phase: PodPhase = "preparing"
    reason: str = ""
    folder: str = ""
    highest: Token | None = None
    generation: Token | None = None
    ranks: tuple[int, ...] = ()
    pids: tuple[int, ...] = ()
    after: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of a job whose roles start one after another: role to those that it waits for."""
    places: tuple[str, ...] = ()
    """In a job of several roles: the name of each worker's place."""
    held: set[int] = field(default_factory=set)
    """Local ranks that wait for other roles, and have not been started."""
    dropped: set[int] = field(default_factory=set)
    """Local ranks that waited when the pod was stopped: they are never started."""
    ready: list[str] = field(default_factory=list)
    """Names of the places here that are ready."""
    alive: set[int] = field(default_factory=set)
    """Local ranks still running."""
    outside: bool = False
    """A process that a worker started has left the worker's group and session, and runs on when that ends."""
    exits: list[WorkerExit] = field(default_factory=list)
    restarted: list[WorkerExit] = field(default_factory=list)
    rounds: dict[str, int] = field(default_factory=dict)
    """Role to the newest round for which all its workers here were dead."""
    runs: dict[str, int] = field(default_factory=dict)
    """Role to the round that its workers here are of: what really happens, for the checker."""
    stops: dict[str, int] = field(default_factory=dict)
    """Role to the round for which its workers are being killed."""
    down: set[int] = field(default_factory=set)
    """Local ranks that wait until their role is started again."""
    fenced: bool = False
    refused: str = ""
    rendezvous: Rendezvous | None = None
    ports: tuple[int, ...] = ()
    portless: str = ""
    killing: bool = False
    commit_request: CommitRequest | None = None
    turns: Turns | None = None
    """Of a planned stop of a job whose roles stop one after another."""
    asked: set[str] = field(default_factory=set)
    """Roles that this stop has asked."""
    doomed: bool = False
    """SIGKILL is on its way: a promise need not wait for its end."""
    env: tuple[dict[str, str], ...] = ()
    stall: Stall | None = None
    warming: bool = False
    """Its first workers are being forked ahead."""

    hung: bool = False
    """The shim neither acts nor speaks; its watchdog still fences its workers."""
    silent: bool = False
    """The hung shim was pinged: the host kills it."""
    started: float = 0.0
    """When its workers were started (this machine's clock)."""
    obeyed: float = 0.0
    """As ``lease.grants.GrantAnswer``."""
    retiring: bool = False
    ordered: Token | None = None
    """What an order to start, which is still on its way, is for."""
    behind: list[Callable[[], None]] = field(default_factory=list)
    """What its host ordered since."""

    _last_status: tuple[tuple[object, ...], PodStatus] | None = None
    """The last status, and what it was made of."""

    @property
    def live(self) -> bool:
        """It has workers that run, or may be started still."""
        return bool(self.alive or self.held or self.down or self.stops)

    @property
    def next_order(self) -> int:
        """Of the next worker that ends."""
        return 1 + max((e.order for e in (*self.exits, *self.restarted)), default=-1)

    def role_of(self, local: int) -> str:
        """The role of a worker; empty in a job of one role."""
        return self.places[local].rpartition(".")[0] if self.places else ""

    def drop_held(self) -> None:
        """What waits is not started any more, nor started again."""
        self.stops.clear()
        over = {*self.alive, *self.held, *self.dropped, *(e.local_rank for e in self.exits)}
        for local in sorted({*range(len(self.ranks))} - over):
            self.exits.append(
                WorkerExit(
                    rank=self.ranks[local], local_rank=local, pid=self.pids[local], signal=9, stopped=True,
                    order=self.next_order,
                )
            )  # fmt: skip
        self.down.clear()
        if self.held and not self.alive and not self.exits:
            self.refused = self.refused or "stopped before its workers started"
        self.dropped |= self.held
        self.held.clear()
        if not self.alive:
            self.end()

    def end(self) -> None:
        """All workers have ended; so has the pod, unless something outside their groups lives."""
        self.phase = "stopping" if self.outside else "exited"
        self.killing, self.doomed, self.turns = False, False, None
        self.asked.clear()

    def status(self) -> PodStatus:
        if self.hung and self._last_status is not None:
            return self._last_status[1]
        of = (
            self.phase, self.reason, self.folder, self.highest, self.generation, self.ranks, self.pids,
            tuple(self.alive), tuple(self.exits), tuple(self.restarted), self.fenced, self.refused,
            self.rendezvous, self.ports, self.portless, self.commit_request, self.stall,
            self.warming, tuple(self.held), tuple(self.dropped), tuple(self.ready),
            tuple(self.rounds.items()), tuple(self.down),
        )  # fmt: skip
        if self._last_status is None or self._last_status[0] != of:
            self._last_status = of, self._status()
        return self._last_status[1]

    def _status(self) -> PodStatus:
        by_rank = {e.local_rank: e for e in self.exits}
        workers = tuple(
            WorkerState(rank=r, local_rank=i, pid=None if i in self.held | self.down else self.pids[i],
                        state="starting" if i in self.held | self.down else "running" if i in self.alive else "exited",
                        exit=None if i in self.alive or i not in by_rank else (by_rank[i].code or 0))
            for i, r in enumerate(self.ranks) if i not in self.dropped
        )  # fmt: skip
        return PodStatus(
            uid=self.uid, phase=self.phase, reason=self.reason, folder=self.folder, shim_pid=self.shim_pid,
            highest=self.highest, generation=self.generation, workers=workers,
            exits=tuple(self.exits), restarted=tuple(self.restarted), fenced=self.fenced, refused=self.refused,
            rendezvous=self.rendezvous,
            ports=self.ports,
            portless=self.portless,
            commit=self.commit_request if self.alive else None,
            stall=self.stall, warming=self.warming and self.generation is None,
            waiting=tuple(sorted({self.role_of(local) for local in self.held})), ready=tuple(self.ready),
            rounds=dict(self.rounds), down=tuple(sorted({self.role_of(local) for local in self.down})),
        )  # fmt: skip


class SimMachine:
    """Hardware, shims and workers of one node. ``observe`` is called with its name after each change of who
    runs what."""

    def __init__(self, name: str, clock: SimClock, rng: random.Random, observe: Callable[[str], None]) -> None:
        self.name, self.clock, self.rng, self.observe = name, clock, rng, observe
        self.pods: dict[str, SimPod] = {}
        self.looks = 0
        """How often an agent asked what its workers do."""
        self.promised: dict[str, Token] = {}
        """On disk: survives shims and power cuts."""
        self.folder = "shared"
        """What the job's checkpoint folder is here; shims see a change when ``mount`` tells them."""
        self.frozen = Gate()
        self.powered = True
        self.never_ready: frozenset[str] = frozenset()
        self.squatted = False
        """Somebody holds all ports for rendezvous."""
        """Jobs whose pods never get ready here: an import that hangs."""
        self.waits = False
        self.left_in_order: list[tuple[float, str]] = []
        """When (the loop's clock, which all share) workers of which role left at a planned stop."""
        """Workers that are to leave wait for others, until their grace is over."""
        self.guard_late = 0.0
        self.start_late = 0.0
        """Seconds that an order to start takes: shims are busy."""
        self.changed = asyncio.Event()
        self.peers: Callable[[str, Token, str], None] = lambda uid, token, name: None
        """Tells the other members that this node's part of a collective is gone."""
        self.farewells = FAREWELLS
        """How workers here end when a peer is gone: one of these, at random."""
        self.guilty: list[Guilt] = []
        """Failures here that came of no peer: what really happened, for the checker."""
        self.well: set[tuple[str, Token, int]] = set()
        """Job, generation and rank of workers that ended here with 0 by themselves: what really happened, likewise."""
        self.were_ready: set[tuple[str, Token, str]] = set()
        """Job, generation and name of places that were ready here, likewise."""
        self.unending: dict[str, PodStatus] = {}
        """Pods of which something does not end, as each agent's host shows them."""
        self.grants: dict[str, Grant] = {}
        """The pods' grant records."""
        self._pid = 1000
        self._guards: dict[str, asyncio.TimerHandle] = {}
        """The shims' timers."""
        self._timers: set[asyncio.TimerHandle] = set()
        self._losing: set[tuple[str, Token]] = set()
        """Generations whose workers here are about to notice that a peer is gone."""

    # --- used by tests and checks

    def running(self, uid: str) -> Token | None:
        """The generation of which something really executes here now (a frozen machine executes nothing)."""
        pod = self.pods.get(uid)
        if pod is None or not (pod.alive or pod.outside) or self.frozen.closed or not self.powered:
            return None
        return pod.generation

    def later(self, delay: float, action: Callable[[], None]) -> None:
        def act() -> None:
            self._timers.discard(handle)
            if self.frozen.closed:
                self.later(0.05, action)  # nothing happens on a frozen machine
            elif self.powered:
                action()

        handle = asyncio.get_running_loop().call_later(delay, act)
        self._timers.add(handle)

    def touch(self) -> None:
        self.changed.set()
        self.observe(self.name)

    def worker_ends(
        self, uid: str, local: int, *, code: int | None = None, signal: int | None = None, error: str = "",
        victim: bool = False,
    ) -> None:  # fmt: skip
        """One worker ends; its peers on other machines will notice. ``victim``: because of one of those."""
        pod = self.pods.get(uid)
        if pod is None or local not in pod.alive:
            return
        died = not (code == 0 and signal is None)
        if died and not victim and pod.generation is not None:
            self.guilty.append(Guilt(uid, pod.generation, self.name, pod.ranks[local], signal == 9))
        missed = died and pod.killing and not pod.doomed
        self._record(pod, local, code, signal, error, missed)
        if missed:  # the shim ends those that wait for it
            self._kill([pod])
        self.touch()
        if pod.generation is not None and died:
            self.peers(uid, pod.generation, self.name)

    def worker_starves(self, uid: str, local: int, held: int, total: int) -> None:
        """The kernel kills one, since the memory is full of which its pod held so much."""
        pod = self.pods[uid]
        self.worker_ends(uid, local, signal=9)
        pod.exits[-1] = pod.exits[-1].model_copy(update={"starved": Starved(held=held, total=total)})

    def worker_restarts(self, uid: str, local: int) -> None:
        """One of a role that restarts alone fails, and runs again; its shim has a word about it."""
        pod = self.pods.get(uid)
        if pod is None or local not in pod.alive or pod.killing or pod.hung:
            return
        pod.restarted.append(
            WorkerExit(rank=pod.ranks[local], local_rank=local, pid=pod.pids[local], signal=9, order=pod.next_order)
        )
        self._pid += 1
        pod.pids = (*pod.pids[:local], self._pid, *pod.pids[local + 1 :])
        if pod.places and pod.places[local] in pod.ready:
            pod.ready.remove(pod.places[local])
        self._get_ready(pod)
        self.touch()

    def role_fails(self, uid: str, local: int) -> None:
        """A worker of a role that is started again as a whole fails: its shim kills the others of the role here."""
        pod = self.pods.get(uid)
        if pod is None or local not in pod.alive or pod.killing or pod.hung or pod.role_of(local) in pod.stops:
            return
        role = pod.role_of(local)
        number = pod.rounds.get(role, 0) + 1
        pod.alive.discard(local)
        pod.restarted.append(
            WorkerExit(
                rank=pod.ranks[local], local_rank=local, pid=pod.pids[local], signal=9, order=pod.next_order,
                round=number,
            )
        )  # fmt: skip
        self._stop_role(pod, role, number)

    def stop_role(self, uid: str, token: Token, role: str, number: int) -> None:
        pod = self._acts(uid)
        if pod is None or pod.generation != token or pod.phase != "running" or pod.killing or not pod.live:
            return
        if number > max(pod.rounds.get(role, 0), pod.stops.get(role, 0)):
            self._stop_role(pod, role, number)

    def _stop_role(self, pod: SimPod, role: str, number: int) -> None:
        """Its workers die a moment later; the role is down then."""
        token, pod.stops[role] = pod.generation, number
        pod.ready = [name for name in pod.ready if name.rpartition(".")[0] != role]
        self.touch()

        def dead() -> None:
            if self._acts(pod.uid) is not pod or pod.generation != token or pod.stops.get(role) != number:
                return
            del pod.stops[role]
            mine = {local for local in range(len(pod.ranks)) if pod.role_of(local) == role} - pod.held - pod.dropped
            well = [e for e in pod.exits if e.local_rank in mine and e.code == 0]
            pod.exits = [e for e in pod.exits if e not in well]
            self.well -= {(pod.uid, token, e.rank) for e in well if token is not None}
            pod.alive -= mine
            pod.down |= mine
            pod.rounds[role] = number
            self.touch()

        self.later(self.rng.uniform(0.001, 0.1), dead)

    def start_role(self, uid: str, token: Token, role: str, number: int, wait: float) -> None:
        pod = self._acts(uid)
        if pod is None or pod.generation != token or pod.rounds.get(role) != number:
            return
        mine = {local for local in pod.down if pod.role_of(local) == role}
        self._pid += len(pod.ranks)
        pod.pids = tuple(self._pid + local if local in mine else pid for local, pid in enumerate(pod.pids))
        pod.runs[role] = number
        pod.down -= mine
        pod.alive |= mine
        self._get_ready(pod)
        self.touch()

    def commit_request(self, uid: str, order: int, kind: str = "") -> None:
        """A worker of rank 0 asks for a commit. ``kind``: the end of the checkpoint's name."""
        pod = self.pods[uid]
        assert pod.generation is not None
        pod.commit_request = CommitRequest(
            token=pod.generation, name=f"g{pod.generation.number}-{order}{kind}", step=order, order=order
        )
        self.touch()

    def committed(self, uid: str, commit_request: CommitRequest) -> None:
        pod = self._acts(uid)
        if pod is not None and pod.commit_request == commit_request:
            pod.commit_request = None
            self.touch()

    def _record(
        self, pod: SimPod, local: int, code: int | None, signal: int | None, error: str = "", missed: bool = False
    ) -> None:
        pod.alive.discard(local)
        pod.exits.append(
            WorkerExit(rank=pod.ranks[local], local_rank=local, pid=pod.pids[local], code=code, signal=signal,
                       stopped=pod.killing, order=pod.next_order, error=error, missed=missed)
        )  # fmt: skip
        if code == 0 and signal is None and not pod.killing and pod.generation is not None:
            self.well.add((pod.uid, pod.generation, pod.ranks[local]))
        if not pod.live:
            pod.end()
            if not pod.hung or pod.fenced:
                self._end_tree(pod)

    def _drop_held(self, pod: SimPod) -> None:
        pod.drop_held()
        if not pod.live and (not pod.hung or pod.fenced):
            self._end_tree(pod)

    def leave_group(self, uid: str, local: int) -> None:
        """A worker starts a process that leaves its group and session."""
        pod = self.pods.get(uid)
        if pod is not None and local in pod.alive and not pod.killing:
            pod.outside = True

    def _end_tree(self, pod: SimPod) -> None:
        """The shim (at the fence: its watchdog) kills what is left below it, in whatever session or group; the pod has
        ended when that has."""
        if not pod.outside:
            return
        token = pod.generation

        def ended() -> None:
            if self.pods.get(pod.uid) is pod and pod.generation == token and pod.outside:
                pod.outside = False
                if pod.phase == "stopping":
                    pod.end()
                self.touch()

        self.later(self.rng.uniform(0.001, TREE), ended)

    def lose_peers(self, uid: str, token: Token) -> None:
        """A peer is gone: the workers here fail in their collective a moment later."""
        pod = self.pods.get(uid)
        if pod is None or (uid, token) in self._losing:
            return
        self._losing.add((uid, token))
        for local in range(len(pod.ranks) if pod.generation == token else 8):
            self.later(
                self.rng.uniform(0.02, 0.3),
                lambda local=local: self._victim(uid, token, local),  # type: ignore[misc]
            )
        self.later(0.3, lambda: self._losing.discard((uid, token)))

    def _victim(self, uid: str, token: Token, local: int) -> None:
        pod = self.pods.get(uid)
        if pod is not None and pod.generation == token and local in pod.alive and not pod.killing:
            code, signal, error = self.rng.choice(self.farewells)
            self.worker_ends(uid, local, code=code, signal=signal, error=error, victim=True)

    def kill_shim(self, uid: str) -> None:
        pod = self.pods.get(uid)
        if pod is None:
            return
        was, token = bool(pod.alive), pod.generation
        pod.hung = False
        self.guilty.append(Guilt(uid, token, self.name, None, False))
        pod.alive.clear()
        pod.held.clear()
        pod.down.clear()

        def gone() -> None:
            """Once the pod's cgroup is empty."""
            pod.outside = False
            if self.pods.get(uid) is not pod:
                return
            pod.phase, pod.reason, pod.folder = "gone", "its shim was killed", ""
            if pod.retiring:
                self._forget(uid)
            self.touch()

        if pod.outside:
            self.later(self.rng.uniform(0.001, TREE), gone)
        else:
            gone()
        if was and token is not None:
            self.peers(uid, token, self.name)

    def hang_shim(self, uid: str) -> None:
        """It does nothing any more, whatever it is asked, until its host kills it."""
        pod = self.pods.get(uid)
        if pod is not None and pod.phase != "gone":
            pod.status()  # what was heard last
            pod.hung = True

    def _kill_silent(self, pod: SimPod) -> None:
        if self.pods.get(pod.uid) is pod and pod.hung:
            self.kill_shim(pod.uid)

    def _forget(self, uid: str) -> None:
        del self.pods[uid]
        self.grants.pop(uid, None)
        if uid in self._guards:
            self._guards.pop(uid).cancel()

    def _acts(self, uid: str) -> SimPod | None:
        """The pod, if its shim carries out what it is asked."""
        pod = self.pods.get(uid)
        return None if pod is None or pod.hung else pod

    def mount(self, folder: str) -> None:
        """Another checkpoint folder from now on, and the shims look."""
        self.folder = folder
        for pod in self.pods.values():
            if pod.folder:
                pod.folder = folder
        self.touch()

    def cut_power(self) -> None:
        self.powered = False
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._losing.clear()
        self._unwatch()
        lost = [(p.uid, p.generation) for p in self.pods.values() if p.alive]
        self.pods.clear()
        self.observe(self.name)
        for uid, token in lost:
            if token is not None:
                self.peers(uid, token, self.name)

    def power_on(self) -> None:
        self.powered = True
        self.grants.clear()

    # --- the fence

    def grant(self, uid: str, grant: Grant) -> None:
        """The lease process writes a pod's record. Nobody is told: the shim looks."""
        before, self.grants[uid] = self.granted(uid), grant
        if uid not in self._guards:
            self._watch(uid, self.clock.true_delay(grant.until) + self.guard_late)
        if uid in self.pods and (grant.until < before or grant.stop_before):
            self.later(self.rng.uniform(0, TICK), lambda: self._look(uid))

    def granted(self, uid: str) -> float:
        """Until when this pod may run, by this machine's clock."""
        return self.grants[uid].until if uid in self.grants else 0.0

    def ping(self) -> None:
        """The agent pings every shim."""
        for pod in self.pods.values():
            if pod.hung and not pod.silent:
                pod.silent = True
                self.later(SILENT, lambda pod=pod: self._kill_silent(pod))  # type: ignore[misc]

    def _watch(self, uid: str, delay: float) -> None:
        """When its time is over, the guard or the watchdog reads the record again."""
        if uid in self._guards:
            self._guards[uid].cancel()
        self._guards[uid] = asyncio.get_running_loop().call_later(max(0.0, delay), self._fence, uid)

    def _unwatch(self) -> None:
        for guard in self._guards.values():
            guard.cancel()
        self._guards.clear()

    def _fence(self, uid: str) -> None:
        self._guards.pop(uid, None)
        if self.frozen.closed:
            self._watch(uid, 0.01)
            return
        if not self.powered:
            return
        left = self.granted(uid) - self.clock.now() - 1e-6  # the loop calls up to its clock's resolution early
        if left > 0:
            self._watch(uid, self.clock.true_delay(self.granted(uid)) + self.guard_late)
            return
        pod = self.pods.get(uid)
        if pod is not None and pod.live:
            pod.fenced = True
            self._kill([pod])
        elif pod is not None:
            self._end_tree(pod)

    def _look(self, uid: str) -> None:
        """The shim reads its grant: a time that was shortened, or an order to stop."""
        pod, grant = self._acts(uid), self.grants.get(uid, NOTHING)
        if pod is None or pod.phase == "gone":
            return
        if pod.live and self.clock.now() >= grant.until:
            pod.fenced = True
            self._kill([pod])
        if pod.live and pod.started < grant.stop_before and not pod.killing:
            self.stop(uid, GRACE)
        if not pod.live and not pod.outside:  # as a gang that has settled: what left the workers' group has ended, too
            pod.obeyed = grant.stop_before
        elif grant.stop_before:
            self.later(TICK, lambda: self._look(uid))

    def _kill(self, pods: list[SimPod]) -> None:
        """SIGKILL to all workers of these pods in one go."""
        for pod in pods:
            pod.killing = bool(pod.alive)
            self._drop_held(pod)
            for local in sorted(pod.alive):
                self._record(pod, local, None, 9)
        self.touch()
        for pod in pods:
            if pod.generation is not None:
                self.peers(pod.uid, pod.generation, self.name)

    def freeze(self) -> None:
        """Nothing on it executes any more until it thaws."""
        self.frozen.close()
        self.observe(self.name)

    def thaw(self) -> None:
        """The machine goes on. Its shim's guard acts before its workers step: assumption A2 of the protocol."""
        self.frozen.open()
        now = self.clock.now()
        for uid, pod in self.pods.items():
            pod.outside = pod.outside and now < self.granted(uid)
        doomed = [pod for pod in self.pods.values() if pod.live and now >= self.granted(pod.uid)]
        for pod in doomed:
            pod.fenced = True
        if doomed:
            self._kill(doomed)
        for pod in self.pods.values():
            if pod.phase == "stopping" and not pod.live and not pod.outside:
                pod.end()
        self.observe(self.name)

    # --- commands

    def prepare(self, uid: str, after: Mapping[str, tuple[str, ...]]) -> None:
        pod = self.pods.get(uid)
        if pod is not None and pod.phase != "gone":
            return
        self._pid += 1
        pod = self.pods[uid] = SimPod(uid, self._pid, highest=self.promised.get(uid), after=after)
        self.grants[uid] = NOTHING
        self.touch()

        def warm() -> None:
            if self._acts(uid) is pod and pod.phase == "preparing" and uid not in self.never_ready:
                pod.phase, pod.folder, pod.warming = "ready", self.folder, True
                self.later(WARM_UP, preforked)
                self.touch()

        def preforked() -> None:
            pod.warming = False
            self.touch()

        self.later(self.rng.uniform(0.2, 2.0), warm)

    def promise(self, uid: str, token: Token, rendezvous: bool, ports: int = 0) -> None:
        pod = self._acts(uid)
        if pod is None or pod.phase == "gone" or (pod.live and not pod.doomed) or (pod.outside and not pod.live):
            return
        known = self.promised.get(uid)
        if known is not None and known != token and known.number >= token.number:
            return
        self.promised[uid] = token

        def look_again() -> None:
            if self._acts(uid) is pod and pod.portless and not self.squatted:
                pod.portless = ""
                self.touch()
            elif self._acts(uid) is pod and pod.portless:
                self.later(LOOK_AGAIN, look_again)

        def done() -> None:
            if self._acts(uid) is pod:
                pod.highest = token
                pod.rendezvous, pod.ports = None, tuple(range(29800, 29800 + ports))
                if rendezvous and self.squatted:
                    pod.portless = "no free port"
                    self.later(LOOK_AGAIN, look_again)
                elif rendezvous:
                    pod.portless = ""
                    pod.rendezvous = Rendezvous(
                        token=token, address=f"{self.name}:{29400 + token.number % 400}", store_hosted=True
                    )
                self.touch()

        self.later(self.rng.uniform(0.001, 0.02), done)

    def in_turn(self, uid: str, action: Callable[[], None]) -> None:
        """What a host orders is done in that order."""
        pod = self.pods.get(uid)
        if pod is not None and pod.ordered is not None:
            pod.behind.append(action)
        else:
            action()

    def order_start(self, uid: str, order: StartOrder) -> None:
        pod = self._acts(uid)
        if pod is None or not self.start_late:
            self.start(uid, order)
            return
        pod.ordered = order.token

        def carry_out() -> None:
            behind, pod.ordered, pod.behind = pod.behind, None, []
            if self.pods.get(uid) is pod:
                self.start(uid, order)
                for action in behind:
                    self.in_turn(uid, action)
            self.touch()

        self.later(self.start_late, carry_out)

    def start(self, uid: str, order: StartOrder) -> None:
        pod = self._acts(uid)
        if pod is None or pod.phase in ("gone", "preparing") or pod.generation == order.token:
            return
        if pod.highest is None or pod.live or pod.outside:
            return
        if order.token != pod.highest and order.token.number <= pod.highest.number:
            return
        pod.restarted, pod.rounds, pod.runs, pod.stops, pod.down = [], {}, {}, {}, set()
        pod.generation, pod.exits, pod.fenced, pod.refused, pod.stall = order.token, [], False, "", None
        pod.ranks, pod.pids, pod.env = (), (), order.environments
        pod.places, pod.ready, pod.dropped = order.places, [], set()
        pod.started = self.clock.now()
        if order.token.number <= self.grants.get(uid, NOTHING).barred:
            pod.refused, pod.phase, pod.fenced = "the node has let go of this generation", "exited", True
            self.touch()
            return
        if pod.started >= min(order.not_after, self.granted(uid)):
            pod.refused, pod.phase = "the grant ran out before the start", "exited"
            self.touch()
            return
        pod.ranks = order.ranks
        self._pid += len(order.ranks)
        pod.pids = tuple(range(self._pid, self._pid + len(order.ranks)))
        pod.held = {local for local in range(len(order.ranks)) if pod.after.get(pod.role_of(local))}
        pod.alive = set(range(len(order.ranks))) - pod.held
        pod.phase = "running"
        self._get_ready(pod)
        self.touch()

    def release(self, uid: str, token: Token, roles: tuple[str, ...]) -> None:
        pod = self._acts(uid)
        if pod is None or pod.generation != token or pod.phase != "running":
            return
        chosen = {local for local in pod.held if pod.role_of(local) in roles}
        for role in {pod.role_of(local) for local in chosen}:
            pod.runs[role] = pod.rounds.get(role, 0)
        pod.held -= chosen
        pod.alive |= chosen
        self._get_ready(pod)
        self.touch()

    def _get_ready(self, pod: SimPod) -> None:
        """Places whose workers have been started are ready a moment later, unless the generation stops."""
        token = pod.generation
        assert token is not None
        waiting = {pod.places[local] for local in pod.held | pod.down}

        def ready(name: str) -> None:
            role = name.rpartition(".")[0]
            stops = role in pod.stops or any(pod.role_of(local) == role for local in pod.down)
            if self._acts(pod.uid) is pod and pod.generation == token and pod.phase == "running" and not stops:
                if name not in pod.ready:
                    pod.ready.append(name)
                self.were_ready.add((pod.uid, token, name))
                self.touch()

        for name in sorted({*pod.places} - waiting - {*pod.ready}) if pod.after else ():
            self.later(self.rng.uniform(0.0, 1.0), lambda name=name: ready(name))  # type: ignore[misc]

    def stop(
        self, uid: str, grace: float | None, given_up: GivenUp | None = None, broken: bool = False,
        later: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        pod = self._acts(uid)
        if pod is None or not pod.live:
            return
        pod.phase, pod.killing, pod.doomed = "stopping", True, pod.doomed or grace is None
        self._drop_held(pod)
        if not pod.alive:
            self.touch()
            return
        if grace is None or broken:
            delay = self.rng.uniform(0.001, 0.01)
        else:
            delay = grace if self.waits else self.rng.uniform(0.0, min(grace, 5.0))
        token = pod.generation

        def kill() -> None:
            if self._acts(uid) is pod and pod.generation == token and pod.alive:
                self._kill([pod])

        if grace is None or broken or not pod.after:
            self.later(delay, kill)
            return
        if pod.turns is None:
            pod.turns = Turns({role: {"after": others} for role, others in pod.after.items()})
            self.later(grace, kill)
            self.later(grace * HALF, lambda: self._ask_everybody(pod))
        pod.turns.elsewhere = frozenset(later)
        self._ask(pod, grace)

    def _ask(self, pod: SimPod, grace: float) -> None:
        """Workers of roles whose turn has come end by and by; then it may be that of others (``shim/grace.py``)."""
        roles, token, turns = {pod.role_of(local) for local in pod.alive}, pod.generation, pod.turns

        def left(role: str) -> None:
            if self._acts(pod.uid) is not pod or pod.generation != token or pod.turns is not turns:
                return
            for local in sorted(local for local in pod.alive if pod.role_of(local) == role):
                self._record(pod, local, None, 15)
                self.left_in_order.append((asyncio.get_running_loop().time(), role))
            self.touch()
            if not pod.alive and token is not None:
                self.peers(pod.uid, token, self.name)
            self._ask(pod, grace)

        for role in sorted(roles - pod.asked):
            if turns is not None and turns.has_come(role, roles):
                pod.asked.add(role)
                delay = grace if self.waits else self.rng.uniform(0.0, min(grace, 5.0))
                self.later(delay, partial(left, role))

    def _ask_everybody(self, pod: SimPod) -> None:
        if pod.turns is not None and self._acts(pod.uid) is pod:
            pod.turns.over = True
            self._ask(pod, 0.0)

    def hang(self, uid: str, suspects: bool, stopped: int | None = None) -> None:
        """The pod's workers wait for others; the one of this local rank is stopped."""
        pod = self.pods[uid]
        facts = tuple(
            RankFacts(rank=r, state="stopped" if i == stopped else "idle", silent=True, quiet=True, age=600.0)
            for i, r in enumerate(pod.ranks)
        )
        pod.stall = Stall(limit=600.0, suspects=suspects, ranks=facts)
        self.touch()

    def look(self, uid: str) -> None:
        pod = self._acts(uid)
        if pod is not None and pod.phase == "running" and pod.stall is None:
            self.looks += 1
            token = pod.generation
            self.later(1.0, lambda: self.hang(uid, False) if pod.generation == token and pod.alive else None)

    def retire(self, uid: str) -> None:
        pod = self.pods.get(uid)
        if pod is not None and pod.hung:
            pod.retiring = True
        elif pod is not None:
            pod.alive.clear()
            pod.held.clear()
            pod.down.clear()
            pod.outside = False
            self._forget(uid)
            self.touch()
