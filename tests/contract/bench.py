"""What the contract tests stand on: either store behind one face, with its time and its server at hand.

``Bench`` knows how to let time pass and how to make the server look restarted; the tests know nothing of which store
they run against. Node leases are long unless a test asks for a short one.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping

from nodeagent.lease.withdrawals import jobs_and_numbers
from nodeagent.model.job import BudgetEntry, Control, Desired, JobRecord, Phase, Quota
from nodeagent.model.jobspec import JobSpec, Nodes, Policy, Role, Submitter
from nodeagent.model.node import Incarnation, NodeFacts, Readiness
from nodeagent.model.pod import PodState, Stall
from nodeagent.model.timing import Timing, millis
from nodeagent.model.world import Ack, Cause, Generation, Member, PodReport, Token
from nodeagent.store.base import Store, StoreRefusedError
from nodeagent.store.calls import AnyLinks
from nodeagent.store.client import RedisStore
from nodeagent.store.keys import prefix
from nodeagent.store.link import StoreLink
from nodeagent.store.messages import PAGE_BYTES, Beat, BeatReply, Ending, Note, OwnJob, Proposal, QuotaClaims, Saved
from tests.inprocess.data import Stream
from tests.inprocess.lease import era_of, renew_lease
from tests.inprocess.server import CLUSTER, HereLinks, HereStore, Server
from tests.submitting import submit_one

FAST = Timing(heartbeat=0.05, credit=0.1, gap=60.0, lease=0.3)
"""No silence of a slow machine is a gap: after one, nobody lapses for a while."""
LASTING = FAST.model_copy(update={"lease": 30.0})
"""For a recovery that must not be over yet however slow the machine is. ``Bench.age`` ends it."""
LONG = 3_600_000
BOUND = 10.0
"""Seconds a test waits for anything."""


def facts(node: str, **more: object) -> NodeFacts:
    plain: dict[str, object] = {
        "address": f"10.0.0.{len(node)}-{node}",
        "hostname": node,
        "boot_id": "boot",
        "agent_pid": 4711,
        "agent_version": "0",
        "started": 1.5,
        "cpu_slots": 4,
    }
    return NodeFacts.model_validate(plain | more)


def spec(name: str = "train", low: int = 1, high: int = 3, target: int = 2) -> JobSpec:
    who = Submitter(user="ann", uid=1000, gid=1000, host="login", cwd="/home/ann")
    role = Role(command=("python", "train.py"), nodes=Nodes(min=low, max=high, target=target))
    return JobSpec(name=name, roles=(role,), working_dir="/home/ann", user="ann", submitter=who)


def cause(text: str = "because") -> Cause:
    return Cause(kind="start", text=text)


def spend(text: str = "worker 3 failed") -> BudgetEntry:
    return BudgetEntry(at=1, wall=2.25, kind="worker_failed", counts=True, node="n1", rank=3, text=text, exit=1)


class Bench:
    """One cluster in one store."""

    def __init__(self, store: RedisStore) -> None:
        self.store: Store = store
        self.calls = store._calls
        self.lives: dict[str, Incarnation] = {}
        self.timing = FAST
        """The cluster's; another one is set before the first join."""
        self._seq: dict[str, int] = {}
        self.wall = time.time()
        """What the caller's clock shows when jobs end, if nothing else is said: about as the server's does."""

    # --- what differs between the stores

    async def sleep(self, seconds: float) -> None:
        """Let the server's clock go on, without a call."""
        raise NotImplementedError

    async def restart(self) -> None:
        """Make the server a new process with the old data, as far as the store can tell."""
        raise NotImplementedError

    async def keep(self) -> object:
        """A copy of all that the store has, but for its events."""
        raise NotImplementedError

    async def put_back(self, kept: object) -> None:
        """Make the server another process with the data of a copy; None for none at all."""
        raise NotImplementedError

    async def age(self, served_ms: int) -> None:
        """Move the served clock on at once."""
        raise NotImplementedError

    async def take(self, key: str) -> None:
        """Remove a key by hand."""
        raise NotImplementedError

    async def spoil(self, key: str) -> None:
        """Write a text there by hand, whatever belongs there."""
        raise NotImplementedError

    async def pod_ttl(self, uid: str, node: str) -> int:
        """Milliseconds until a published pod expires."""
        raise NotImplementedError

    # --- nodes

    async def join(
        self, node: str, life: str = "", start: int = 1, timing: Timing | None = None, regroup: int = 0
    ) -> None:
        incarnation = Incarnation(life=life or f"{node}-a", start=start)
        await self.store.join(node, incarnation, facts(node), timing or self.timing, regroup)
        self.lives[node] = incarnation

    async def up(self, *nodes: str) -> None:
        """Join, with leases that do not lapse by themselves."""
        for node in nodes:
            await self.join(node)
            await self.beat(node)

    async def beat(
        self,
        node: str,
        *,
        length: int = LONG,
        rev: int = 0,
        era: str = "",
        top: int = 0,
        incarnation: Incarnation | None = None,
        seq: int | None = None,
        new_facts: NodeFacts | None = None,
        readiness: dict[str, Readiness] | None = None,
        pods: tuple[PodState, ...] | None = None,
        saved: Saved | None = None,
        notes: tuple[Note, ...] = (),
        runs: tuple[str, ...] = (),
        damaged: tuple[str, ...] = (),
        silent: str = "",
        ahead: dict[str, int] | None = None,
        own: JobRecord | None = None,
        looks: bool = True,
        unanswered: bool = False,
        room: int = PAGE_BYTES,
    ) -> BeatReply:
        """As an agent does, after its lease process has renewed for ``length`` ms. ``own``: a job that runs on the node
        as its view has it; ``runs``: of which it has only the name. ``looks``: for damage."""
        self._seq[node] = self._seq.get(node, 0) + 1
        life = (incarnation or self.lives[node]).life
        renewed = await self._renew(node, life, await self.era(), length)
        reply = await self.store.beat(
            Beat(
                node=node,
                incarnation=incarnation or self.lives[node],
                seq=self._seq[node] if seq is None else seq,
                rev=rev,
                era=era,
                top=top,
                facts=new_facts,
                readiness=readiness,
                pods=pods,
                saved=saved,
                notes=notes,
                runs=(*(OwnJob(uid=uid) for uid in runs), *([as_own(own)] if own is not None else [])),
                damaged=damaged,
                silent=silent,
                unanswered=unanswered,
                ahead=ahead or {},
                looks=self._seq[node] if looks else 0,
                room=room,
            )
        )
        if not renewed:
            await self._renew(node, life, reply.era, length)
        return reply

    async def only_beat(self, node: str, store: Store | None = None, *, unanswered: bool = False) -> BeatReply:
        """As the agent of a node does whose lease process is dead. ``store``: its own client."""
        self._seq[node] = self._seq.get(node, 0) + 1
        beat = Beat(node=node, incarnation=self.lives[node], seq=self._seq[node], rev=0, unanswered=unanswered)
        return await (store or self.store).beat(beat)

    async def renew(
        self,
        node: str,
        length: int = LONG,
        *,
        life: str = "",
        era: str | None = None,
        asks: bool = False,
        late: bool = False,
        standing: Mapping[str, int] | None = None,
    ) -> Mapping[str, int]:
        """As its lease process does: the jobs that wait for the node, with the generation that it holds."""
        about = (node, life or self.lives[node].life, await self.era() if era is None else era, length)
        renewed = await renew_lease(self.calls, *about, asks=asks, late=late, standing=standing)
        await self._shortened(length)
        return renewed.waits

    async def _shortened(self, length: int) -> None:
        """No lease process renews for less than the lease; of tests that do so no beat is to find somebody guilty."""
        if length < 1000 * self.timing.lease:
            async with self.calls.link() as link:
                await link.ask("HSET", f"{self.calls.prefix}meta", "floor", "0")

    async def let_go(self, node: str, uid: str, number: int, *, life: str = "", era: str = "") -> Mapping[str, int]:
        """As its lease process does: what the store has taken for let go."""
        about = {"node": node, "life": life or self.lives[node].life, "era": era or await self.era()}
        (text,) = await self.calls.step("let_go", about | {"uid": uid, "number": number})
        return jobs_and_numbers(str(text))

    async def leave(self, node: str, why: str, era: str = "") -> None:
        """As its lease process does."""
        about: dict[str, object] = {"node": node, "why": why, "era": era or await self.era()}
        await self.calls.step("leave", about | self.lives[node].model_dump())

    async def era(self) -> str:
        """The one that the store is in."""
        return await era_of(self.calls)

    async def _renew(self, node: str, life: str, era: str, length: int) -> bool:
        try:
            await renew_lease(self.calls, node, life, era, length)
            await self._shortened(length)
        except StoreRefusedError:  # the beat says why
            return False
        return True

    async def lapse(self, node: str, watcher: str) -> None:
        """Let a node's lease lapse, as ``watcher`` sees it."""
        await self.beat(node, length=1)
        await self.until_lapsed(node, watcher)

    async def until_lapsed(self, node: str, watcher: str) -> None:
        async with asyncio.timeout(BOUND):
            while node not in (await self.beat(watcher)).lapsed:
                await self.sleep(0.05)

    async def pass_served(self, ms: int, watcher: str) -> None:
        """Let this much served time pass."""
        start = (await self.beat(watcher)).served
        async with asyncio.timeout(BOUND):
            while (await self.beat(watcher)).served < start + ms:
                await self.sleep(0.05)

    async def usual_time_passes(self) -> None:
        """At once: as much as a recovery lasts that waits for no node."""
        await self.age(millis(self.timing.credit + self.timing.lease))

    async def recovered(self, watcher: str) -> None:
        """Until the store's recovery is over."""
        async with asyncio.timeout(BOUND):
            while (await self.beat(watcher)).recovering:
                await self.sleep(0.05)

    # --- jobs

    async def submit(
        self, uid: str = "u1", name: str = "train", request: str = "", quota: Quota | None = None, owner: int = 1000,
        env: dict[str, str] | None = None, claims: QuotaClaims | None = None, era: str = "",
        policies: tuple[Policy, ...] = (), **size: int,
    ) -> JobRecord:  # fmt: skip
        asked = spec(name, **size).model_copy(update={"env": env or {}, "policies": policies})
        return await submit_one(
            self.store, uid, asked, owner, 12.25, "ann", request or f"submit-{uid}", era=era, quota=quota, claims=claims
        )

    async def job(self, uid: str = "u1", watcher: str = "") -> JobRecord:
        """The record, as a beat brings it."""
        reply = await self.beat(watcher or next(iter(self.lives)))
        return next(job for job in reply.jobs if job.uid == uid)

    def members(self, *nodes: str, first: int = 0) -> dict[str, Member]:
        return {
            node: Member(
                node=node,
                life=self.lives[node].life,
                group_rank=rank,
                first_rank=2 * rank,
                workers=2,
                devices=(f"cpu{first}", f"cpu{first + 1}"),
            )
            for rank, node in enumerate(nodes)
        }

    def proposal(self, job: JobRecord, members: Mapping[str, Member], **more: object) -> Proposal:
        plain: dict[str, object] = {
            "uid": job.uid,
            "expect": job.generation.token if job.generation else None,
            "expect_state": job.generation.state if job.generation else "",
            "control_rev": job.control.rev,
            "id": f"{job.uid}-g{job.generation.number + 1 if job.generation else 1}",
            "members": dict(members),
            "cause": cause(),
            "form_ms": 1000,
            "by": "n1",
        }
        return Proposal.model_validate(plain | more)

    async def propose(self, job: JobRecord, *nodes: str, first: int = 0, **more: object) -> JobRecord:
        return await self.store.propose(self.proposal(job, self.members(*nodes, first=first), **more))

    async def ack(
        self, job: JobRecord, node: str, last: PodReport | None = None, token: Token | None = None
    ) -> JobRecord:
        life = self.lives[node]
        ended = generation(job).state == "ended"
        ack = Ack(life=life.life, ended=ended, address=f"{node}:29500", store_hosted=True)
        return await self.store.ack(job.uid, token or generation(job).token, node, life, ack, last)

    async def report(
        self,
        job: JobRecord,
        node: str,
        state: str = "failed",
        reason: str = "",
        token: Token | None = None,
        stall: Stall | None = None,
    ) -> JobRecord:
        value = PodReport.model_validate({"state": state, "reason": reason, "stall": stall})
        return await self.store.report(job.uid, token or generation(job).token, node, self.lives[node], value)

    async def active(self, job: JobRecord, *nodes: str, first: int = 0, **more: object) -> JobRecord:
        """Form a generation and have every member and holder acknowledge it."""
        job = await self.propose(job, *nodes, first=first, **more)
        for node in {**generation(job).members, **generation(job).holders}:
            job = await self.ack(job, node)
        assert generation(job).state == "active"
        return job

    def ending(self, job: JobRecord, phase: Phase, **more: object) -> Ending:
        plain: dict[str, object] = {
            "uid": job.uid,
            "expect": job.generation.token if job.generation else None,
            "expect_state": job.generation.state if job.generation else "",
            "control_rev": job.control.rev,
            "phase": phase,
            "reason": f"now {phase}",
            "wall": self.wall,
            "by": "n1",
        }
        return Ending.model_validate(plain | more)

    async def end(self, job: JobRecord, phase: Phase, **more: object) -> JobRecord:
        return await self.store.end(self.ending(job, phase, **more))

    async def set_control(self, job: JobRecord, request: str, desired: Desired = "run", **more: object) -> JobRecord:
        plain = {"rev": 1, "target": job.control.target, "desired": desired, "by": "ann"}
        control = Control.model_validate(plain | more)
        return await self.store.control(job.uid, job.control.rev, control, request, "JobChanged", "changed")

    async def kinds(self, after: str = "0-0") -> list[str]:
        return [event.kind for event in await self.store.events(after, 1000)]


