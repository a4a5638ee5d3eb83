"""One random schedule of teams: a tree of queues and more jobs than there is room for, a storm of faults, and then
everything is mended. Jobs have work to do and end when it is done.

Owns what a seed stands for and what must hold of queues while it runs; faults and mending are ``schedule.py``'s. The
same seed always gives the same schedule.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.jobspec import Role
from nodeagent.model.queue import MIN_RUNTIME, Amount, Queue, Queues, queue_of
from nodeagent.model.world import Cause, Token
from nodeagent.plan.cluster import Cluster, Notes
from nodeagent.plan.queueing.elastic import transfers
from nodeagent.plan.queueing.heldback import line
from nodeagent.plan.queueing.queue import in_queue
from nodeagent.store.base import StoreRefusedError
from tests.sim.cluster import RECOVERED, TIMING, SimCluster, started
from tests.sim.faults import FAULTS, Fault
from tests.sim.invariants import Broken
from tests.sim.parts import sim_spec
from tests.sim.schedule import WORKERS, heal, unscale
from tests.sim.test_shares import held, in_use, share, watch
from tests.sim.virtual import run_virtual

STORM = 15.0
"""Seconds of faults."""
START = 5
"""Seconds that a job may take to start of which nothing is said any more."""
BEHIND = 10.0
"""Seconds by which a view that something is decided on may be old."""
GRACE = MIN_RUNTIME + 2 * TIMING.lease + TIMING.form_margin + 15.0
"""Seconds, when nothing fails, within which a queue has what it is guaranteed: who has it may run for so long before it
is stopped, and has a grace to save in; then the next generation forms."""


@dataclass(frozen=True)
class Work:
    """A job of a team."""

    name: str
    queue: str
    low: int
    high: int
    seconds: int
    """How long it has to run, on however many nodes."""
    after: float
    """Seconds after the start at which it is submitted."""
    auto: bool = False
    priority: int = 0
    in_roles: bool = False
    """One node is of a role of its own, and all are needed."""


@dataclass(frozen=True)
class Teams:
    """What a seed's cluster is."""

    nodes: int
    queues: tuple[Queue, ...]
    jobs: tuple[Work, ...]
    pause: float
    """Mean seconds between two faults."""
    equals: bool = False
    """All want more gangs of so many nodes (``wide``), so that each is to have its part by weight."""
    wide: int = 1
    promised: bool = False
    """A queue with little weight is guaranteed more than its part, and another one has all of it when jobs come."""

    @property
    def endless(self) -> bool:
        """Its jobs run until it was seen that every queue has what it is to have."""
        return self.equals or self.promised


def drawn(seed: int) -> Teams:
    """One of four is of equals: in all queues single nodes are wanted, and more than there are. One of five others is
    of a guarantee that has to be taken back."""
    rng = random.Random(f"teams {seed}")
    nodes, pause = rng.randint(3, 5), rng.choice([1.0, 2.0, 4.0])
    if rng.random() < 0.25:
        queues = _under(rng, nodes, 2, *(Queue(name=name, weight=_weight(rng)) for name in "abc"[: rng.randint(2, 3)]))
        late = {
            queue.name: rng.choice([0.0, STORM * rng.random(), STORM + 5.0]) for queue in queues if queue.name != "p"
        }
        names = [name for name in late for _ in range(nodes + 3)]  # some fail at their first start
        jobs = tuple(Work(f"j{i}", name, 1, 1, 600, late[name]) for i, name in enumerate(names))
        return _wide(seed, Teams(nodes, queues, jobs, pause, equals=True))
    if rng.random() < 0.2:
        return _promised(rng, seed, nodes, pause)
    queues = _tree(rng, nodes)
    tree = Queues(queues=queues)
    leaves = [queue.name for queue in queues if queue.name not in tree.children]
    first, greedy, works = rng.choice(leaves), rng.random() < 0.6, []
    for i in range(rng.randint(4, 8)):
        queue = rng.choice([*leaves, first])
        caps = [one.capability.nodes for one in tree.path(queue) if one.capability.nodes is not None]
        low = rng.choice([1, 1, rng.randint(1, min([nodes, *caps]))])
        high = rng.choice([low, rng.randint(low, nodes)])
        early = queue == first if greedy else rng.random() < 0.5
        after = 0.0 if early else rng.uniform(5.0, STORM + 15.0)
        seconds = rng.choice([20, 80] if early else [5, 20])
        works.append(
            Work(f"j{i}", queue, low, high, seconds, after, auto=rng.random() < 0.3, priority=rng.choice([0, 0, 0, 5]))
        )
    return Teams(nodes, _patient(seed, queues), _in_roles(seed, works), pause)


