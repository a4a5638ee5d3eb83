"""Random steps, most of them sensible, on the tests' own server and on a real one: every reply, refusal, record and
event is the same. So what the simulation runs on does what Redis does.

Time stands still in both (credit 0) and is moved by hand in both at once, so even served times are equal; what their
clocks show is of the same day. A failure names its seed and step.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from nodeagent.local.privateredis import PrivateRedis
from nodeagent.model.job import Admission, Control, JobRecord, Outcome, Scale
from nodeagent.model.node import Cordon, Incarnation, NodeRecord, Readiness
from nodeagent.model.timing import Timing
from nodeagent.model.usage import UsageDay
from nodeagent.model.world import Ack, Member, PodReport, Token, WorkerExit
from nodeagent.store.base import Store, StoreRefusedError
from nodeagent.store.client import RedisStore, connect
from nodeagent.store.keys import prefix
from nodeagent.store.link import Links
from nodeagent.store.messages import (
    Beat,
    BeatReply,
    Ending,
    JoinReply,
    Judgement,
    Proposal,
    Restored,
    Saved,
    Saves,
    Settlement,
    StoreCopy,
)
from tests.contract.bench import HereBench, RedisBench, cause, facts, spec, spend
from tests.groups import seeds
from tests.inprocess.server import Server
from tests.submitting import submit_one

STILL = Timing(credit=0.0, gap=1e6, lease=3.0)
NODES = ("n1", "n2", "n3", "n4")
NAMES = ("alpha", "beta")
STEPS = 250
SEEDS = seeds(range(18), range(18, 36))
DAY = 86400
OF_LEAVING = ("spend", "lost", "planned", "steps_saved")
"""Of a proposal and an ending: what they say of the generation before."""
MIDNIGHT = 1800
"""Seconds before and after it in which the servers' clocks, or what they look back on, may be of two days."""

Step = Callable[[Store], Awaitable[object]]


@dataclass
class View:
    """What an agent could have read at some moment; era and cluster are each store's own."""

    rev: int
    served: int
    nodes: tuple[NodeRecord, ...]
    jobs: tuple[JobRecord, ...]
    usage: tuple[UsageDay, ...]
    era: dict[Store, str]
    cluster: dict[Store, str]
    kept: tuple[object, ...]


