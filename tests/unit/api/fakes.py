"""An agent's view over the in-memory store, and a tiny stand-in for the agents that carry out what is asked."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from nodeagent.agent.diagnosis import Diagnosis
from nodeagent.agent.gauges import MetricsPage
from nodeagent.agent.health import NodeHealth
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.savedview import Acknowledged
from nodeagent.agent.view import AgentHealth
from nodeagent.api.server import ApiServer
from nodeagent.model.job import TERMINAL, BudgetEntry, JobRecord, Outcome, Phase
from nodeagent.model.jobspec import JobSpec, Nodes, Role, Submitter
from nodeagent.model.node import Incarnation, NodeFacts, NodeRecord
from nodeagent.model.pod import PodState, WorkerState
from nodeagent.model.queue import NO_QUEUES, Queues
from nodeagent.model.timing import Timing, millis
from nodeagent.model.usage import UsageDay
from nodeagent.model.window import NO_WINDOWS
from nodeagent.model.world import Ack, Cause, Member, Place, PodReport
from nodeagent.plan.cluster import Cluster, Refusal
from nodeagent.plan.job.running import settle_scale
from nodeagent.plan.job.waiting import explain
from nodeagent.plan.nodes.availability import closed, closing
from nodeagent.plan.queueing.queue import in_queue
from nodeagent.plan.steps import Settle
from nodeagent.pods.base import PodStatus
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.store.base import StoreRefusedError, StoreUnavailableError
from nodeagent.store.messages import Beat, Ending, Proposal, Settlement
from nodeagent.trust.key import ClusterKey
from nodeagent.trust.seal import Seal
from tests.inprocess.lease import renew_lease
from tests.inprocess.server import HereStore, Server
from tests.submitting import submit_one

T = TypeVar("T")
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
BOUND = 60.0
"""Seconds that a test waits for anything."""


def spec(name: str = "digits", low: int = 1, high: int = 3, target: int = 2, **more: Any) -> JobSpec:
    submitter = Submitter(user="alice", uid=1000, gid=1000, host="n1", cwd="/tmp")
    role = Role(command=("python", "train.py"), nodes=Nodes(min=low, max=high, target=target), workers_per_node=2)
    values: dict[str, Any] = {"working_dir": "/tmp", "user": "alice", "submitter": submitter} | more
    return JobSpec(name=name, roles=(role,), **values)


def spec_of_roles(name: str = "ctr") -> JobSpec:
    """Two servers, and two trainers that complete the job."""
    server = Role(
        name="server",
        command=("serve",),
        replicas=Nodes(min=2, max=2, target=2),
        nodes=Nodes(min=1, max=2, target=2),
        workers_per_node=1,
    )
    one = spec(name)
    trainer = one.role.model_copy(update={"name": "trainer", "nodes": Nodes(min=2, max=2, target=2)})
    return one.model_copy(update={"roles": (server, trainer), "completes": "trainer"})


def asked(*specs: JobSpec) -> dict[str, Any]:
    """The body of a request that submits these jobs, all of the first one's submitter; without a request id."""
    jobs = [{"spec": one.model_dump(mode="json", exclude={"submitter"})} for one in specs]
    return {"jobs": jobs, "submitter": specs[0].submitter.model_dump(mode="json")}


class FlakyStore(HereStore):
    """Does not answer while ``away``."""

    away = False
    error = StoreUnavailableError("no answer")

    def __getattribute__(self, name: str) -> Any:
        if (
            name in ("submit", "control", "cordon", "queues", "windows", "events", "pods", "beat", "request", "forget")
            and self.away
        ):

            async def gone(*_args: Any, **_more: Any) -> Any:
                raise self.error

            return gone
        return super().__getattribute__(name)