class RedisBench(Bench):
    """Time is real; the server looks restarted since the store remembers another run id."""

    def __init__(self, store: RedisStore, links: AnyLinks, prefix: str) -> None:
        super().__init__(store)
        self._links = links
        self._prefix = prefix

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def restart(self) -> None:
        async with self._links.one() as link:
            await link.ask("HSET", f"{self._prefix}meta", "run", "an earlier process")

    async def keep(self) -> object:
        async with self._links.one() as link:
            found = {key: await dumped(link, key) for key in await link.ask("KEYS", f"{escaped(self._prefix)}*")}
        return {key: value for key, value in found.items() if value}

    async def put_back(self, kept: object) -> None:
        async with self._links.one() as link:
            for key in await link.ask("KEYS", f"{escaped(self._prefix)}*"):
                await link.ask("DEL", key)
            if isinstance(kept, dict):
                for key, words in kept.items():
                    await link.ask(words[0], key, *words[1:])
                await link.ask("HSET", f"{self._prefix}meta", "run", uuid.uuid4().hex)

    async def take(self, key: str) -> None:
        async with self._links.one() as link:
            assert await link.ask("DEL", f"{self._prefix}{key}") == 1

    async def spoil(self, key: str) -> None:
        async with self._links.one() as link:
            await link.ask("SET", f"{self._prefix}{key}", "x", "PX", 60_000)

    async def age(self, served_ms: int) -> None:
        async with self._links.one() as link:
            await link.ask("HINCRBY", f"{self._prefix}meta", "served", served_ms)

    async def pod_ttl(self, uid: str, node: str) -> int:
        async with self._links.one() as link:
            return int(await link.ask("PTTL", f"{self._prefix}pod:{uid}:{node}"))


