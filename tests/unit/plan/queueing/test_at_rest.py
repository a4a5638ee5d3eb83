"""Small random clusters whose decisions are carried out, one after the other, come to rest: no node goes to and fro."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.model.queue import Amount, Queue, Queues
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.job.gang import decide
from nodeagent.plan.steps import Decision
from tests.unit.plan.build import NOW, READY, WALL, make_cluster, make_job, make_node, make_spec
from tests.unit.plan.carry import carried_out

MOST = 60
"""Steps that a cluster may take until it rests; most take fewer than ten."""
A_STEP = 3_000
LONG = 600_000
"""Milliseconds: between two steps, and after which nothing is to come that no decision has named a time for."""

SEEDS = (*range(60), 119, 936, 1307, 1627, 3094)
"""The last five were found by a search: they did not rest while what was given to a job that runs was kept from it."""


def random_cluster(rng: Random) -> tuple[list[NodeRecord], Queues, list[JobRecord]]:
    """Nodes that pods of several jobs share, up to three queues, and jobs of one role, some elastic, some borrowing."""
    count, gpus = rng.randint(3, 7), rng.random() < 0.5
    names = [f"q{i}" for i in range(rng.randrange(4))]
    uids = [f"u-{i}" for i in range(rng.randint(3, 6))]
    nodes = [
        make_node(f"n{i}", ready=dict.fromkeys(uids, READY), slots=4, gpus=rng.choice((0, 2, 4, 8)) if gpus else 0)
        for i in range(count)
    ]
    queues = [random_queue(rng, name, count) for name in names]
    return nodes, Queues(rev=1, queues=tuple(queues)), [random_job(rng, uid, names, count, gpus) for uid in uids]


def random_queue(rng: Random, name: str, nodes: int) -> Queue:
    most, owns = rng.choice((None, None, None, rng.randint(1, nodes))), rng.choice((None, None, 0, 1, 2))
    owns = None if most is not None and owns is not None and owns > most else owns
    return Queue(
        name=name, weight=rng.choice((1, 1, 2, 3)), capability=Amount(nodes=most), guarantee=Amount(nodes=owns),
        reclaimable=rng.random() < 0.8, priority=rng.choice((0, 0, 0, 1)), min_runtime=0.0,
    )  # fmt: skip


def random_job(rng: Random, uid: str, queues: list[str], nodes: int, gpus: bool) -> JobRecord:
    least = rng.randint(1, min(3, nodes))
    most = rng.randint(least, nodes)
    target, order = rng.randint(least, most), int(uid[2:])
    spec = make_spec(
        name=f"j{order}", size=(least, most), workers=rng.choice((1, 2, "gpu", "gpu") if gpus else (1, 2, 4)),
        uneven=gpus and rng.random() < 0.3, priority=rng.choice((0, 0, 1)),
    )  # fmt: skip
    auto = most > target and rng.random() < 0.4
    role = spec.role.model_copy(update={"nodes": spec.nodes.model_copy(update={"target": target, "auto": auto})})
    spec = spec.model_copy(update={"roles": (role,), "queue": rng.choice(queues) if queues else ""})
    return make_job(uid=uid, spec=spec, target=target, order=order, owner=rng.randint(1, 2), since=NOW - LONG)


def steps_until_rest(seed: int) -> Iterator[str]:
    """What is done, in words. Whose decision is taken first changes with each step, as it does between agents."""
    nodes, tree, records = random_cluster(Random(seed))
    jobs, served, turn, still = {job.uid: job for job in records}, NOW, 0, 0
    while still < 2:
        view = replace(make_cluster(nodes, *jobs.values(), served=served), queues=tree)
        turn += 1
        uids = sorted(jobs)[turn % len(jobs) :] + sorted(jobs)[: turn % len(jobs)]
        found: dict[str, Decision] = {}
        for uid in uids:
            found[uid] = decide(view, jobs[uid], WALL)
            if found[uid].step is not None:
                jobs[uid] = carried_out(jobs[uid], found[uid], served)
                check(view, jobs)
                yield f"{served} {jobs[uid].name}: {'; '.join(found[uid].why)}"
                served, still = served + A_STEP, 0
                break
        else:
            times = [one.at for one in found.values() if one.at > served]
            served, still = min(times, default=served + LONG), 0 if times else still + 1


def check(view: Cluster, jobs: dict[str, JobRecord]) -> None:
    """Nobody has what another has, and gangs are as large as they may be."""
    taken = set[tuple[str, str]]()
    for job in jobs.values():
        if job.generation is not None and job.generation.state == "active":
            assert job.spec.nodes.min <= len(job.generation.members) <= job.spec.nodes.max
            has = {(n, device) for n, member in job.generation.members.items() for device in member.devices}
            assert taken.isdisjoint(has)
            assert all(device in view.nodes[n].facts.devices() for n, device in has)
            taken |= has


@pytest.mark.parametrize("seed", SEEDS)
def test_it_comes_to_rest(seed: int) -> None:
    done = list[str]()
    for step in steps_until_rest(seed):
        done.append(step)
        assert len(done) < MOST, "\n".join(done[-12:])