class FakeView:
    """Node n1 of a cluster of ``names``, all in this process."""

    def __init__(self, folder: Path, names: tuple[str, ...] = ("n1", "n2", "n3"), **jobs: Any) -> None:
        self.near = {"n1": str(folder / "run" / "api.sock"), "n2": str(folder / "run2" / "api.sock")}
        self.config = AgentConfig.model_validate(
            {
                "dirs": {"run": folder / "run", "state": folder / "state", "logs": folder / "logs"},
                "ports": {"api": 0},
                "api": {"listen": "off"},
                "jobs": jobs,
            }
        )
        self.key = ClusterKey(bytes(32))
        self.seal = Seal(self.key, "default")
        self.node = "n1"
        self.node_health: NodeHealth | None = None
        self.diagnosis: Diagnosis | None = None
        self.names = names
        self.server = Server(time.time)
        self.store = FlakyStore(self.server)
        self.lives = {name: Incarnation(life=f"life-{name}", start=1) for name in names}
        self.silent: set[str] = set()
        self.reasons: tuple[str, ...] = ()
        self.distrusted: dict[str, Refusal] = {}
        """What the agent does not run, by uid."""
        self.own_pods: dict[str, PodStatus] = {}
        self.shown: dict[str, JobRecord] = {}
        self.gangs: dict[str, dict[str, PodState]] = {}
        self.failsafe_members: tuple[str, ...] = ()
        """Of the generations that are formed from now on."""
        self.joined = True
        self.away_since: float | None = None
        self.lent: dict[str, float] = {}
        self.not_lent: dict[str, str] = {}
        self.store_waits = ""
        self.unreachable: dict[str, dict[str, float]] = {}
        self.disks: tuple[str, ...] = ("n1", "n2")
        """Nodes on whose disks everything is."""
        self.unlike: dict[str, dict[str, Any]] = {}
        """Facts of a node that a test wants otherwise, from its next join on."""
        self.trusted: Queues | None = None
        """The newest queues that were signed, where the store has others."""
        self._seq = self._rev = 0
        self._cluster = Cluster(served=0)
        self.usage: dict[str, UsageDay] = {}
        """Of jobs that are gone, beside what the store has."""

    def facts(self, name: str) -> NodeFacts:
        near = name in self.near
        facts = NodeFacts(
            address="10.0.0." + name[1:],
            hostname=name,
            boot_id=BOOT if near else f"boot-{name}",
            agent_pid=4000 + int(name[1:]),
            agent_version="0.1.0",
            started=time.time() - 100,
            cpu_slots=4,
            api_socket=self.near.get(name, ""),
            http="http://127.0.0.1:9470",
        )
        return facts.model_copy(update=self.unlike.get(name, {}))

    async def join(self) -> None:
        for name in self.names:
            await self.store.join(name, self.lives[name], self.facts(name), Timing())
        await self.refresh()

    @property
    def era(self) -> str:
        return self.server.state.era

    @property
    def rev(self) -> int:
        return self._rev

    async def acknowledged(self, rev: int, era: str) -> Acknowledged:
        assert rev > 0
        assert era == self.era
        return Acknowledged(nodes=self.disks, wanted=2, waited=0.0)

    async def refresh(self) -> None:
        """All nodes but the silent ones renew and beat; the snapshot is what the last reply says."""
        jobs: dict[str, JobRecord] = {}
        nodes: dict[str, NodeRecord] = {}
        usage: dict[str, UsageDay] = {}
        self._seq += 1
        for name in reversed([n for n in self.names if n not in self.silent]):
            with suppress(StoreRefusedError):  # the beat says why
                await renew_lease(self.store._calls, name, self.lives[name].life, self.era, millis(Timing().lease))
            pods = tuple(states[name] for states in self.gangs.values() if name in states)
            reply = await self.store.beat(
                Beat(
                    node=name, incarnation=self.lives[name], seq=self._seq, rev=0,
                    readiness={}, pods=pods,
                )
            )  # fmt: skip
        jobs |= {j.uid: j for j in reply.jobs}
        nodes |= {n.id: n for n in reply.nodes}
        usage |= {str(day.day): day for day in reply.usage}
        while reply.more:
            self._seq += 1
            more = Beat(node=name, incarnation=self.lives[name], seq=self._seq, rev=reply.rev)
            reply = await self.store.beat(more)
            jobs |= {j.uid: j for j in reply.jobs}
            nodes |= {n.id: n for n in reply.nodes}
            usage |= {str(day.day): day for day in reply.usage}
        self._rev = reply.rev
        tree = NO_QUEUES if reply.queues is None else reply.queues.tree
        windows = NO_WINDOWS if reply.windows is None else reply.windows.windows
        now = closing(self._cluster.notes, windows, nodes, jobs.values(), reply.served)
        self._cluster = Cluster(
            served=reply.served, nodes=closed(self._cluster.notes, nodes, now.nodes), jobs=jobs,
            usage=usage | self.usage, lapsed=frozenset(reply.lapsed),
            refused=self.distrusted, queues=tree, queues_rev=tree.rev,
            windows=windows, windows_rev=windows.rev, windows_until=now.until,
        )  # fmt: skip

    def cluster(self) -> Cluster:
        found = self._cluster if self.trusted is None else replace(self._cluster, queues=self.trusted)
        return replace(found, jobs={**self._cluster.jobs, **self.shown}) if self.shown else found

    def show(self, job: JobRecord) -> None:
        """From now on a job looks so, whatever the store has."""
        self.shown[job.uid] = job

    def me(self) -> NodeRecord | None:
        return self._cluster.nodes.get(self.node)

    def why(self, uid: str) -> tuple[str, ...]:
        return self.reasons if uid in self._cluster.jobs else ()

    def explain(self, uid: str) -> tuple[str, ...]:
        job = self._cluster.jobs.get(uid)
        return self.reasons or (explain(self._cluster, job, 0.0) if job is not None and in_queue(job) else ())

    def pods(self) -> Mapping[str, PodStatus]:
        return self.own_pods

    def health(self) -> AgentHealth:
        return AgentHealth(
            joined=self.joined, reason="" if self.joined else self.reason,
            lease_left=self.lease_left, beat_age=0.1, store_away_since=self.away_since, loop_lag=0.001,
            lent=self.lent, not_lent=self.not_lent, store_waits=self.store_waits,
            unreachable=self.unreachable,
        )  # fmt: skip

    lease_left = 2.0
    reason = "the id n1 is taken by 10.0.0.9"
    """Why it has not joined, where it has not."""

    # --- what agents would do ---

    def job(self, name: str) -> JobRecord:
        return next(j for j in self._cluster.jobs.values() if j.name == name)

    def _free(self, job: JobRecord) -> list[str]:
        able = [n for n in self.names if self._cluster.live(n) and self._cluster.nodes[n].cordon is None]
        return sorted(able, key=lambda n: n in job.control.leaving)

    async def form(
        self, job: JobRecord, count: int, cause: Cause | None = None, spend: BudgetEntry | None = None
    ) -> None:
        """A new generation on the first ``count`` nodes, active at once. Of a job of several roles each node has
        a place with one worker of the first and of the second."""
        chosen = self._free(job)[:count]
        slots = ("cpu0", "cpu1") if job.order % 2 else ("cpu2", "cpu3")
        roles = tuple(zip(job.spec.roles, slots, strict=False)) if job.spec.several else ()
        members = {
            n: Member(
                node=n, life=self.lives[n].life, group_rank=i, first_rank=2 * i, workers=2, devices=slots,
                places=tuple(Place(role=role.name, index=i, workers=1, devices=(slot,)) for role, slot in roles),
            )
            for i, n in enumerate(chosen)
        }  # fmt: skip
        generation = job.generation
        after = await self.store.propose(
            Proposal(
                uid=job.uid, expect=generation.token if generation else None,
                expect_state=generation.state if generation else "",
                control_rev=job.control.rev, id=f"g{time.monotonic_ns()}", members=members,
                cause=cause or Cause(kind="start", text="first start"), spend=spend, form_ms=5000, by="n1",
                failsafe_members={n: self.lives[n].life for n in self.failsafe_members},
            )
        )  # fmt: skip
        assert after.generation is not None
        number, token = after.generation.number, after.generation.token
        self.gangs[job.uid] = {
            n: PodState(
                uid=job.uid, job=job.name, role="worker", node=n, phase="running", generation=number, shim_pid=500 + i,
                workers=tuple(
                    WorkerState(rank=2 * i + k, local_rank=k, pid=600 + 2 * i + k, state="running") for k in range(2)
                ),
            )
            for i, n in enumerate(chosen)
        }  # fmt: skip
        for name in dict.fromkeys([*chosen, *after.generation.holders]):
            ack = Ack(life=self.lives[name].life, address="10.0.0.1:29400" if name == chosen[0] else "")
            await self.store.ack(job.uid, token, name, self.lives[name], ack, None)

    async def end(self, job: JobRecord, phase: Phase, reason: str, **more: Any) -> None:
        generation = job.generation
        after = await self.store.end(
            Ending(
                uid=job.uid, expect=generation.token if generation else None,
                expect_state=generation.state if generation else "",
                control_rev=job.control.rev, phase=phase, reason=reason, wall=time.time(), by="n1", **more,
            )
        )  # fmt: skip
        self.gangs.pop(job.uid, None)
        if after.generation is not None:
            for name in list(after.generation.holders):
                ack = Ack(life=self.lives[name].life, ended=True)
                await self.store.ack(job.uid, after.generation.token, name, self.lives[name], ack, None)

    async def succeed(self, job: JobRecord) -> None:
        """Every worker exited 0."""
        assert job.generation is not None
        for member in job.generation.ordered():
            report = PodReport(state="succeeded")
            await self.store.report(job.uid, job.generation.token, member.node, self.lives[member.node], report)
        await self.end(job, "succeeded", "every worker exited 0", outcome=Outcome(code=0, text="every worker exited 0"))

    async def obey(self) -> None:
        """One round of what agents do about what operators want. A refusal because something has changed since they
        looked is an agent's daily bread (this process may have stood still for longer than a lease): they look again.
        """
        await self.refresh()
        for job in list(self._cluster.jobs.values()):
            try:
                await self._obey(job)
            except StoreRefusedError as refused:
                if refused.code not in ("stale", "not_live"):
                    raise
        await self.refresh()

    async def settle(self, job: JobRecord) -> bool:
        """End a pending scale, if its time has come."""
        decision = settle_scale(self._cluster, job)
        if decision is None or not isinstance(decision.step, Settle):
            return False
        generation, step = job.generation, decision.step
        await self.store.settle(
            Settlement(
                uid=job.uid, expect=generation.token if generation else None,
                expect_state=generation.state if generation else "",
                control_rev=job.control.rev, control=step.control, event=step.event, text=step.text, by="n1",
            )
        )  # fmt: skip
        return True

    async def _obey(self, job: JobRecord) -> None:
        if job.phase not in TERMINAL and await self.settle(job):
            return
        request, generation = job.control, job.generation
        if job.phase in TERMINAL:
            if request.delete:
                await self.store.remove(job.uid, job.control.by)
        elif request.desired == "stop":
            await self.end(job, "stopped", f"stopped by {request.by}", outcome=Outcome(code=143, text="stopped"))
        elif request.desired == "pause":
            if job.phase not in ("pausing", "paused"):
                await self.end(job, "pausing", f"paused by {request.by}")
        else:
            free = self._free(job)
            growing = request.growing
            wanted = request.target if growing is None or growing.want <= len(free) else growing.before
            count = min(wanted, len(free))
            now = set(generation.members) if generation and generation.state == "active" else set()
            if count >= job.spec.nodes.min and (
                now != set(free[:count]) or request.restart > job.restart_done or not now
            ):
                kind = "start" if generation is None else "scale"
                await self.form(job, count, Cause(kind=kind, text=f"{count} of {request.target} nodes"))


