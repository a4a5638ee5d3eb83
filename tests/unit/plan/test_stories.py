"""The examples by which other schedulers document their queues, retold: what they say comes of each, and the same here,
or what comes here instead and why. What is compared is a table in ``docs/queues.md``.

Sources: Volcano's ``how_to_use_capacity_plugin.md``, ``how_to_use_gangpreempt_and_gangreclaim.md`` and
``capacity-scheduling.md``; Kueue's pages on ClusterQueues and preemption; KAI's ``docs/fairness`` and
``docs/plugins/minruntime.md``; Slurm's pages on preemption, fair tree and resource limits. Where they count CPUs these
are nodes of one slot each.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.queue import MIN_RUNTIME, Amount, Queue, Queues
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.job.gang import decide
from nodeagent.plan.job.waiting import explain
from nodeagent.plan.queueing import queue as line
from nodeagent.plan.steps import End, Propose
from tests.unit.plan.build import NOW, READY, WALL, make_cluster, make_generation, make_job, make_node, make_spec

STEPS = 60
"""More than any of these stories takes: one that takes more goes round in circles."""


class Site:
    """A cluster and its jobs; what ``decide`` says of each comes true at once."""

    def __init__(self, nodes: int, *queues: Queue) -> None:
        self.nodes, self.queues, self.now = nodes, Queues(rev=1, queues=queues), NOW
        self.jobs: dict[str, JobRecord] = {}
        self.made_room: list[str] = []
        """Jobs that were stopped for others, in that order."""
        self.resized: list[str] = []
        """Jobs that gave nodes and went on."""

    def submit(
        self, queue: str, name: str, least: int = 1, most: int = 0, *, count: int = 1, priority: int = 0
    ) -> None:
        """``count`` jobs of this name; with ``most`` an elastic one."""
        for i in range(count):
            called = f"{name}{i}" if count > 1 else name
            spec = make_spec(name=called, size=(least, max(least, most)), priority=priority)
            spec = spec.model_copy(update={"queue": queue})
            self.jobs[called] = make_job(spec=spec, uid=called, order=len(self.jobs), since=self.now)

    def end(self, name: str) -> None:
        """It succeeds."""
        ended = self.jobs[name].generation
        assert ended is not None
        generation = ended.model_copy(update={"state": "ended"})
        self.jobs[name] = self.jobs[name].model_copy(update={"phase": "succeeded", "generation": generation})

    def view(self) -> Cluster:
        ready = dict.fromkeys(self.jobs, READY)
        nodes = [make_node(f"n{i}", slots=1, ready=ready) for i in range(1, self.nodes + 1)]
        return replace(make_cluster(nodes, *self.jobs.values(), served=self.now), queues=self.queues)

    def settle(self) -> None:
        """Until nothing is decided any more, also when everything has run for long."""
        for _ in range(STEPS):
            self.now += round(2000 * MIN_RUNTIME)
            if not self.settle_now():
                return
        raise AssertionError(f"it goes on for ever: {self.made_room} make room")

    def settle_now(self) -> bool:
        """Until nothing is decided before time passes; whether anything was."""
        for steps in range(STEPS):
            view = self.view()
            found = ((job, decide(view, job, WALL).step) for job in self.jobs.values())
            first = next(((job, step) for job, step in found if isinstance(step, (Propose, End))), None)
            if first is None:
                return steps > 0
            self._apply(*first)
        raise AssertionError(f"it goes on for ever: {self.made_room} make room")

    def _apply(self, job: JobRecord, step: Propose | End) -> None:
        number = job.last_number + 1
        if isinstance(step, End):
            assert (step.phase, step.planned, step.spend is not None and step.spend.counts) == ("holding", True, False)
            assert job.generation is not None and step.spend is not None
            self.made_room.append(job.name)
            generation = job.generation.model_copy(update={"state": "ended"})
            entry = {str(job.generation.number): step.spend}
            change = {
                "phase": "holding",
                "generation": generation,
                "since": self.now,
                "budget": {**job.budget, **entry},
            }
            self.jobs[job.uid] = job.model_copy(update=change)
            return
        if job.phase == "running" and job.generation is not None and len(step.members) < len(job.generation.members):
            assert step.planned, "no step is lost"
            self.resized.append(job.name)
        generation = make_generation([*step.members], number=number, since=self.now).model_copy(
            update={"members": step.members}
        )
        change = {
            "phase": "running",
            "generation": generation,
            "since": self.now,
            "last_number": number,
            "active": generation.token,
        }
        self.jobs[job.uid] = job.model_copy(update={**change, "first_active": 0})

    def size(self, name: str) -> int:
        """Nodes that the job runs on."""
        job = self.jobs[name]
        return len(job.generation.members) if job.phase == "running" and job.generation is not None else 0

    def use(self) -> dict[str, int]:
        """Nodes by queue."""
        found = Counter({queue.name: 0 for queue in self.queues.queues})
        for name, job in self.jobs.items():
            found[job.spec.queue] += self.size(name)
        return dict(found)

    def why(self, name: str) -> str:
        """Why the job waits."""
        return " ".join(decide(self.view(), self.jobs[name], WALL).why)

    def explained(self, name: str) -> tuple[str, ...]:
        """The same in more sentences, as ``describe`` has it."""
        return explain(self.view(), self.jobs[name], WALL)


# --- Volcano


def test_volcano_a_queue_takes_back_what_it_deserves() -> None:
    """Capacity plugin guide: queue1 deserves 2 of 8 CPUs, queue2 the other 6. Eight pods of queue1 run, eight of queue2
    come: 2 and 6 run then."""
    site = Site(8, Queue(name="queue1"), Queue(name="queue2", weight=3))
    site.submit("queue1", "demo-1-", count=8)
    site.settle()
    assert site.use() == {"queue1": 8, "queue2": 0}
    site.submit("queue2", "demo-2-", count=8)
    site.settle()
    assert site.use() == {"queue1": 2, "queue2": 6}
    assert len(site.made_room) == 6, "no more than have to"


def test_volcano_the_same_of_one_elastic_gang_stops_nobody() -> None:
    """Better: where Volcano evicts six pods of a job, a gang goes on with two nodes and loses no step."""
    site = Site(8, Queue(name="queue1"), Queue(name="queue2", weight=3))
    site.submit("queue1", "demo-1", 1, 8)
    site.settle()
    site.submit("queue2", "demo-2", 6)
    site.settle()
    assert (site.size("demo-1"), site.size("demo-2")) == (2, 6)
    assert (site.made_room, site.resized) == ([], ["demo-1"])


def test_volcano_what_is_guaranteed_is_not_taken() -> None:
    """Capacity design, story 4, in tens: queue1 has a capability of 6 and a guarantee of 2. It uses 6 of 10 while
    queue2 is idle; queue2 takes back 4 of these, and not the 2."""
    guarded = Queue(name="queue1", weight=0.1, guarantee=Amount(nodes=2), capability=Amount(nodes=6))
    site = Site(10, guarded, Queue(name="queue2", weight=10))
    site.submit("queue1", "a", count=8)
    site.settle()
    assert site.use() == {"queue1": 6, "queue2": 0}
    site.submit("queue2", "b", count=10)
    site.settle()
    assert site.use() == {"queue1": 2, "queue2": 8}


def test_volcano_gangs_are_evicted_whole() -> None:
    """gangreclaim: two gangs of two fill four CPUs, two of which the owner deserves. One of them goes, the other stays
    whole; Volcano's older reclaim may break both."""
    site = Site(4, Queue(name="borrower"), Queue(name="owner"))
    site.submit("borrower", "victim", 2, count=2)
    site.settle()
    site.submit("owner", "requester", 2)
    site.settle()
    assert site.use() == {"borrower": 2, "owner": 2}
    assert (site.made_room, site.resized) == (["victim1"], [])