class HereBench(RedisBench):
    """On the server in this process: time is a number."""

    def __init__(self, server: Server, clock: list[float], store: RedisStore | None = None) -> None:
        super().__init__(store or HereStore(server), HereLinks(server), prefix(CLUSTER))
        self.server = server
        self._clock = clock
        self.wall = clock[0]

    async def sleep(self, seconds: float) -> None:
        self._clock[0] += seconds

    async def restart(self) -> None:
        self.server.restart()

    async def keep(self) -> object:
        return {key: value for key, value in self.server.kept().items() if not isinstance(value, Stream)}

    async def put_back(self, kept: object) -> None:
        if isinstance(kept, dict):
            self.server.put_back(kept)
        else:
            self.server.restart(keep_data=False)


def escaped(prefix: str) -> str:
    return prefix.replace("{", "[{]").replace("}", "[}]")


async def dumped(link: StoreLink, key: str) -> list[str]:
    """The command that writes a key again; nothing for a stream: events are no records."""
    kind = await link.ask("TYPE", key)
    if kind == "hash":
        return ["HSET", *await link.ask("HGETALL", key)]
    if kind == "zset":
        flat = await link.ask("ZRANGE", key, 0, -1, "WITHSCORES")
        return ["ZADD", *(word for pair in zip(flat[1::2], flat[::2], strict=True) for word in pair)]
    return []


def as_own(job: JobRecord) -> OwnJob:
    """What an agent says of a job that runs on its node."""
    token = generation(job)
    return OwnJob(uid=job.uid, rev=job.rev, stands=f"{token.number} {token.id} {token.state} {job.phase}")


def generation(job: JobRecord) -> Generation:
    assert job.generation is not None
    return job.generation


async def refused(code: str, call: object) -> str:
    """The text of the refusal; fails unless the call is refused with this code."""
    assert asyncio.iscoroutine(call)
    try:
        await call
    except StoreRefusedError as refusal:
        assert refusal.code == code, f"{refusal.code}: {refusal}"
        return str(refusal)
    raise AssertionError(f"not refused with {code}")
