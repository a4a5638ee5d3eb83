"""Places of several roles in domains: how much is laid out, so that a user who asks for much holds up no agent, and
whether they are the places that would be found if each domain was laid out.

Work is counted in passes over the roles and in labels looked at, never in time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from nodeagent.model.constraints import NODE, Constraints, Match
from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import JobSpec, Role, Together
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.job.gang import decide
from nodeagent.plan.placing.places import Ground, Layout, Site, _Try, lay_out
from nodeagent.plan.steps import Propose
from tests.profiled import counted
from tests.unit.plan.build import READY, WALL, make_cluster, make_job, make_node, make_spec
from tests.unit.plan.placing.ofroles import role

PASSES, LABELS = _Try.__init__.__code__, Match.holds.__code__


def elastic(name: str, most: int, *, alone: bool = False, placement: Constraints) -> Role:
    """From one place to so many."""
    found = role(name, nodes=most, least=1) if alone else role(name, replicas=most, least=1)
    return found.model_copy(update={"placement": placement})


def greedy(within: str = "", **asked: tuple[Match, ...]) -> JobSpec:
    """More than any cluster here has."""
    every, packed = Constraints(**asked), Constraints(**asked, pack="rack")
    roles = elastic("a", 4000, placement=every), elastic("b", 96, alone=True, placement=packed)
    return make_spec().model_copy(update={"roles": roles, "placement": Together(within=within) if within else None})


def view(nodes: int, spec: JobSpec, jobs: int = 1) -> Cluster:
    """Racks of four nodes, all of them ready for the first of so many jobs."""
    waiting = [make_job(spec=spec, uid=f"u-{i}", order=i) for i in range(jobs)]
    ready = {"u-0": READY}
    records = [make_node(f"n{i}", ready=ready, labels={"rack": f"r{i // 4}"}, topology=("rack",)) for i in range(nodes)]
    return make_cluster(records, *waiting)


def first(cluster: Cluster) -> JobRecord:
    return next(iter(cluster.jobs.values()))


@pytest.mark.parametrize("within", ["", "rack", NODE])
def test_a_job_that_no_domain_holds_whole_is_not_laid_out_in_each_of_them(within: str) -> None:
    """``within: node`` makes a domain of each node: 500 of them took seconds, in each step of each agent."""
    passes = []
    for nodes in (16, 64):
        cluster = view(nodes, greedy(within))
        passes.append(counted(partial(decide, cluster, first(cluster), WALL))[PASSES])
    assert passes[0] == passes[1] < 20


def test_labels_are_looked_at_once_for_each_node_and_term_however_many_roles_and_domains_there_are() -> None:
    ranges = tuple(Match(label=NODE, values=(f"n[{i}-{i + 9}]", f"n[{i + 20}]")) for i in range(2))
    cluster = view(64, greedy("rack", prefer=ranges))
    calls = counted(partial(decide, cluster, first(cluster), WALL))
    assert calls[LABELS] == 64 * len(ranges)
    nodes = {**cluster.nodes, "n7": make_node("n7", labels={"rack": "r1"}, topology=("rack",), cordon=True)}
    assert not counted(lambda: decide(replace(cluster, nodes=nodes), first(cluster), WALL))[LABELS]


def test_one_decision_lays_out_few_of_many_jobs_that_wait() -> None:
    """As many as may be next in line, not all: a user has a hundred of them."""
    small = make_spec().model_copy(update={"roles": (role("a", replicas=3), role("b", nodes=2))})
    passes = []
    for jobs in (20, 60):
        cluster = view(16, small, jobs)
        passes.append(counted(partial(decide, cluster, first(cluster), WALL))[PASSES])
    assert passes[0] == passes[1] < 40


def test_it_starts_where_most_of_its_places_are() -> None:
    cluster = view(16, greedy())
    step = decide(cluster, first(cluster), WALL).step
    assert isinstance(step, Propose)
    assert sum(len(member.places) for member in step.members.values()) == 64, "one for each slot"


def plainly(roles: Sequence[Role], sites: Sequence[Site], domains: Sequence[Sequence[int]], within: str) -> Layout:
    """The rule, with each domain laid out."""
    fewer = list[Layout]()
    for among in domains:
        found = lay_out(roles, [sites[i] for i in among])
        if not found.lack:
            if not found.left:
                return found
            fewer.append(found)
    found = lay_out(roles, sites)
    if not within or (found.lack and not fewer):
        fewer.append(found)
    elif not fewer:
        return Layout(lack=f"no {within} has room for all of its places")
    return max(fewer, key=lambda one: one.count)


def some_role(draw: random.Random, name: str) -> Role:
    size = draw.choice([1, 2, 3, 5, 9])
    least = draw.choice([size, draw.randint(1, size)])
    workers, gpus = draw.choice([1, 1, 2, 3]), draw.choice([None, 0, 0, 1])
    found = role(name, **{draw.choice(["nodes", "replicas"]): size}, workers=workers, least=least)
    asked = Constraints(
        exclude=draw.choice([(), (), (Match(label="gpu"),), (Match(label=NODE, values=("n[1-3,9]",)),)]),
        prefer=draw.choice([(), (Match(label=NODE, values=("n[4-7]",)),)]),
        spread=draw.choice(["", "rack", NODE]),
        pack=draw.choice(["", "", "rack"]),
    )
    return found.model_copy(update={"placement": draw.choice([None, asked]), "gpus_per_worker": gpus})


def some_site(draw: random.Random, i: int) -> Site:
    labels = {"rack": f"r{i // 3}"} | ({"gpu": "h100"} if draw.random() < 0.3 else {})
    facts = make_node(f"n{i}", slots=draw.choice([1, 2, 4]), gpus=draw.choice([0, 0, 2, 4]), labels=labels).facts
    had = frozenset({f"a.{i}"} if draw.random() < 0.2 else ())
    return Site(f"n{i}", facts, tuple(d for d in facts.devices() if draw.random() < 0.8), had)


@pytest.mark.parametrize("seed", [*range(150), 394])  # 394: of equals the first was not laid out first
def test_the_places_are_those_that_are_found_where_each_domain_is_laid_out(seed: int) -> None:
    draw = random.Random(seed)
    sites = [some_site(draw, i) for i in range(draw.choice([1, 4, 9, 14]))]
    roles = [some_role(draw, name) for name in "abc"[: draw.choice([2, 3])]]
    racks = [list(range(i, min(i + 3, len(sites)))) for i in range(0, len(sites), 3)]
    domains = draw.choice([[], racks, [*racks, [*range(len(sites) // 2)]], [[i] for i in range(len(sites))]])
    within = draw.choice(["", "rack"])
    expected = plainly(roles, sites, domains, within)
    assert Ground(roles, sites).lay_out_in(domains, within) == expected
    assert Ground(roles, sites).holds(domains, within) is not bool(expected.lack)