def test_volcano_what_is_above_a_gangs_minimum_goes_first() -> None:
    """gangreclaim: tasks above ``minAvailable`` are taken before a whole gang is."""
    site = Site(6, Queue(name="borrower"), Queue(name="owner"))
    site.submit("borrower", "fixed", 3)
    site.submit("borrower", "surplus", 1, 3)
    site.settle()
    site.submit("owner", "requester", 2)
    site.settle()
    assert (site.size("fixed"), site.size("surplus"), site.size("requester")) == (3, 1, 2)
    assert site.made_room == []


@pytest.mark.parametrize(
    ("borrower", "because"),
    [
        (Queue(name="borrower", reclaimable=False), "queue borrower is not reclaimable"),
        (Queue(name="borrower", weight=9), "with it queue owner would have 2 nodes, its part by weight is 0.4"),
    ],
)
def test_volcano_the_requester_stays_pending(borrower: Queue, because: str) -> None:
    """gangreclaim: where the victims' queue is not reclaimable, or does not use more than it deserves. The job that
    waits shows which."""
    site = Site(4, borrower, Queue(name="owner"))
    site.submit("borrower", "victim", 2, count=2)
    site.settle()
    site.submit("owner", "requester", 2)
    site.settle()
    assert site.use() == {"borrower": 4, "owner": 0}
    assert site.why("requester") == "needs 2 nodes, 0 fit"
    assert f"nobody makes room for it: {because}" in site.explained("requester")