def _patient(seed: int, queues: Sequence[Queue]) -> tuple[Queue, ...]:
    """One of three leaves its jobs alone for another time than the usual one."""
    rng = random.Random(f"teams {seed}: runtime")
    times = [rng.choice([None, None, None, None, 0.0, 20.0]) for _ in queues]
    return tuple(queue.model_copy(update={"min_runtime": at}) for queue, at in zip(queues, times, strict=True))


def _in_roles(seed: int, works: Sequence[Work]) -> tuple[Work, ...]:
    """Half of those that could have two roles."""
    rng = random.Random(f"teams {seed}: roles")
    able = [work.low == work.high > 1 and not work.auto and rng.random() < 1 / 2 for work in works]
    return tuple(replace(work, in_roles=roles) for work, roles in zip(works, able, strict=True))


def _wide(seed: int, equals: Teams) -> Teams:
    """A third wants gangs of two nodes, of which each queue's part is a whole number."""
    rng = random.Random(f"teams {seed}: wide")
    if rng.random() < 2 / 3:
        return equals
    leaves = [queue.name for queue in equals.queues if queue.name != "p"]
    weights = dict(zip(leaves, [1, 1, 1] if len(leaves) == 3 else rng.choice([(1, 1), (2, 1), (1, 2)]), strict=True))
    gangs = sum(weights.values())
    queues = [queue.model_copy(update={"weight": float(weights.get(queue.name, 1))}) for queue in equals.queues]
    if queues[0].name == "p":
        queues[0] = queues[0].model_copy(update={"capability": Amount(nodes=2 * gangs)})
    late = {work.queue: work.after for work in equals.jobs}
    names = [name for name in leaves for _ in range(gangs + 2)]
    jobs = [Work(f"j{i}", name, 2, 2, 600, late[name]) for i, name in enumerate(names)]
    return replace(equals, nodes=2 * gangs, queues=tuple(queues), jobs=_in_roles(seed, jobs), wide=2)