class Both:
    """Both stores of one cluster, and the random hand that plays on them."""

    def __init__(self, seed: int, here: Server, redis: RedisStore, links: Links, cluster: str) -> None:
        self.random = random.Random(seed)
        self.server = here
        self._benches = (HereBench(here, [1000.0]), RedisBench(redis, links, prefix(cluster)))
        self.stores: tuple[Store, Store] = (self._benches[0].store, redis)
        self._links = links
        self._views: list[View] = []
        self._meta = f"{prefix(cluster)}meta"
        self._seq = 0
        self._count = 0

    # --- what both do

    async def play(self) -> None:
        name, step = self.choose()
        lua, redis = [await outcome(step(store)) for store in self.stores]
        assert lua == redis, f"{name}:\nlua {lua}\nredis  {redis}"

    async def advance(self) -> None:
        ms = self.random.choice((500, 1000, 3500))
        for bench in self._benches:
            await bench.age(ms)

    async def restart(self) -> None:
        self.server.restart()
        async with self._links.one() as link:
            await link.ask("HSET", self._meta, "run", "another")

    async def look(self) -> None:
        """Remember what there is."""
        state = self.server.state
        if not state.cluster_uid:
            return  # no cluster: each store would name it as it likes
        async with self._links.one() as link:
            era, uid = await link.ask("HMGET", self._meta, "era", "cluster_uid")
        self._views.append(
            View(
                rev=state.rev,
                served=state.served,
                nodes=tuple(state.nodes.values()),
                jobs=tuple(state.jobs.values()),
                usage=tuple(state.usage.values()),
                era=dict(zip(self.stores, (state.era, era or ""), strict=True)),
                cluster=dict(zip(self.stores, (state.cluster_uid, uid or ""), strict=True)),
                kept=tuple([await bench.keep() for bench in self._benches]),
            )
        )

    async def go_back(self) -> None:
        """Both lose their newest writes, or all they have."""
        kept = self.random.choice([v.kept for v in self._views[-3:]] + [(None, None)])
        for bench, data in zip(self._benches, kept, strict=True):
            await bench.put_back(data)

    # --- what they do

    def choose(self) -> tuple[str, Step]:
        options = [
            (5, self.join), (8, self.beat), (1, self.leave), (1, self.forget), (2, self.submit), (2, self.control),
            (1, self.remove), (1, self.cordon), (8, self.propose), (16, self.ack), (3, self.activate),
            (3, self.set_failsafe_members),
            (6, self.report), (5, self.end), (2, self.settle), (3, self.judge), (2, self.request), (2, self.renew),
            (2, self.saved), (3, self.commit),
            (12 if self.server.state.recovering or not self.server.state.jobs else 2, self.restore),
        ]  # fmt: skip
        chosen = self.random.choices([o for _, o in options], [w for w, _ in options])[0]
        return chosen.__name__, chosen()

    def fresh(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count}"

    def node(self) -> str:
        return self.random.choice(NODES)

    def incarnation(self, node: str) -> Incarnation:
        record = self.server.state.nodes.get(node)
        if record is None or self.random.random() < 0.05:
            return Incarnation(life=f"{node}-{self.random.randint(1, 3)}", start=self.random.randint(1, 2))
        return record.incarnation

    def job(self, state: str = "") -> JobRecord | None:
        """A job; mostly one that has not ended and whose generation has this state."""
        jobs = [self.server.state.jobs[uid] for uid in sorted(self.server.state.jobs)]
        if self.random.random() < 0.9:
            jobs = [job for job in jobs if job.ended is None] or jobs
            jobs = [job for job in jobs if job.generation is not None and job.generation.state == state] or jobs
        return self.random.choice(jobs) if jobs else None

    def token(self, job: JobRecord | None) -> Token:
        if job is None or job.generation is None or self.random.random() < 0.05:
            return Token(number=1, id="nowhere")
        return job.generation.token

    def join(self) -> Step:
        node = self.node()
        down = [n for n in NODES if n not in self.server.state.nodes or self.server.state.lapsed(n)]
        if down and self.random.random() < 0.8:
            node = self.random.choice(down)
        incarnation = self.incarnation(node)
        if self.random.random() < 0.6:
            incarnation = Incarnation(life=f"{node}-{self.random.randint(1, 30)}", start=self.random.randint(1, 3))
        about = facts(node, started=self.random.choice((1.0, 2.5)))
        regroup = self.random.choice((0, 5000))
        return lambda store: store.join(node, incarnation, about, STILL, regroup)

    def beat(self) -> Step:
        node = self.node()
        self._seq += self.random.choice((1, 1, 1, 1, 0))
        beat = Beat(
            node=node,
            incarnation=self.incarnation(node),
            seq=self._seq,
            rev=self.random.choice((0, self.server.state.rev // 2, self.server.state.rev)),
            facts=facts(node, started=self.random.choice((1.0, 2.5))) if self.random.random() < 0.2 else None,
            readiness={"u": Readiness(state=self.random.choice(("ready", "preparing")))}
            if self.random.random() < 0.3
            else None,
            saved=Saved(era="e", rev=self.random.randint(0, self.server.state.rev + 1))
            if self.random.random() < 0.3
            else None,
        )
        view = self.random.choice(self._views)
        if self.random.random() < 0.8:
            return lambda store: store.beat(beat)
        reported = {"rev": view.rev, "top": view.rev + self.random.choice((0, 0, 0, 1))}
        return lambda store: store.beat(beat.model_copy(update=reported | {"era": view.era[store]}))

    def restore(self) -> Step:
        view = self.random.choice(self._views[-4:])
        whole = self.random.random() < 0.7
        nodes = view.nodes if whole else tuple(n for n in view.nodes if self.random.random() < 0.5)
        jobs = view.jobs if whole else tuple(j for j in view.jobs if self.random.random() < 0.5)
        usage = view.usage if whole else ()
        uids = tuple(j.uid for j in view.jobs) if whole else None
        rev = view.rev if self.random.random() < 0.8 else view.rev - 1
        by, cold = self.node(), self.random.random() < 0.5
        awaited = tuple(n for n in NODES if self.random.random() < 0.5) if cold else ()
        top = rev + self.random.choice((0, 0, 0, 1, 2))
        numbers = {self.random.choice(NAMES): self.random.randint(1, 9)} if self.random.random() < 0.3 else {}

        def offer(store: Store) -> Awaitable[object]:
            return store.restore(
                StoreCopy(
                    cluster_uid=view.cluster[store], timing=STILL, era=view.era[store], rev=rev,
                    served=view.served, by=by, nodes=nodes, jobs=jobs, usage=usage, uids=uids, numbers=numbers,
                    regroup=cold * 5000, awaited=awaited, top=top, holds=bool(view.jobs),
                )
            )  # fmt: skip

        return offer

    def saved(self) -> Step:
        return lambda store: store.saved("", 1.0, NODES)

    def leave(self) -> Step:
        node = self.node()
        incarnation = self.incarnation(node)
        return lambda store: store.leave(node, incarnation)

    def submit(self) -> Step:
        wall = self.random.choice((12.125, float(round(time.time()))))
        uid, name = self.fresh("u"), self.random.choice(NAMES)
        request = self.random.choice((uid, "again", ""))
        admission = self.admission() if self.random.random() < 0.7 else None
        return lambda store: submit_one(store, uid, spec(name), 1000, wall, "ann", request, admission=admission)

    def admission(self) -> Admission:
        return Admission(by="n1", issued=1, expires=2, signature=self.random.choice(("s1", "s2", "s3")))

    def renew(self) -> Step:
        job, admission, expect = self.job(), self.admission(), self.random.choice(("s1", "s2", "s3"))
        uid = job.uid if job else "nobody"
        return lambda store: store.renew(uid, expect, admission)

    def control(self) -> Step:
        job = self.job()
        control = Control(
            rev=self.random.choice((1, 1, 1, 20)),
            desired=self.random.choice(("run", "run", "pause", "stop")),
            target=self.random.randint(1, 3),
            restart=self.random.randint(0, 2),
            delete=self.random.random() < 0.2,
            by="ann",
        )
        if job is not None and self.random.random() < 0.3:
            control = job.control.model_copy(update={"delete": True})
        uid = job.uid if job else "nobody"
        rev = job.control.rev if job and self.random.random() < 0.9 else 7
        request, did = self.random.choice((self.fresh("c"), "again")), self.random.choice(("", '{"to": 3}'))
        new = control if self.random.random() < 0.9 else None
        return lambda store: store.control(uid, rev, new, request, "JobChanged", "changed", did)

    def request(self) -> Step:
        request = self.random.choice(("again", "c1", "c2", "u1", "never"))
        return lambda store: store.request(request)

    def settle(self) -> Step:
        job = self.job()
        if job is None:
            return self.submit()
        scale = Scale(
            request="again",
            want=self.random.randint(1, 3),
            before=self.random.randint(1, 3),
            deadline=self.random.choice((0, 9000)),
            grace=self.random.choice((None, 0.5)),
            leaving=self.random.choice(((), ("n1", "n2"))),
            state=self.random.choice(("met", "rolled_back")),
        )
        shared = {k: v for k, v in self.expectation(job).items() if k not in OF_LEAVING}
        control = job.control.model_copy(update={"scale": scale, "target": self.random.randint(1, 3)})
        settlement = Settlement.model_validate(shared | {"control": control, "event": "JobScaleMet", "text": "so"})
        return lambda store: store.settle(settlement)

    def judge(self) -> Step:
        job = self.job()
        if job is None:
            return self.submit()
        shared = {k: v for k, v in self.expectation(job).items() if k not in OF_LEAVING}
        number = self.random.choice((job.last_number, job.last_number, 1))
        entry = spend(self.random.choice("ab")).model_copy(update={"counts": self.random.random() < 0.5})
        judgement = Judgement.model_validate(shared | {"number": number, "spend": entry})
        return lambda store: store.judge(judgement)

    def remove(self) -> Step:
        job = self.job()
        uid = job.uid if job else "nobody"
        return lambda store: store.remove(uid)

    def cordon(self) -> Step:
        node, request = self.node(), self.fresh("k")
        cordon = Cordon(reason="fan broke", by="ann", at=1.5) if self.random.random() < 0.4 else None
        return lambda store: store.cordon(node, cordon, request)

    def can_take(self, node: str) -> bool:
        record = self.server.state.nodes.get(node)
        return record is not None and record.cordon is None and not self.server.state.lapsed(node)

    def members(self, job: JobRecord) -> dict[str, Member]:
        chosen = self.random.sample(NODES, self.random.choice((1, 2, 2, 3, 3, 4)))
        first = self.random.choice((0, 2)) if self.random.random() < 0.2 else 2 * NAMES.index(job.name)
        live = [n for n in chosen if self.can_take(n) or self.random.random() < 0.05]
        return {
            node: Member(
                node=node,
                life=self.incarnation(node).life,
                group_rank=rank,
                first_rank=rank,
                workers=1,
                devices=(f"cpu{first}", f"cpu{first + 1}"),
            )
            for rank, node in enumerate(live)
        }

    def lost(self, job: JobRecord) -> tuple[str, ...]:
        named = sorted(set(job.generation.members) | set(job.generation.holders)) if job.generation else []
        return tuple(n for n in named if self.server.state.lapsed(n) or self.random.random() < 0.03)

    def expectation(self, job: JobRecord) -> dict[str, object]:
        return {
            "uid": job.uid,
            "expect": job.generation.token if job.generation else None,
            "expect_state": job.generation.state if job.generation and self.random.random() < 0.95 else "forming",
            "control_rev": job.control.rev if self.random.random() < 0.95 else 77,
            "spend": spend() if self.random.random() < 0.5 else None,
            "lost": self.lost(job) if self.random.random() < 0.7 else (),
            "planned": self.random.random() < 0.5,
            "steps_saved": self.random.random() < 0.3,
            "by": "n1",
        }

    def propose(self) -> Step:
        job = self.job()
        if job is None:
            return self.submit()
        again = job.generation is not None and self.random.random() < 0.05
        proposal = Proposal.model_validate(
            self.expectation(job)
            | {
                "id": job.generation.id if again and job.generation else self.fresh("g"),
                "members": self.members(job),
                "cause": cause("né: “quoted” \\ /").model_copy(
                    update={"kind": self.random.choice(("start", "worker_failed", "scale"))}
                ),
                "grace": self.random.choice((None, 2.5)),
                "form_ms": 1000,
                "outside": {"n9": "its fan broke"} if self.random.random() < 0.5 else {},
                "failsafe_members": self.failsafe_members(),
            }
        )
        return lambda store: store.propose(proposal)

    def ack(self) -> Step:
        job = self.job("forming")
        named = (
            sorted({*job.generation.members, *job.generation.holders, *job.failsafe_members})
            if job and job.generation
            else []
        )
        node = self.random.choice(named) if named and self.random.random() < 0.95 else self.node()
        incarnation, token = self.incarnation(node), self.token(job)
        lends = self.random.random() < 0.3
        ended = job is not None and job.generation is not None and job.generation.state == "ended"
        ended = ended if self.random.random() < 0.9 else not ended
        down = self.random.choice(((), (), (), ("server",), ("server", "trainer")))
        value = Ack(life=incarnation.life, ended=ended, address=f"{node}:1", store_hosted=True, lends=lends, down=down)
        last = self.pod_report() if self.random.random() < 0.5 else None
        uid = job.uid if job else "nobody"
        return lambda store: store.ack(uid, token, node, incarnation, value, last)

    def failsafe_members(self) -> dict[str, str]:
        chosen = self.random.sample(NODES, self.random.choice((0, 0, 1, 2, 3)))
        return {node: self.incarnation(node).life for node in chosen}

    def set_failsafe_members(self) -> Step:
        job = self.job("active")
        expect = job.failsafe_members if job and self.random.random() < 0.9 else {"n1": "x"}
        named = sorted(expect) or (sorted(job.generation.members) if job and job.generation else [])
        node = self.random.choice(named) if named and self.random.random() < 0.9 else self.node()
        uid, token, incarnation, failsafe_members = (
            job.uid if job else "u",
            self.token(job),
            self.incarnation(node),
            self.failsafe_members(),
        )
        return lambda store: store.set_failsafe_members(uid, token, node, incarnation, expect, failsafe_members)

    def forget(self) -> Step:
        node, request = self.node(), self.fresh("f")
        return lambda store: store.forget(node, "ann", request, f"forget:{node}")

    def activate(self) -> Step:
        job = self.job()
        uid, token = (job.uid if job else "nobody"), self.token(job)
        return lambda store: store.activate(uid, token)

    def pod_report(self) -> PodReport:
        return PodReport(
            state=self.random.choice(("running", *["succeeded"] * 6, "failed", "lost", "fenced", "refused")),
            exits=(WorkerExit(rank=0, local_rank=0, pid=9, code=1, at=1.25, error="Träceback\n\tend"),)
            if self.random.random() < 0.5
            else (),
            reason=self.random.choice(("", "exit 1")),
            started=self.random.choice((0.0, 0.25)),
        )

    def report(self) -> Step:
        job = self.job("active")
        named = sorted(job.generation.members) if job and job.generation else []
        node = self.random.choice(named) if named and self.random.random() < 0.95 else self.node()
        incarnation, token, value = self.incarnation(node), self.token(job), self.pod_report()
        uid = job.uid if job else "nobody"
        return lambda store: store.report(uid, token, node, incarnation, value)

    def commit(self) -> Step:
        job = self.job("active")
        named = sorted(job.generation.members) if job and job.generation else []
        node = self.random.choice(named) if named else self.node()
        incarnation, token, name = self.incarnation(node), self.token(job), self.fresh("step")
        uid = job.uid if job else "nobody"
        return lambda store: store.commit(uid, token, node, incarnation, name, 1, int(name[4:]))

    def end(self) -> Step:
        job = self.job()
        if job is None:
            return self.submit()
        phase = self.random.choice(("holding", "pausing", "pausing", "paused", "succeeded", "failed", "stopped"))
        ending = Ending.model_validate(
            self.expectation(job)
            | {
                "phase": phase,
                "reason": f"now {phase}",
                "outcome": Outcome(code=1, text="it ended") if self.random.random() < 0.5 else None,
                "delay_ms": self.random.choice((0, 500)),
                "wall": float(round(time.time())),
            }
        )
        return lambda store: store.end(ending)


async def outcome(call: Awaitable[object]) -> object:
    """A reply without what cannot be equal: event ids, the cluster's uid, the process, when training first started."""
    try:
        reply = await call
    except StoreRefusedError as refusal:
        return ("refused", refusal.code, str(refusal))
    return plain(reply)


def plain(reply: object) -> object:
    if isinstance(reply, BeatReply):
        jobs = tuple(plain(job) for job in reply.jobs)
        silent = reply.silent.rpartition(" ")[0]
        return reply.model_copy(update={"cluster_uid": "", "event": "", "era": "", "jobs": jobs, "silent": silent})
    if isinstance(reply, Restored):
        return reply.model_copy(update={"era": ""})
    if isinstance(reply, Saves):
        return reply.nodes
    if isinstance(reply, JobRecord):
        return reply.model_copy(update={"started": reply.started is not None})
    if isinstance(reply, JoinReply):
        return reply.model_copy(update={"cluster_uid": ""})
    return reply


@pytest.fixture
async def both(request: pytest.FixtureRequest, redis_server: PrivateRedis) -> AsyncIterator[Both]:
    cluster = uuid.uuid4().hex
    store, links = connect(redis_server.url, cluster, 5.0), Links(redis_server.url, 1)
    now = time.time()
    if (now + MIDNIGHT) % DAY < 2 * MIDNIGHT:
        pytest.skip("it is midnight")
    yield Both(request.param, Server(lambda: now), store, links, cluster)
    await links.close()
    await store.close()


@pytest.mark.redis
@pytest.mark.parametrize("both", SEEDS, indirect=True, ids=lambda seed: f"seed{seed}")
async def test_both_servers_agree(both: Both) -> None:
    for store in both.stores:
        for node in NODES:
            await store.join(node, Incarnation(life=f"{node}-1", start=1), facts(node), STILL)
    await both.look()
    for step in range(STEPS):
        if both.random.random() < (0.2 if both.server.state.recovering else 0.04):
            await both.advance()
        if both.random.random() < 0.05:
            await both.look()
        if both.random.random() < 0.01:
            await both.go_back()
        if both.random.random() < 0.005:
            await both.restart()
        try:
            await both.play()
        except AssertionError as error:
            raise AssertionError(f"step {step}: {error}") from None
    lua, redis = [await store.events("0-0", 10_000) for store in both.stores]
    assert [e.model_copy(update={"id": ""}) for e in lua] == [e.model_copy(update={"id": ""}) for e in redis]