def test_volcano_a_gang_starts_whole_or_not() -> None:
    """``minAvailable: 3``: of two such gangs on five nodes one runs, and the other holds nothing."""
    site = Site(5, Queue(name="q"))
    site.submit("q", "gang", 3, count=2)
    site.settle()
    assert (site.size("gang0"), site.size("gang1")) == (3, 0)
    site.end("gang0")
    site.settle()
    assert site.size("gang1") == 3


def test_volcano_priority_within_a_queue_orders_and_does_not_stop() -> None:
    """gangpreempt, and Kueue's ``withinClusterQueue: LowerPriority``: the gang of higher priority runs at once, and one
    of the others is evicted. Here it is the next to start, and nobody is stopped by a number of his own team (ADR 64).
    To have what they do, the urgent gang goes to a queue of its own."""
    site = Site(4, Queue(name="q"))
    site.submit("q", "low", 2, count=2, priority=10)
    site.settle()
    site.submit("q", "later", 2, priority=10)
    site.submit("q", "high", 2, priority=100)
    site.settle()
    assert (site.size("high"), site.made_room) == (0, [])
    site.end("low0")
    site.settle()
    assert (site.size("high"), site.size("later")) == (2, 0)
    urgent = Site(4, Queue(name="q"), Queue(name="urgent", weight=0.01, priority=1, guarantee=Amount(nodes=2)))
    urgent.submit("q", "low", 2, count=2, priority=10)
    urgent.settle()
    urgent.submit("urgent", "high", 2)
    urgent.settle()
    assert (urgent.size("high"), urgent.made_room) == (2, ["low1"])


# --- Kueue


def test_kueue_a_limit_to_borrowing() -> None:
    """ClusterQueue page: team-a has 9 of a cohort's 21 CPUs and ``borrowingLimit: 1``, team-b 12 and none. Alone,
    team-a uses up to 10 and team-b all 21."""
    team_a = Queue(name="team-a", guarantee=Amount(nodes=9), capability=Amount(nodes=10))
    team_b = Queue(name="team-b", guarantee=Amount(nodes=12))
    for team, most in (("team-a", 10), ("team-b", 21)):
        site = Site(21, team_a, team_b)
        site.submit(team, "w", count=22)
        site.settle()
        assert site.use()[team] == most


def test_kueue_nominal_quota_is_taken_back_irrespective_of_priority() -> None:
    """``reclaimWithinCohort: Any``: team-b borrows, with jobs of a high priority; team-a gets its quota back. Those of
    the lowest priority go, and of these the ones that were admitted last."""
    quota = Amount(nodes=3)
    site = Site(6, Queue(name="team-a", guarantee=quota), Queue(name="team-b", guarantee=quota))
    site.submit("team-b", "old", count=2, priority=50)
    site.submit("team-b", "urgent", count=2, priority=100)
    site.submit("team-b", "new", count=2, priority=50)
    site.settle()
    site.submit("team-a", "mine", count=3)
    site.settle()
    assert site.use() == {"team-a": 3, "team-b": 3}
    assert sorted(site.made_room) == ["new0", "new1", "old1"]