def _promised(rng: random.Random, seed: int, nodes: int, pause: float) -> Teams:
    """A queue has all nodes, and then jobs come of one that is guaranteed half of them or more."""
    owned, late = rng.randint((nodes + 1) // 2, nodes - 1), rng.choice([STORM * rng.random(), STORM + 5.0])
    b = Queue(name="b", weight=0.5, guarantee=Amount(nodes=owned))
    queues = _under(rng, nodes, owned, Queue(name="a", weight=4.0), b)
    low = rng.randint(1, 2)
    greedy = [Work(f"j{i}", "a", low, rng.randint(low, nodes), 600, 0.0) for i in range(nodes)]
    theirs = [Work(f"j{i}", "b", 1, 1, 600, late) for i in range(nodes, nodes + owned)]
    if rng.random() < 0.3:
        theirs = [Work(f"j{nodes}", "b", owned, owned, 600, late)]
    promised = Teams(nodes, queues, _in_roles(seed, [*greedy, *theirs]), pause, promised=True)
    return _beside_kept(promised) if random.Random(f"teams {seed}: kept").random() < 0.4 else promised


def _beside_kept(promised: Teams) -> Teams:
    """A third queue has one node more, and keeps it."""
    kept = Queue(name="c", reclaimable=False)
    work = Work(f"j{len(promised.jobs)}", "c", 1, 1, 600, 0.0)
    return replace(
        promised, nodes=promised.nodes + 1, queues=(*promised.queues, kept), jobs=(*promised.jobs, work)
    )  # fmt: skip


def _under(rng: random.Random, nodes: int, least: int, *queues: Queue) -> tuple[Queue, ...]:
    """Sometimes these are below another, and may not have all nodes together, but so many at least."""
    if rng.random() < 0.6:
        return queues
    above = Queue(name="p", capability=Amount(nodes=rng.randint(least, nodes)))
    return above, *(queue.model_copy(update={"parent": "p"}) for queue in queues)


def _tree(rng: random.Random, nodes: int) -> tuple[Queue, ...]:
    """Two to four queues with jobs, some below another. Guarantees are of no more nodes than there are."""
    inner = rng.random() < 0.4
    left, queues = nodes, [Queue(name="p", weight=_weight(rng))] if inner else []
    for name in "abcd"[: rng.randint(2, 4)]:
        guarantee = rng.randint(0, left) if rng.random() < 0.4 else 0
        left -= guarantee
        cap = rng.randint(max(1, guarantee), nodes) if rng.random() < 0.3 else None
        queues.append(
            Queue(
                name=name, parent="p" if inner and name in "ab" else "", weight=_weight(rng),
                guarantee=Amount(nodes=guarantee or None), capability=Amount(nodes=cap),
                reclaimable=rng.random() > 0.1, priority=rng.choice([0, 0, 0, 1]),
            )
        )  # fmt: skip
    if inner and rng.random() < 0.5:
        below = sum(queue.guarantee.nodes or 0 for queue in queues if queue.parent == "p")
        queues[0] = queues[0].model_copy(update={"capability": Amount(nodes=rng.randint(max(1, below), nodes))})
    return tuple(queues)


def _weight(rng: random.Random) -> float:
    return rng.choice([0.5, 1.0, 1.0, 2.0, 3.0])


def _roles(work: Work) -> tuple[Role, ...]:
    """All places are as wide as a node."""
    parts = {"x": 1, "y": work.low - 1}
    role = sim_spec(work.name, 1, 1, 1).role
    return tuple(role.of_places(count).model_copy(update={"name": name}) for name, count in parts.items())


@dataclass
class Seen:
    """What a schedule came to."""

    checks: int = 0
    made_room: int = 0
    """Jobs that were stopped for another queue's."""
    came_back: int = 0
    """How often borrowed nodes came back for another queue's job."""
    fair: bool = False
    """That equals had their parts was seen, or that a queue had what it is guaranteed."""
    alike: int = 0
    """Times that two agents were found to decide alike."""
    resumed: int = 0
    """Workers that were seen to go on from a checkpoint."""
    ended: Counter[str] = field(default_factory=Counter)


class Returns:
    """After each step of the store: what jobs have borrowed comes back for other queues only from one that is
    ``reclaimable``, and of what it has above its guarantee."""

    def __init__(self, cluster: SimCluster, tree: Queues) -> None:
        self._cluster, self._tree = cluster, tree
        self.seen = 0
        """How often nodes came back for another queue."""
        self._generations: dict[str, int] = {}
        self._uses: dict[str, list[tuple[float, int]]] = {}
        """Queue to the slots that it had, each until when."""
        look = cluster.checker.records

        def records() -> None:
            look()
            cluster.checker._keeping(self._check)

        cluster.checker.records = records  # type: ignore[method-assign]

    def _check(self) -> None:
        now = asyncio.get_running_loop().time()
        for job in self._cluster.server.state.jobs.values():
            generation = job.generation
            if generation is not None and self._generations.get(job.uid, 0) < generation.number:
                self._generations[job.uid] = generation.number
                if generation.cause.kind == "share" and " given back: " in generation.cause.text:
                    self._look(job, generation.cause, now)
        for name, use in in_use(self._cluster).items():
            uses = [(until, had) for until, had in self._uses.get(name, ()) if now - until < BEHIND and had != use]
            self._uses[name] = [*uses, (now, use)]

    def _about_to_have(self, queue: str) -> int:
        """Slots of idle nodes that the queue's waiting jobs start on: in one decision these are its own already."""
        state = self._cluster.server.state
        taken = {node for job in state.jobs.values() if job.generation is not None for node in job.generation.holders}
        waits = [job.spec for job in state.jobs.values() if job.phase == "queued" and job.control.desired == "run"]
        needs = sum(spec.nodes.min for spec in waits if queue in [one.name for one in self._tree.path(spec.queue)])
        return min(len(state.nodes.keys() - taken), needs) * WORKERS

    def _look(self, job: JobRecord, cause: Cause, now: float) -> None:
        jobs = self._cluster.server.state.jobs
        others = [queue_of(jobs[uid].spec.queue) for uid in cause.room_for if uid in jobs]
        nodes = cause.text.partition(" given back")[0].count(",") + 1
        for queue in self._tree.path(job.spec.queue):
            apart = [name for name in others if queue not in [*self._tree.path(name)]]
            count = nodes if len(apart) == len(cause.room_for) else len(apart)
            if not apart:
                continue
            self.seen += 1
            most = max(use for until, use in self._uses[queue.name] if now - until < BEHIND)
            owned = self._tree.guaranteed(queue.name, "nodes")
            most += self._about_to_have(queue.name)
            if not queue.reclaimable or most - count * WORKERS < owned * WORKERS * bool(owned):
                raise Broken(
                    f"{job.name} of queue {queue.name}, guaranteed {owned} nodes of {most} slots: {cause.text}"
                )


class Play:
    """The jobs at work, and what is looked at meanwhile."""

    def __init__(self, cluster: SimCluster, teams: Teams) -> None:
        self.cluster, self.teams, self.seen = cluster, teams, Seen()
        self._tree = Queues(queues=teams.queues)
        self._least = {work.name: work.low for work in teams.jobs}
        self._over: set[str] = set()
        """Jobs that were seen to have ended when nothing failed any more: the store does not keep them for ever."""
        self._done: Counter[str] = Counter()
        """Seconds of work by job."""
        self._committed: dict[str, int] = {}
        """Job (uid) to its newest acknowledged step."""
        self._seen: dict[str, Token | None] = {}
        """Job (uid) to the newest generation that was seen to run."""
        self._fair = False
        """It was seen for long enough that all have their parts."""
        self._silent: Counter[str] = Counter()
        """Looks in a row in which nobody said why a job waits."""
        self._withheld: dict[str, float] = {}
        """Queues that lack what they are guaranteed, and since when."""
        watch(cluster)
        self._returns = Returns(cluster, self._tree)

    async def submit(self) -> None:
        """Each job at its moment; in the end once more those that a store which went back has lost: nobody waits here
        until a submit is on disks."""
        passed = 0.0
        for work in sorted(self.teams.jobs, key=lambda work: work.after):
            await asyncio.sleep(work.after - passed)
            passed = work.after
            await self._submit(work)
        await asyncio.sleep(max(0.0, STORM + 15.0 - passed))
        for work in self.teams.jobs:
            await self._submit(work)

    async def _submit(self, work: Work) -> None:
        def open_() -> bool:
            """An agent knows all jobs of this very store, and its queues: it refuses a job of an unknown one. A job
            that comes into an emptied store before those who know others makes it another cluster's: they come too late
            then."""
            agents = [node.agent for node in self.cluster.nodes.values() if node.agent is not None]
            known = {agent.era for agent in agents if agent.certain}
            state = self.cluster.server.state
            return self.cluster.settled() and state.era in known and state.queues is not None

        async def step() -> None:
            await self.cluster.until(open_, RECOVERED, "the store has read what agents know")
            if self.cluster.find(work.name) is None:
                more: dict[str, Any] = {"roles": _roles(work)} if work.in_roles else {}
                await self.cluster.submit(
                    work.name, work.low, work.high, work.low if work.auto else work.high,
                    auto=work.auto, queue=work.queue, priority=work.priority, **more,
                )  # fmt: skip

        await self.cluster.patiently(step)

    async def work(self) -> None:
        """Each job that runs whole gets on with its work, commits, and ends when it is done."""
        while True:
            await asyncio.sleep(1.0)
            for work in self.teams.jobs:
                job = self.cluster.find(work.name)
                if job is None or job.generation is None or not self.cluster.whole(work.name):
                    continue
                self._done[work.name] += 1
                if self._fair or (self._done[work.name] >= work.seconds and not self.teams.endless):
                    for node in job.generation.members:
                        machine = self.cluster.nodes[node].machine
                        for local in sorted(machine.pods[job.uid].alive):
                            machine.worker_ends(job.uid, local, code=0)
                elif self._done[work.name] % 5 == 0:
                    first = job.generation.ordered()[0].node
                    self.cluster.nodes[first].machine.commit_request(job.uid, self._done[work.name])

    def _room_made(self) -> int:
        """How often a job was stopped for one of another queue, none of which is on its account."""
        jobs = self.cluster.server.state.jobs.values()
        stops = [e for job in jobs for e in job.budget.values() if e.kind == "share" and "is entitled" in e.text]
        if any(stop.counts for stop in stops):
            raise Broken(f"a job paid for making room: {stops}")
        return len(stops)

    async def calm(self, limit: float) -> None:
        """Nothing fails any more: every job comes to its end, no queue lacks what it is guaranteed for long, and of
        every job that waits it is said why. Of equals each has its part."""
        loop = asyncio.get_running_loop()
        end, contended = loop.time() + limit, loop.time()
        while unfinished := [work.name for work in self.teams.jobs if not self._ended(work.name)]:
            if loop.time() > end:
                raise Broken(f"{unfinished} have not ended within {limit} s\n{self.cluster.describe()}")
            await asyncio.sleep(1.0)
            self.seen.checks += 1
            self._guarantees(loop.time())
            self._reasons()
            self._steps()
            self._alike()
            if self.teams.equals and not self._fair:
                contended = contended if self._all_want_more() else loop.time()
                if loop.time() - contended > GRACE:
                    self._parts()
                    self._fair = True
            if self.teams.promised and loop.time() - contended > GRACE + START:
                self._fair = True
        self.cluster.checker.forgotten |= {f"uid-{name}" for name in self._over}
        self.seen.fair, self.seen.made_room, self.seen.came_back = self._fair, self._room_made(), self._returns.seen
        self.seen.ended = Counter(job.phase for job in self.cluster.server.state.jobs.values())

    def _ended(self, name: str) -> bool:
        job = self.cluster.find(name)
        if job is not None and job.phase in TERMINAL:
            self._over.add(name)
        return name in self._over

    def _all_want_more(self) -> bool:
        waiting = {job.spec.queue for job in self.cluster.server.state.jobs.values() if in_queue(job)}
        return waiting == {queue.name for queue in self.teams.queues if queue.name != "p"}

    def _parts(self) -> None:
        """Each queue has its part by weight of the nodes, or of what they may have together: to one node, and of wide
        gangs, of which it is a whole number, exactly."""
        all_of = {queue.name: queue for queue in self.teams.queues}
        above = all_of.pop("p", None)
        nodes = self.teams.nodes if above is None else above.capability.nodes or 0
        use, weights = in_use(self.cluster), sum(queue.weight for queue in all_of.values())
        for queue in all_of.values():
            part = nodes * queue.weight / weights
            if abs(use[queue.name] / WORKERS - part) > (1 if self.teams.wide == 1 else 0):
                raise Broken(f"queue {queue.name} has {use} slots, its part is {part} nodes\n{self.cluster.describe()}")

    def _guarantees(self, now: float) -> None:
        lacking = {*self._lacking()} if self.cluster.settled() else set()  # nothing is decided before
        self._withheld = {name: self._withheld.get(name, now) for name in lacking}
        for name, since in self._withheld.items():
            if now - since > GRACE:
                raise Broken(f"queue {name} lacks what it is guaranteed for {GRACE} s\n{self.cluster.describe()}")

    def _lacking(self) -> Iterator[str]:
        """Queues with a job that waits and that is within their guarantee. Where something may not be taken back, only
        those for which what is idle and the rest would do."""
        free = self.teams.nodes - sum(self._nodes(name) for name in self._tree.children.get("", ()))
        all_back = all(queue.reclaimable for queue in self._tree.queues)
        jobs = [job for job in self.cluster.server.state.jobs.values() if job.phase not in TERMINAL]
        for queue in self._tree.queues:
            mine = [job for job in jobs if job.spec.queue == queue.name]
            use = sum(held(job) for job in mine) // WORKERS
            owned = self._tree.guaranteed(queue.name, "nodes")
            could = free + self._taken_back(queue.name)
            waits = [self._least[job.name] for job in mine if in_queue(job)]
            if any(use + least <= owned and (all_back or least <= could) for least in waits):
                yield queue.name

    def _nodes(self, name: str) -> int:
        return in_use(self.cluster)[name] // WORKERS

    def _taken_back(self, name: str) -> int:
        """Nodes that the queue could have of others."""
        path = [queue.name for queue in self._tree.path(name)]
        others = [own for above in path for own in self._tree.children[self._tree.by_name[above].parent]]
        return sum(self._gives(other) for other in others if other not in path)

    def _gives(self, name: str) -> int:
        """Nodes that a queue, and those below it, have above their guarantees."""
        if not self._tree.by_name[name].reclaimable:
            return 0
        below = self._tree.children.get(name)
        mine = self._nodes(name) if below is None else sum(map(self._gives, below))
        return min(mine, max(0, self._nodes(name) - self._tree.guaranteed(name, "nodes")))

    def _steps(self) -> None:
        """No job goes on from an older step than one that was acknowledged, whoever it made room for."""
        for job in self.cluster.server.state.jobs.values():
            step = -1 if job.checkpoint is None else job.checkpoint.step
            if step < self._committed.get(job.uid, -1):
                raise Broken(f"{job.name} had committed step {self._committed[job.uid]}, and is at {step}")
            self._begun(job)
            self._committed[job.uid] = step

    def _begun(self, job: JobRecord) -> None:
        """The first time that a generation is seen to run: its workers go on from the step that was acknowledged when
        it did not run yet, or a later one."""
        generation = job.generation
        active = generation.token if generation is not None and generation.state == "active" else None
        known = self._seen.setdefault(job.uid, active)  # what ran before anybody looked
        if generation is None or active is None or known == active:
            return
        for node in generation.members:
            pod = self.cluster.nodes[node].machine.pods.get(job.uid)
            if pod is None or pod.generation != generation.token:
                return  # not yet
            for env in pod.env:
                begins = int(env.get("NODEAGENT_CHECKPOINT", "-1").rpartition("-")[2])
                self.seen.resumed += begins > 0
                if begins < self._committed.get(job.uid, -1):
                    raise Broken(f"{job.name} goes on from {begins}, and had committed {self._committed[job.uid]}")
        self._seen[job.uid] = active

    def _alike(self) -> None:
        """Agents that have read the same come to the same, in whatever order they have it."""
        views: list[list[Cluster]] = []
        for node in self.cluster.nodes.values():
            if node.agent is not None and node.agent.certain:
                mine = node.agent.cluster()
                same = next((known for known in views if _records(known[0]) == _records(mine)), None)
                views.append([mine]) if same is None else same.append(mine)
        for group in (group for group in views if len(group) > 1):
            found = [_decided(replace(view, served=group[0].served), i) for i, view in enumerate(group)]
            self.seen.alike += len(found) - 1
            if any(other != found[0] for other in found):
                raise Broken(f"the same view, and not the same decision: {found}")

    def _reasons(self) -> None:
        """Of each job that waits an agent says why; one that has not joined knows of none."""
        agents = [node.agent for node in self.cluster.nodes.values() if node.agent is not None]
        asked = next((agent for agent in agents if agent.health().joined), None)
        for job in self.cluster.server.state.jobs.values():
            silent = in_queue(job) and asked is not None and not asked.explain(job.uid)
            self._silent[job.uid] = self._silent[job.uid] + 1 if silent else 0
            if self._silent[job.uid] > START:
                raise Broken(f"nobody says why {job.name} of queue {queue_of(job.spec.queue)} waits")


def _records(view: Cluster) -> tuple[object, ...]:
    """What it was read as."""
    return view.nodes, view.jobs, view.lapsed, view.queues, view.refused


def _decided(view: Cluster, order: int) -> tuple[object, ...]:
    """Who gives what to whom, and who is next, worked out from nothing. ``order``: another one of the same records."""
    rng = random.Random(order)
    nodes, jobs = [*view.nodes], [*view.jobs]
    rng.shuffle(nodes)
    rng.shuffle(jobs)
    own = replace(
        view, nodes={n: view.nodes[n] for n in nodes}, jobs={uid: view.jobs[uid] for uid in jobs}, notes=Notes()
    )  # fmt: skip
    shared = transfers(own)
    return shared.takes, shared.gives, shared.stops, [waiting.job.uid for waiting in line(own)]


async def _storm(cluster: SimCluster, pause: float) -> None:
    """Faults at random moments, several at once."""

    async def strike(fault: Fault) -> None:
        try:
            await fault(cluster)
        except StoreRefusedError as refusal:
            if refusal.code != "not_found":  # a job that was submitted a moment before the store went back
                raise

    loop = asyncio.get_running_loop()
    end = loop.time() + STORM
    async with asyncio.TaskGroup() as faults:
        while loop.time() < end:
            await asyncio.sleep(cluster.rng.expovariate(1 / pause))
            faults.create_task(strike(cluster.rng.choice(FAULTS)))


async def _resize(cluster: SimCluster, teams: Teams) -> None:
    """A role that was scaled out gets its file's places again: there may be no room for more."""
    for work in teams.jobs:
        if work.in_roles:
            await unscale(cluster, work.name, {})


async def _run(seed: int) -> Seen:
    teams = drawn(seed)
    async with started(seed, teams.nodes, WORKERS) as cluster:
        play = Play(cluster, teams)
        await share(cluster, *teams.queues)
        working = cluster.tasks.create_task(play.work())
        submitting = cluster.tasks.create_task(play.submit())
        await asyncio.sleep(5)
        await _storm(cluster, teams.pause)
        await heal(cluster)
        await _resize(cluster, teams)
        seconds = sum(work.seconds * work.low for work in teams.jobs) / teams.nodes
        await play.calm(2 * seconds + 10 * MIN_RUNTIME)
        await submitting
        cluster.checker.check_kept()
        working.cancel()
        play.seen.checks += cluster.checker.checks
        return play.seen


def run(seed: int) -> Seen:
    """The whole schedule. Raises an exception group of what went wrong."""
    return run_virtual(_run(seed))