class PeerView(FakeView):
    """Node n2, on the same machine: sees what n1 sees, has files of its own."""

    def __init__(self, folder: Path, first: FakeView) -> None:
        super().__init__(folder)
        self._first = first
        self.config = AgentConfig.model_validate(
            {
                "dirs": {"run": folder / "run2", "state": folder / "state2", "logs": folder / "logs2"},
                "ports": {"api": 0},
            }
        )
        self.node, self.store = "n2", first.store

    def cluster(self) -> Cluster:
        return self._first.cluster()

    def me(self) -> NodeRecord | None:
        return self.cluster().nodes.get(self.node)


class LiveAgent:
    """A ``FakeView`` served on a real unix socket by an event loop in a thread of its own."""

    def __init__(self, view: FakeView, obeys: bool) -> None:
        self.view = view
        self.obeys = obeys
        self.loop = asyncio.new_event_loop()
        self.server: ApiServer | None = None
        self._ready = threading.Event()
        self._stop = asyncio.Event()

    @property
    def socket(self) -> str:
        return str(self.view.config.dirs.run / "api.sock")

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:  # as in an agent: nothing outlives its loop
            runner.run(self._main())

    async def _main(self) -> None:
        await self.view.join()
        async with ApiServer(self.view, MetricsPage(Metrics())) as self.server:
            self._ready.set()
            while not self._stop.is_set():
                if not self.view.store.away:
                    with suppress(StoreUnavailableError):  # the test's thread took it away meanwhile
                        await (self.view.obey() if self.obeys else self.view.refresh())
                await asyncio.sleep(0.02)

    def wait_ready(self) -> None:
        assert self._ready.wait(BOUND), "the fake agent did not start"

    def do(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run in the agent's loop."""
        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(BOUND)

    def submit(self, job: JobSpec, owner: int = 1000) -> JobRecord:
        async def work() -> JobRecord:
            record = await submit_one(
                self.view.store, f"uid-{job.name}", job, owner, time.time(), "alice", f"r-{job.name}"
            )
            await self.view.refresh()
            return record

        return self.do(work)

    def until(self, so: Callable[[], bool], limit: float = BOUND) -> None:
        end = time.monotonic() + limit
        while not so():
            assert time.monotonic() < end, "it did not become so"
            time.sleep(0.01)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)


@contextmanager
def live_agent(folder: Path, *, obeys: bool = True, **jobs: Any) -> Iterator[LiveAgent]:
    agent = LiveAgent(FakeView(folder, **jobs), obeys)
    thread = threading.Thread(target=agent.run, daemon=True)
    thread.start()
    try:
        agent.wait_ready()
        yield agent
    finally:
        agent.stop()
        thread.join(BOUND)
        assert not thread.is_alive(), "the fake agent did not stop"