def test_kueue_who_asks_for_more_than_its_quota_stops_nobody() -> None:
    """Classic preemption: only where the queue is within its nominal quota after that."""
    quota = Amount(nodes=3)
    site = Site(6, Queue(name="team-a", guarantee=quota), Queue(name="team-b", guarantee=quota))
    site.submit("team-b", "w", count=6)
    site.settle()
    site.submit("team-a", "large", 4)
    site.settle()
    assert (site.use(), site.made_room) == ({"team-a": 0, "team-b": 6}, [])
    over = "with it queue team-a would have 4 nodes, its part by weight is 3, its guarantee 3"
    assert f"nobody makes room for it: {over}" in site.explained("large")


def test_kueue_as_few_as_possible_are_preempted() -> None:
    """Who was chosen first is left alone where those who were chosen later are enough: the job of four makes room, and
    so neither the younger one of one node has to, nor the elastic one to give what it has above its minimum."""
    site = Site(6, Queue(name="team-a"), Queue(name="team-b", weight=2))
    site.submit("team-a", "four", 4)
    site.submit("team-a", "elastic", 1, 2)
    site.settle()
    site.submit("team-b", "mine", 4)
    site.settle()
    assert (site.size("mine"), site.size("elastic")) == (4, 2)
    assert (site.made_room, site.resized) == (["four"], [])
    site = Site(5, Queue(name="team-a"), Queue(name="team-b", weight=4))
    site.submit("team-a", "four", 4)
    site.submit("team-a", "one", 1)
    site.settle()
    site.submit("team-b", "mine", 4)
    site.settle()
    assert (site.size("mine"), site.size("one"), site.made_room) == (4, 1, ["four"])


def test_kueue_strict_and_best_effort_fifo() -> None:
    """An older job that does not fit holds up all younger ones (``StrictFIFO``), or none (``BestEffortFIFO``), and may
    starve. Here what is idle is reserved for it (ADR 66), unless it could not start on an empty cluster."""
    site = Site(4, Queue(name="q"))
    site.submit("q", "runs", 3)
    site.settle()
    site.submit("q", "large", 2)
    site.submit("q", "small", 1)
    site.settle()
    assert (site.size("large"), site.size("small")) == (0, 0)
    assert "reserved for job large" in site.why("small")
    site = Site(4, Queue(name="q"))
    site.submit("q", "runs", 3)
    site.settle()
    site.submit("q", "too-large", 5)
    site.submit("q", "small", 1)
    site.settle()
    assert site.size("small") == 1


def test_kueue_fair_sharing_evens_out_what_is_borrowed() -> None:
    """Fair sharing, ``LessThanOrEqualToFinalShare``: whoever asks may preempt as long as its share with the job is no
    larger than the other's without the one that goes. 3, 1 and 0 of four become 2, 1 and 1, and it stays so."""
    site = Site(4, Queue(name="a"), Queue(name="b"), Queue(name="c"))
    site.submit("a", "a", count=3)
    site.submit("b", "b")
    site.settle()
    for team in "abc":
        site.submit(team, f"{team}-more", count=3)
    site.settle()
    assert site.use() == {"a": 2, "b": 1, "c": 1}
    assert len(site.made_room) == 1


def test_kueue_partial_admission() -> None:
    """A job of parallelism 8 with a minimum of 3 starts with the 5 that its quota leaves; here it grows as well."""
    site = Site(10, Queue(name="q", capability=Amount(nodes=7)))
    site.submit("q", "other", 2)
    site.settle()
    site.submit("q", "wide", 3, 8)
    site.settle()
    assert site.size("wide") == 5
    site.end("other")
    site.settle()
    assert site.size("wide") == 7


# --- KAI Scheduler


