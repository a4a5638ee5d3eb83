"""What the store's steps cost the Redis server, in a job over all nodes and in one of eight: its own CPU time per call.

``python -m benchmarks.steps 10 100 1000`` prints one row per size, as JSON. Starts a private Redis; joins, proposes and
acknowledges as the agents do, by the client that they use.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from nodeagent.model.job import JobRecord, Spend
from nodeagent.model.jobspec import JobSpec, Nodes, Role, Submitter
from nodeagent.model.node import Incarnation, NodeFacts
from nodeagent.model.timing import Timing
from nodeagent.model.world import Ack, Cause, Member, PodReport
from nodeagent.store.client import RedisStore, connect
from nodeagent.store.link import Links
from nodeagent.store.messages import Beat, BeatReply, Proposal
from nodeagent.store.server import PrivateRedis

LEASE = 3_600_000
READERS = 10
"""Members whose reading is measured; the others' is reckoned from it."""


class Gang:
    """One job over all nodes (or the first few of them), as its agents see it through one client each that is measured
    and one for all the rest."""

    def __init__(self, server: PrivateRedis, nodes: int, size: int) -> None:
        self._url, self._pid, url = server.url, server.pid, server.url
        self._cluster = f"steps{nodes}x{size}"
        self._store, self._links = connect(url, self._cluster, 60.0), Links(url, 1)
        self._readers = [connect(url, self._cluster, 60.0) for _ in range(READERS)]
        self._names = [f"node{i:05d}" for i in range(nodes)]
        self._size, self._seq, self._uid = size, 0, "f" * 32
        self._row: dict[str, float] = {}
        self._apart = 0.0
        """Of a fault's time: what the readers took to know all before it."""

    async def measure(self) -> Mapping[str, float]:
        """Microseconds per call, and milliseconds of a whole fault."""
        for name in self._names:
            await self._store.join(name, self._life(name), self._facts(name), Timing())
        renewed = None
        for name in self._names:
            renewed = await self._beat(self._store, name, renewed)
        job = await self._store.submit(self._uid, self._spec(), 0, 1.0, "ann", "")
        job = await self._form(job, "first ")
        seen = [await self._read_all(store, self._names[i]) for i, store in enumerate(self._readers)]
        self._row["newcomer reads all"] = await self._costs(self._newcomer())
        blamed = self._names[self._size // 2]
        self._apart, started = 0.0, await self._usec()
        report = PodReport(state="failed", reason="worker 3 ended with code 1")
        self._row["report"] = await self._costs(self._report(job, blamed, report))
        after = await self._readers_read(seen, "beat that brings a report")
        seen = after
        job = await self._form(job, "")
        measured = await self._usec() - started - self._apart
        read = self._row["beat that brings a report"] + self._row["member reads the world"]
        self._row["fault, all of it (ms)"] = (measured + read * (self._size - READERS)) / 1000
        await self._close()
        return {name: round(value, 2) for name, value in self._row.items()}

    async def _form(self, job: JobRecord, label: str) -> JobRecord:
        gang = self._names[: self._size]
        members = {name: self._member(rank, name) for rank, name in enumerate(gang)}
        spend = Spend(at=1, wall=2.0, kind="worker_failed", counts=True, node=gang[0], rank=3, text="failed", exit=1)
        proposal = Proposal(
            uid=self._uid, expect=job.head.token if job.head else None, expect_state=job.head.state if job.head else "",
            control_rev=job.control.rev, id=f"g{self._seq}", members=members, cause=Cause(kind="start", text="go"),
            spend=spend if job.head else None, form_ms=60_000, by=gang[0], keepers={n: f"{n}-life" for n in gang[:5]},
        )  # fmt: skip
        cost = await self._usec()
        before = [await self._read_all(s, self._names[i]) for i, s in enumerate(self._readers)] if not label else []
        self._apart += await self._usec() - cost
        cost = await self._usec()
        job = await self._store.propose(proposal)
        self._row[f"{label}propose"] = await self._usec() - cost
        cost, began = await self._usec(), time.process_time()
        for name in gang[:-1]:
            job = await self._ack(job, name)
        self._row[f"{label}ack"] = (await self._usec() - cost) / max(1, len(gang) - 1)
        self._row[f"{label}ack, agent"] = (time.process_time() - began) * 1e6 / max(1, len(gang) - 1)
        cost = await self._usec()
        job = await self._ack(job, gang[-1])
        self._row[f"{label}last ack activates"] = await self._usec() - cost
        if before:
            await self._readers_read(before, "member reads the world")
        return job

    async def _readers_read(self, seen: list[BeatReply], label: str) -> list[BeatReply]:
        cost, began = await self._usec(), time.process_time()
        replies = [await self._beat(store, self._names[i], seen[i]) for i, store in enumerate(self._readers)]
        self._row[label] = (await self._usec() - cost) / READERS
        self._row[f"{label}, agent"] = (time.process_time() - began) * 1e6 / READERS
        return replies

    async def _newcomer(self) -> None:
        store = connect(self._url, self._cluster, 60.0)
        await self._read_all(store, self._names[0])
        await store.close()

    async def _report(self, job: JobRecord, node: str, report: PodReport) -> None:
        assert job.head is not None
        await self._store.report(self._uid, job.head.token, node, self._life(node), report)

    async def _ack(self, job: JobRecord, node: str) -> JobRecord:
        assert job.head is not None
        ack = Ack(life=f"{node}-life", address=f"{node}:29500", host="10.0.0.1", signature="a" * 64, ready=0.01)
        return await self._store.ack(self._uid, job.head.token, node, self._life(node), ack, None)

    async def _read_all(self, store: RedisStore, node: str) -> BeatReply:
        reply = await self._beat(store, node, None)
        while reply.more:
            reply = await self._beat(store, node, reply)
        return reply

    async def _beat(self, store: RedisStore, node: str, seen: BeatReply | None) -> BeatReply:
        self._seq += 1
        beat = Beat(node=node, incarnation=self._life(node), seq=self._seq, rev=0)
        if seen is not None:
            beat = beat.model_copy(update={"rev": seen.rev, "era": seen.era})
        return await store.beat(beat)

    async def _costs(self, call: object) -> float:
        before = await self._usec()
        assert asyncio.iscoroutine(call)
        await call
        return await self._usec() - before

    async def _usec(self) -> float:
        """CPU time of the server until now, sockets included, however many share the machine."""
        async with self._links.one() as link:
            await link.ask("PING")  # what came before is answered, and accounted for
        return self._on_cpu()

    def _on_cpu(self) -> float:
        return int(Path(f"/proc/{self._pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1000

    def _life(self, node: str) -> Incarnation:
        return Incarnation(life=f"{node}-life", start=1)

    def _facts(self, node: str) -> NodeFacts:
        return NodeFacts(
            address="10.0.0.1:7070", hostname=node, boot_id="boot", agent_pid=4711, agent_version="0", started=1.5,
            cpu_slots=16,
        )  # fmt: skip

    def _member(self, rank: int, node: str) -> Member:
        devices = tuple(f"cpu{i}" for i in range(8))
        return Member(node=node, life=f"{node}-life", group_rank=rank, first_rank=8 * rank, workers=8, devices=devices)

    def _spec(self) -> JobSpec:
        who = Submitter(user="ann", uid=1000, gid=1000, host="login", cwd="/home/ann")
        nodes = Nodes(min=1, max=self._size, target=self._size)
        role = Role(command=("python", "train.py"), nodes=nodes)
        return JobSpec(name="train", roles=(role,), working_dir="/home/ann", user="ann", submitter=who)

    async def _close(self) -> None:
        for store in (self._store, *self._readers):
            await store.close()
        await self._links.close()


async def _rows(sizes: list[int]) -> None:
    with PrivateRedis() as server:
        for nodes in sizes:
            for size in sorted({min(8, nodes), nodes}):
                gang = Gang(server, nodes, size)
                print(json.dumps({"nodes": nodes, "gang": size} | dict(await gang.measure())), flush=True)


if __name__ == "__main__":
    asyncio.run(_rows([int(word) for word in sys.argv[1:]] or [10, 100, 1000]))
