"""A simulated cluster: production agents on fake machines, clocks, links and the in-memory store; faults by name."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nodeagent.agent import systemd
from nodeagent.agent.context import AgentContext
from nodeagent.agent.identity import Identity
from nodeagent.agent.loop import Agent, OnDisk, OwnMachine, Trust
from nodeagent.agent.metrics import Metrics
from nodeagent.api.errors import ApiError
from nodeagent.api.intents import Verb, read_scale
from nodeagent.api.intents import scale as choose_size
from nodeagent.model.health import Verdict
from nodeagent.model.job import Control, JobRecord, Quota
from nodeagent.model.node import Cordon, NodeFacts
from nodeagent.model.timing import Timing
from nodeagent.model.world import Token
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.store.base import StoreRefusedError, StoreUnavailableError
from nodeagent.trust.key import ClusterKey
from nodeagent.trust.seal import Seal
from tests.folders import in_memory
from tests.inprocess.data import Value
from tests.inprocess.server import HereStore, Server
from tests.sim.disk import SimDisk
from tests.sim.host import SimHost
from tests.sim.invariants import Broken, Checker
from tests.sim.lease import SimLease, SimLeaseProcess
from tests.sim.machine import SimMachine
from tests.sim.network import Gate, Link, LinkedStore, PeerNet, SimPeers, StoreThread
from tests.sim.parts import LoudUndecided, SimLedger, WatchedServer, sim_spec
from tests.sim.sharing import Shared, SharedSeal, SharedSnapshot, SharedWriting
from tests.sim.virtual import EPOCH, SimClock
from tests.submitting import first_control, submit_one

TIMING = Timing(cooldown=8.0)
KEY = ClusterKey(bytes(32))
SEAL = Seal(KEY, "default")
RECOVERED = 180
"""Seconds of virtual time in which a store recovers that is disturbed anew for a minute, by faults of 45 s at most:
once they are over it waits for a lease and ``saving.regroup`` (60 s)."""

if TYPE_CHECKING:
    from tests.sim.repairs import Repairs


class Node:
    """One machine and the agent process on it, if any."""

    def __init__(self, cluster: SimCluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.configured = name
        """The node's name by its agent's config."""
        self.server = cluster.server
        """The store by its agent's config, from the agent's next start on."""
        rng = random.Random(cluster.rng.random())
        self.clock = SimClock(rate=1 + rng.uniform(-0.01, 0.01), boot=rng.uniform(0, 1e6))
        self.machine = SimMachine(name, self.clock, rng, cluster.observe)
        self.machine.peers = cluster.peers_lost
        self.link = Link(rng, TIMING.store_timeout, cluster.frozen, cluster.thread)
        self.gate = Gate()
        self.boots = 0
        self.run_dir = cluster.folder / name
        self.agent: Agent | None = None
        self.ledger = SimLedger()
        self.disk = SimDisk(name)
        self.sick: tuple[Verdict, ...] = ()
        """What its health monitor would say."""
        self.repairs: Repairs | None = None
        """Looks after its health in the place of that."""
        self.lease = SimLease(
            self.machine, self.clock, self.link, cluster.net, cluster.timing, AgentConfig().without_agent,
        )  # fmt: skip
        self._host: SimHost | None = None
        self._identity: Identity | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    def start_agent(self) -> None:
        """Beside another agent it does nothing."""
        if self._task is not None or not self.machine.powered:
            return
        self.lease.start()
        self.gate = Gate()
        self._identity = Identity(self.run_dir, f"boot-{self.boots}", self.configured, self.name)
        facts = NodeFacts(
            address=self.name, hostname=self.name, boot_id=f"boot-{self.boots}", agent_pid=1, agent_version="sim",
            started=0.0, cpu_slots=self.cluster.slots, peer=f"{self.name}:1", health=self.sick,
            labels=self.cluster.labels.get(self.name, {}), topology=self.cluster.topology,
        )  # fmt: skip
        if self.repairs is not None:
            health, repair_state = self.repairs.begin()
            facts = facts.model_copy(update={"health": health, "repair_state": repair_state})
        self._process = SimLeaseProcess(self.lease, self.gate, self.configured, self.server)
        self._host = SimHost(self.machine, self.gate, self._process.wake)
        self._peers = SimPeers(self.name, self.cluster.net, self.gate)
        store, shared = (
            LinkedStore(HereStore(self.server), self.link, self.gate).as_store(),
            self.cluster.shared,
        )
        config = AgentConfig(timing=self.cluster.timing)
        self._identity.take()
        parts = AgentContext(
            self.configured, config.timing, store, self._host, self.clock, process=self._process, metrics=Metrics(),
            undecided=LoudUndecided(self.configured, Metrics().left_undecided),
            random_id=lambda: f"{self.cluster.rng.getrandbits(48):012x}",
            snapshot=SharedSnapshot(config.timing, shared),
        )  # fmt: skip
        trust = Trust(KEY, SharedSeal(KEY, config.cluster, shared), SharedWriting(KEY, config.cluster, shared))
        disk = OnDisk(self.disk, self.ledger, None)
        self.agent = Agent(
            config, parts, self._identity, facts, trust=trust, disk=disk, peers=self._peers, machine=OwnMachine()
        )
        self._task = self.cluster.tasks.create_task(self.agent.run(asyncio.Event()), name=f"agent {self.name}")
        if self.repairs is not None:
            self.repairs.run(self.agent)

    def find(self, *verdicts: Verdict) -> None:
        """The health monitor finds these, and nothing else any more; told with the next beat."""
        self.sick = verdicts
        if self.agent is not None:
            self.agent.advert.health({"health": verdicts})

    def end_agent(self) -> None:
        """SIGTERM, with another start to come."""
        if self.agent is not None and self._ending is None:
            ending = self._end_as_planned(self.agent)
            self._ending = self.cluster.tasks.create_task(ending, name=f"planned end {self.name}")

    async def ended(self) -> None:
        """Returns when an end that was begun is over: nothing can be started before."""
        if self._ending is not None:
            await asyncio.wait([self._ending])

    async def _end_as_planned(self, agent: Agent) -> None:
        await systemd.restart(agent, self.clock)
        self._ending = None
        await self.kill_agent()

    async def kill_agent(self) -> None:
        """SIGKILL."""
        if (task := self._drop_agent()) is not None:
            await asyncio.wait([task])

    def _drop_agent(self) -> asyncio.Task[None] | None:
        """From now on it does nothing any more."""
        task, self._task = self._task, None
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        if task is None or self._identity is None or self._host is None:
            return None
        self._host.dead = self._process.dead = True
        if self.repairs is not None:
            self.repairs.stop()
        task.cancel()
        self._identity.release()
        self.agent = None
        return task

    async def power_cut(self, disk_lost: bool = False) -> None:
        self.machine.cut_power()
        self.lease.cut_power()
        await self.kill_agent()
        self.boots += 1
        if disk_lost:
            self.machine.promised.clear()
            self.disk = SimDisk(self.name)
            self.ledger = SimLedger()
            (self.run_dir / "life.json").unlink(missing_ok=True)

    def power_on(self) -> None:
        if not self.machine.powered:
            self.machine.power_on()
        self.start_agent()

    def freeze_agent(self) -> None:
        self.gate.close()

    def has_read(self, uid: str, number: int) -> bool:
        """Its agent is there, and knows of this generation of the job, or of a later one."""
        job = self.agent.cluster().jobs.get(uid) if self.agent is not None and not self.gate.closed else None
        return job is not None and job.generation is not None and job.generation.number >= number

    def freeze_machine(self) -> None:
        self.gate.close()
        self.lease.gate.close()
        self.machine.freeze()

    def thaw(self) -> None:
        self.machine.thaw()
        self.lease.gate.open()
        self.gate.open()
        if self._host is not None:
            self._host.thaw()


class SimCluster:
    """Everything of one run, reproducible from its seed."""

    def __init__(
        self, seed: int, size: int, tasks: asyncio.TaskGroup, slots: int = 4, timing: Timing | None = None
    ) -> None:
        self.timing = timing or TIMING
        self.rng = random.Random(seed)
        self.tasks, self.slots = tasks, slots
        self.net = PeerNet(random.Random(self.rng.random()))
        loop = asyncio.get_running_loop()
        self.clock_step = 0.0
        self.frozen = Gate()
        """Closed while the store is stopped (SIGSTOP)."""
        self.thread = StoreThread()
        self._stirred = asyncio.Event()
        self.server: Server = WatchedServer(lambda: EPOCH + loop.time() + self.clock_step, self.stepped)
        self._temporary = tempfile.TemporaryDirectory(prefix="na-sim-", dir=in_memory())
        self.folder = Path(self._temporary.name)
        self.nodes: dict[str, Node] = {}
        self.labels: dict[str, dict[str, str]] = {}
        """Of nodes, as their agents tell them when they start."""
        self.topology: tuple[str, ...] = ()
        self.shared = Shared()
        self.checker = Checker(self.server, {})
        self._requests = self._removed = 0
        self.damaged, self._era = False, ""
        """Keys were removed by hand, in whatever era."""
        for i in range(size):
            self.add(f"n{i + 1}")

    def add(self, name: str) -> Node:
        node = self.nodes[name] = Node(self, name)
        self.checker.machines = {n.name: n.machine for n in self.nodes.values()}
        return node

    def observe(self, machine: str) -> None:
        self._stirred.set()
        self.checker.machine(machine)

    def stepped(self) -> None:
        """A server has done a step."""
        self._stirred.set()
        if self.damaged and self._era != (era := self.server.state.era):
            self._era = era
            self.checker.disbelieved.clear()
            self.checker.store_loses()  # damage has been noticed, or more of it has
        self.checker.records()

    async def empty_store(self) -> None:
        """The store loses everything, and with it every job that no agent knows of until it is given back."""
        lost = set(self.server.state.jobs)
        witnesses = {n.agent: n for n in self.nodes.values() if n.agent and lost <= set(n.agent.cluster().jobs)}
        self.checker.store_loses()
        self.server.restart(keep_data=False)
        while missing := lost - set(self.server.state.jobs) - self.checker.forgotten:
            if not any(node.agent is agent for agent, node in witnesses.items()):
                self.checker.forgotten |= missing
            await asyncio.sleep(0.01)

    async def damage_store(self, values: Mapping[str, Value | None]) -> dict[str, int]:
        """Somebody writes these over what keys held (None: removes the key) by hand; the numbers of the generations
        that the store had then, by uid. Nothing is done where no agent knows of the job: it would be gone."""
        before = self.server.state.jobs
        lost = {key.removeprefix("job:") for key in values if key.startswith("job:")}
        numbers = {uid: job.generation.number for uid, job in before.items() if job.generation is not None}
        if not any(n.agent and lost <= set(n.agent.cluster().jobs) for n in self.nodes.values()):
            return {}
        self.checker.store_loses()
        self.damaged, self._era = True, self.server.state.era
        for key, value in values.items():
            if value is None and self.server.value(key) is not None:
                self.server.take(key)
            if value is not None:
                self.server.overwrite(key, value)
                self.checker.disbelieved.add(key.removeprefix("job:"))
        return numbers

    async def roll_back_store(self, seconds: float, same_process: bool = False) -> dict[str, int]:
        """The store as it is now is put back so many seconds later (``same_process``: by a fail-over there and back);
        the numbers of the generations that it had then, by uid."""
        kept = self.server.kept()
        await asyncio.sleep(seconds)
        self.checker.store_loses()
        numbers = {
            uid: job.generation.number for uid, job in self.server.state.jobs.items() if job.generation is not None
        }
        (self.server.fail_back if same_process else self.server.put_back)(kept)
        return numbers

    def settled(self) -> bool:
        """The store has recovered from its last start."""
        state = self.server.state
        return state.run == self.server.run_id and not state.recovering

    def peers_lost(self, uid: str, token: Token, name: str) -> None:
        for node in self.nodes.values():
            if node.name != name:
                node.machine.lose_peers(uid, token)

    async def submit(
        self, name: str, minimum: int, maximum: int, target: int, *, admitted: float = 0.0, quota: Quota | None = None,
        owner: int = 0, **spec: object,
    ) -> JobRecord:  # fmt: skip
        """Through an agent, ``admitted`` seconds ago. Each call is a request of its own. ``quota``: the user's, who is
        an operator without one."""
        self._requests += 1
        job = sim_spec(name, minimum, maximum, target, **spec)
        uid, now = f"uid-{name}", SimClock().wall() - admitted
        done = await submit_one(
            HereStore(self.server), uid, job, owner, 0.0, "test", f"submit-{name}-{self._requests}",
            control=SEAL.control(uid, first_control(job, "test")), quota=quota,
            admission=SEAL.admit(uid, owner, job, now, "n1"),
        )  # fmt: skip
        self.checker.submitted.add(done.uid)
        return done

    def find(self, name: str) -> JobRecord | None:
        return next((j for j in self.server.state.jobs.values() if j.name == name), None)

    def job(self, name: str) -> JobRecord:
        job = self.find(name)
        assert job is not None, f"{name} is not in the store\n{self.describe()}"
        return job

    async def patiently(self, step: Callable[[], Awaitable[object]], record: str = "") -> None:
        """A person's write: told to try again while the store recovers, one does. A ``record`` that cannot be read is
        removed by hand, as agents ask for: those who know it give it back, and one tries again once it is there. At
        the moment of the removal no step has met the gap yet, and the store does not recover: who looks right then
        takes the job for removed, and ``check_kept`` takes it for lost."""
        uid = record.removeprefix("job:")
        for _ in range(10):
            try:
                await step()
            except StoreRefusedError as refusal:
                if refusal.code == "version" and record:
                    await self.damage_store({record: None})
                    self._removed += 1
                    await self.until(
                        lambda: self.server.value(record) is not None or uid in self.checker.forgotten, RECOVERED,
                        f"{record}, which was removed by hand, is given back",
                    )  # fmt: skip
                elif refusal.code != "recovering":
                    raise
                await self.until(lambda: not self.server.state.recovering, RECOVERED, "the store has recovered")
            except StoreUnavailableError:  # a step met what was written over by hand; the store looks at itself by then
                await asyncio.sleep(1)
            else:
                return
        raise AssertionError("the store recovered again and again")

    def _record_of(self, name: str) -> str:
        job = self.find(name)
        return f"job:{job.uid}" if job is not None else ""

    async def operate(self, name: str, **changes: object) -> None:
        request = f"r{self.rng.getrandbits(48):x}"

        async def step() -> None:
            job = self.find(name)
            if job is None:
                return  # the store was emptied a moment ago
            more = {**changes, "by": "test", "rev": job.control.rev + 1}
            control = SEAL.control(job.uid, job.control.model_copy(update=more))
            await self._write(job, control, request, "JobChanged", "changed")

        await self.patiently(step, self._record_of(name))

    async def scale(self, name: str, verb: Verb, **body: object) -> bool:
        """What the API does with such a request; false if the job cannot have it."""
        request, taken = f"s{self.rng.getrandbits(48):x}", True
        asked = read_scale(verb, body, request)

        async def step() -> None:
            nonlocal taken
            job = self.find(name)
            if job is None:
                return  # the store was emptied a moment ago
            try:
                wanted = choose_size(asked, job, self.server.state.served)
            except ApiError:
                taken = False
                return
            more = {"by": "test", "rev": job.control.rev + 1}
            new = None
            if wanted is not None:
                new = SEAL.control(job.uid, Control(**(job.control.model_dump() | wanted.change | more)))
            done = asked.done(job, new or job.control)
            await self._write(job, new, request, "JobScaled", str(body), done.text)

        await self.patiently(step, self._record_of(name))
        return taken

    async def _write(
        self, job: JobRecord, new: Control | None, request: str, event: str, text: str, did: str = ""
    ) -> None:
        """As whoever did not get the reply does it: twice. The second time changes nothing. After a record was removed
        by hand it is another request: what the one before did may have gone with it, and the store knows its id."""
        store, request = HereStore(self.server), f"{request}-{self._removed}"
        done = await store.control(job.uid, job.control.rev, new, request, event, text, did)
        again = await store.control(job.uid, job.control.rev, new, request, event, text, did)
        assert again.control == done.control

    async def cordon(self, name: str, cordon: Cordon | None) -> None:
        request = f"c{self.rng.getrandbits(48):x}"

        async def step() -> None:
            if name in self.server.state.nodes:
                await HereStore(self.server).cordon(name, cordon, f"{request}-{self._removed}")

        await self.patiently(step, f"node:{name}")

    def whole(self, name: str) -> bool:
        """The job is active and all its members' workers, and only they, execute it."""
        job = self.find(name)
        if job is None or job.phase != "running" or job.generation is None:
            return False
        if self.checker.running(job.uid) != dict.fromkeys(job.generation.members, job.generation.token):
            return False
        return all(
            len(self.nodes[m.node].machine.pods[job.uid].alive) == m.workers for m in job.generation.members.values()
        )

    async def until(self, condition: object, limit: float, what: str) -> float:
        """Wait in virtual time; AssertionError after ``limit`` seconds. Returns the seconds it took.

        Looks when the store or a machine changed, and now and then in case it is something else that is awaited."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        assert callable(condition)
        while not condition():
            if loop.time() - start > limit:
                raise AssertionError(f"not within {limit} s of virtual time: {what}\n{self.describe()}")
            self._stirred.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await self._stirred.wait()
            self.checker.check(loop.time())
        return loop.time() - start

    def describe(self) -> str:
        lines = []
        for job in self.server.state.jobs.values():
            lines.append(f"job {job.name} {job.phase} ({job.reason}) control {job.control}")
            if job.generation is not None:
                lines.append(
                    f"  generation {job.generation.number} {job.generation.state} "
                    f"members {sorted(job.generation.members)} "
                    f"missing {sorted(job.generation.missing)} holders {sorted(job.generation.holders)} "
                    f"cause {job.generation.cause.text}"
                )
            lines += [f"  why ({n.name}): {n.agent.why(job.uid)}" for n in self.nodes.values() if n.agent is not None][
                :2
            ]
        for node in self.nodes.values():
            pods = {
                u: (p.phase, p.generation and p.generation.number, sorted(p.alive), p.exits)
                for u, p in node.machine.pods.items()
            }
            record = self.server.state.nodes.get(node.name)
            state = (record.lost, record.left, record.cordon) if record else None
            health = node.agent.health() if node.agent else None
            lines.append(f"node {node.name} powered {node.machine.powered} {state} {pods} {health}")
        return "\n".join(lines)

    async def close(self) -> None:
        """End everything; raises Broken if an invariant did not hold at some moment."""
        try:
            with contextlib.suppress(Broken):  # it is kept
                self.checker.sweep()
            for node in self.nodes.values():
                node.thaw()
                await node.kill_agent()
                node.machine.cut_power()
                node.lease.cut_power()
        finally:
            self._temporary.cleanup()
        if self.checker.first is not None:
            raise self.checker.first


@contextlib.asynccontextmanager
async def started(
    seed: int,
    size: int,
    slots: int = 4,
    timing: Timing | None = None,
    prepare: Callable[[SimCluster], None] | None = None,
) -> AsyncIterator[SimCluster]:
    """A cluster whose agents start; all of it ends with the block. ``prepare``: before they start. Raises an exception
    group of what went wrong."""
    async with asyncio.TaskGroup() as tasks:
        cluster = SimCluster(seed, size, tasks, slots, timing)
        try:
            if prepare is not None:
                prepare(cluster)
            for node in cluster.nodes.values():
                node.start_agent()
            yield cluster
        finally:
            await cluster.close()