def test_kai_the_share_of_a_parent_is_divided_among_its_children() -> None:
    """Fairness page: resources are divided among the queues at the top, and each one's part among its children."""
    tree = Queue(name="lab"), Queue(name="x", parent="lab"), Queue(name="y", parent="lab"), Queue(name="shop")
    site = Site(8, *tree)
    site.submit("x", "x", count=8)
    site.settle()
    for team in ("shop", "y", "x"):
        site.submit(team, f"{team}-more", count=8)
    site.settle()
    assert site.use() == {"lab": 0, "x": 2, "y": 2, "shop": 4}


def test_kai_weights_divide_all_and_not_only_what_is_above_quotas() -> None:
    """With quotas of 2 and 2, eight GPUs and over-quota weights of 3 and 1, KAI gives 2 + 3 and 2 + 1. Here a weight is
    of all, and a guarantee is the least that a queue has: 6 and 2."""
    quota = Amount(nodes=2)
    site = Site(8, Queue(name="a", weight=3, guarantee=quota), Queue(name="b", guarantee=quota))
    for team in "ab":
        site.submit(team, f"{team}-", count=8)
    site.settle()
    assert site.use() == {"a": 6, "b": 2}


def test_kai_who_is_furthest_below_its_share_goes_first() -> None:
    """Fairness page, queue order: of two nodes that come free both go to the queue that has less."""
    site = Site(6, Queue(name="a"), Queue(name="b"))
    site.submit("a", "a", count=4)
    site.submit("b", "b", 2)
    site.settle()
    site.submit("a", "a-more", count=2)
    site.submit("b", "b-more")
    site.end("a0")
    site.settle()
    assert (site.size("b-more"), site.use()) == (1, {"a": 3, "b": 3})


# --- Slurm


def test_slurm_no_job_is_preempted_before_it_has_run_for_a_while() -> None:
    """``PreemptExemptTime``, and KAI's ``reclaimMinRuntime``: a minute here."""
    site = Site(2, Queue(name="a"), Queue(name="b"))
    site.submit("a", "a", count=2)
    site.settle_now()
    site.submit("b", "b")
    site.settle_now()
    assert (site.size("b"), site.made_room) == (0, [])
    assert "makes room when it has run for 60 s" in site.why("a1")
    assert "job a1 makes room for it when it has run for 60 s" in site.explained("b")
    site.now += round(1000 * MIN_RUNTIME)
    site.settle_now()
    assert (site.size("b"), site.made_room) == (1, ["a1"])


def test_slurm_who_was_preempted_is_requeued_and_returns() -> None:
    """``PreemptMode=REQUEUE``: in line again; here with what it saved, and at no cost to its restarts."""
    site = Site(2, Queue(name="a"), Queue(name="b"))
    site.submit("a", "a", count=2)
    site.settle()
    site.submit("b", "b")
    site.settle()
    assert site.size("a1") == 0
    site.end("b")
    site.settle()
    assert site.size("a1") == 1
    assert not any(entry.counts for entry in site.jobs["a1"].budget.values())


def test_slurm_a_groups_limit_holds_up_only_the_group() -> None:
    """``GrpTRES``: who is over it waits with the reason ``AssocGrpNodeLimit``; others pass. Here the reason is a
    sentence that names who holds it."""
    site = Site(6, Queue(name="capped", capability=Amount(nodes=2)), Queue(name="free"))
    site.submit("capped", "holds", 2)
    site.settle()
    site.submit("capped", "waits")
    site.submit("free", "passes", 3)
    site.settle()
    assert (site.size("waits"), site.size("passes")) == (0, 3)
    assert site.why("waits") == ("queue capped may use 2 nodes and has 2 in use; this needs 1 more (job holds holds 2)")


def test_slurm_fair_tree_compares_siblings_first() -> None:
    """Fair tree: a user of an account that uses less than its sibling goes before every user of that one, also where he
    himself uses more."""
    tree = Queue(name="lab"), Queue(name="x", parent="lab"), Queue(name="y", parent="lab"), Queue(name="shop")
    site = Site(6, *tree)
    site.submit("x", "x", count=3)
    site.submit("shop", "shop", 2)
    site.settle()
    site.submit("y", "of-lab")
    site.submit("shop", "of-shop")
    places = line.places(site.view())
    assert places["of-shop"] < places["of-lab"], "y uses nothing, and its lab more than the shop"
