"""Directed schedules with a store in which somebody removes what is there, or writes over it: training goes on, and
recovers."""

from __future__ import annotations

import asyncio

import pytest

from nodeagent.model.base import RECORD_VERSION
from nodeagent.model.job import BudgetEntry
from nodeagent.model.node import Cordon
from nodeagent.store import client, codec
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.keys import prefix
from nodeagent.store.nodetable import FoundNodes, NodeTable
from tests.groups import one_in, seeds
from tests.inprocess.server import CLUSTER, HereStore
from tests.sim.cluster import TIMING, SimCluster
from tests.sim.mutants import change
from tests.sim.parts import sim_spec
from tests.sim.provocations import store_loses_writes
from tests.sim.test_directed import running, simulate
from tests.sim.test_failsafe import alive, members, pids, started
from tests.submitting import submit_one

DAMAGES = {
    "job": ("job:uid-j",),
    "node": ("node:n2",),
    "names": ("names",),
    "alloc": ("alloc:n1", "alloc:n2", "alloc:n3"),
    "highest": ("highest",),
    "lease": ("lease",),
    "changes": ("changes",),
    "all": ("job:uid-j", "names", "alloc:n1", "alloc:n2", "alloc:n3", "highest", "lease"),
}
"""What is removed, by what it is called: keys."""


@pytest.mark.parametrize("what", one_in(2, DAMAGES))
def test_what_is_removed_while_a_job_runs_is_given_back_and_a_worker_that_dies_is_replaced(what: str) -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        before, number = pids(c), _number(c)
        c.checker.store_loses()
        c.server.take(*DAMAGES[what])
        await asyncio.sleep(10)
        assert pids(c) == before, "nothing that runs is hurt"
        assert (_number(c), c.job("j").phase) == (number, "running")
        c.nodes["n2"].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: _number(c) > number and c.whole("j"), 60, "the worker is replaced")
        assert len(c.server.state.jobs) == 1

    simulate(4, scenario)


WRITTEN_OVER = [
    *((key, "") for key in ("job:uid-j", "node:n2", "names", "alloc:n1", "highest", "lease", "changes")),
    *(("job:uid-j", field) for field in ("control", "spec", "since", "last_number", "generation_number",
                                    "generation_cause")),
    ("node:n2", "seq"), ("node:n2", "facts"),
]  # fmt: skip
"""Keys and fields."""
WRITTEN = [
    *((key, field, text) for text in ("", "{") for key, field in WRITTEN_OVER),
    ("meta", "cluster_uid", "evil"),
    ("meta", "credit", "-1"),
]
"""With what is there then."""


@pytest.mark.parametrize("damage", one_in(3, WRITTEN), ids=" ".join)
def test_what_is_written_over_while_a_job_runs_is_given_back_too(damage: tuple[str, str, str]) -> None:
    """A field that nobody can read, or (no field) a key that has become a text. A field with nothing in it passed for
    JSON where the store looks for damage, and the job was stuck for ever."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        before, number = pids(c), _number(c)
        c.checker.store_loses()
        c.damaged = True
        c.server.spoil(*damage)
        await asyncio.sleep(10)
        assert pids(c) == before, "nothing that runs is hurt"
        c.nodes["n2"].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: c.find("j") is not None and _number(c) > number and c.whole("j"), 60, "it is replaced")
        assert len(c.server.state.jobs) == 1

    simulate(4, scenario)


@pytest.mark.parametrize("field", ["seq", "dead"])
def test_what_only_one_place_says_of_a_node_keeps_it_from_nothing(field: str) -> None:
    """``seq``: each of its beats came too late, so that it never learned of anything, and nobody noticed. ``dead``: its
    workers ended with the next recovery, and an agent that started ended."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        before = pids(c)
        life = c.server.state.nodes["n2"].incarnation.life
        c.checker.store_loses()
        c.damaged = True
        c.server.spoil("node:n2", field, {"seq": "999999999", "dead": life}[field])
        c.server.take("names")
        await asyncio.sleep(10)
        await c.nodes["n2"].kill_agent()
        c.nodes["n2"].start_agent()
        await asyncio.sleep(10)
        assert pids(c) == before, "nothing that runs is hurt"
        c.nodes["n2"].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: c.whole("j") and c.job("j").restarts == 1, 60, "it is replaced")

    simulate(4, scenario)


def test_a_mark_that_a_job_was_removed_ends_none_of_its_workers_when_all_is_read_anew() -> None:
    """After the next recovery no agent knew of the job any more, and all of its workers had ended."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        before = pids(c)
        c.checker.store_loses()
        c.damaged = True
        c.server.data.zadd(f"{prefix(CLUSTER)}changes", 3, "gone:job:uid-j")
        c.server.take("names")
        await asyncio.sleep(15)
        assert pids(c) == before, "nothing that runs is hurt"
        c.nodes["n2"].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: c.whole("j") and c.job("j").restarts == 1, 60, "it is replaced")

    simulate(4, scenario)


GHOST = '{"node":"x","life":"x","devices":["cpu0"],"group_rank":5,"first_rank":9,"workers":1}'
UNSEEN = {
    "phase": "failed",
    "max": "0",
    "min": "9",
    "array": "x",
    "control": '{"rev":99,"target":3,"restart":0}',
    "active_id": "x",
    "active_number": "9",
    "holder:x": GHOST,
    "member:x": GHOST,
    "missing:x": '"x"',
    "failsafe_member:x": '"x"',
    "generation_failsafe_member:x": '"x"',
    "checkpoint": '{"name":"evil","step":9,"number":999999,"order":1}',
    "spec": '{"roles":[],"completes":"x"}',
    "not_before": "99999999999",
}
"""Fields of a job that runs, with what somebody writes into one of them and leaves the revision as it is."""


@pytest.mark.parametrize("restarts", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "quiet", [pytest.param(0.0, id="at once"), pytest.param(10.0, id="later", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("field", one_in(3, UNSEEN))
def test_one_field_of_a_job_that_no_difference_brings_keeps_it_from_nothing(
    field: str, quiet: float, restarts: bool
) -> None:
    """No agent read it: every proposal was refused, or its generation formed for ever, and nobody noticed.
    ``restarts``: an agent that reads the whole record meanwhile."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        c.nodes[members(c)[0]].machine.commit_request("uid-j", 1)
        await c.until(lambda: c.job("j").checkpoint is not None, 10, "committed")
        await asyncio.sleep(2)
        before, number = pids(c), _number(c)
        value = c.server.value("job:uid-j")
        assert isinstance(value, dict)
        await c.damage_store({"job:uid-j": {**value, field: UNSEEN[field]}})
        await asyncio.sleep(quiet)
        if restarts:
            await c.nodes["n3"].kill_agent()
            c.nodes["n3"].start_agent()
            await asyncio.sleep(quiet)
        assert pids(c) == before, "nothing that runs is hurt"
        c.nodes[members(c)[-1]].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: c.find("j") is not None and _number(c) > number and c.whole("j"), 40, "replaced")
        leader = c.nodes[members(c)[0]].machine
        leader.commit_request("uid-j", 1)
        await c.until(lambda: leader.pods["uid-j"].commit_request is None, 40, "and commits")
        checkpoint = c.job("j").checkpoint
        assert checkpoint is not None and checkpoint.number == _number(c)

    simulate(4, scenario)


UNREADABLE_WITH = frozenset({"max", "min", "array", "spec"})
"""Those with which nobody can read the record."""


@pytest.mark.parametrize("restarted", [("n3",), ("n1", "n2", "n3", "n4")], ids=["one", "all"])
@pytest.mark.parametrize(
    "field",
    [
        pytest.param(field, marks=() if field in ("holder:x", "member:x") else pytest.mark.slow)
        for field in UNSEEN
        if field not in UNREADABLE_WITH
    ],
)
def test_such_a_field_is_found_by_agents_that_start_anew(field: str, restarted: tuple[str, ...]) -> None:
    """They believed what they read, and gave it back as what they knew: if one of them came first, or nobody else was
    left, a job with a member too many was refused for ever."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        await asyncio.sleep(3)  # so that the disks have it
        before, number, job = pids(c), _number(c), c.job("j")
        for name in restarted:
            await c.nodes[name].kill_agent()
        value = c.server.value("job:uid-j")
        assert isinstance(value, dict)
        c.checker.store_loses()
        c.damaged = True
        c.server.overwrite("job:uid-j", {**value, field: UNSEEN[field]})
        c.checker.disbelieved.add("uid-j")
        for name in restarted:
            c.nodes[name].start_agent()
        await asyncio.sleep(10)
        assert (pids(c), c.job("j")) == (before, job), "nothing that runs is hurt, and what the disks have is back"
        events = [event.text for event in c.server.state.events if event.kind == "StoreDamaged"]
        assert events and "job:uid-j" in events[0], "the key is named"
        c.nodes[members(c)[-1]].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: _number(c) > number and c.whole("j"), 40, "replaced")

    simulate(4, scenario)


def test_agents_that_start_anew_find_no_damage_where_there_is_none() -> None:
    """A job that has been formed anew, has a checkpoint and a holder, beside one that waits."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        await c.submit("k", 4, 4, 4)
        c.nodes[members(c)[0]].machine.commit_request("uid-j", 1)
        await c.until(lambda: c.job("j").checkpoint is not None, 10, "committed")
        number = _number(c)
        c.nodes[members(c)[-1]].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: _number(c) > number and c.whole("j"), 40, "formed anew")
        await asyncio.sleep(3)
        for node in c.nodes.values():
            await node.kill_agent()
            node.start_agent()
        await asyncio.sleep(5)
        assert "StoreDamaged" not in {event.kind for event in c.server.state.events}
        assert all(node.agent is not None and node.agent.certain for node in c.nodes.values())

    simulate(4, scenario)


@pytest.mark.parametrize("what", ["older", "none", "unsigned"])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_checkpoint_that_is_no_longer_the_newest_starts_nothing_and_is_put_back(what: str, restarts: bool) -> None:
    """Somebody writes it as a step would, just before a worker dies. The next generation began from the older one, or
    the job stood for ever. ``restarts``: no agent has the newer one in its memory."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        leader, texts = c.nodes[members(c)[0]].machine, ["{}"]
        for order in (1, 2):
            leader.commit_request("uid-j", order)
            await c.until(lambda: leader.pods["uid-j"].commit_request is None, 10, "committed")
            texts.append(c.server.data.hget(f"{prefix(CLUSTER)}job:uid-j", "checkpoint") or "")
        await asyncio.sleep(3)
        newest, number = c.job("j").checkpoint, _number(c)
        evil = '{"name":"evil","step":9,"number":999999,"order":1}'
        if restarts:
            for node in c.nodes.values():
                await node.kill_agent()
        c.checker.store_loses()
        c.server.run(
            "local j = job_read(A.uid) j.checkpoint = A.text ~= '' and A.text or nil job_save(j)",
            uid="uid-j", text={"older": texts[1], "none": "", "unsigned": evil}[what],
        )  # fmt: skip
        if restarts:
            for node in c.nodes.values():
                node.start_agent()
        c.nodes[members(c)[-1]].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: _number(c) > number and c.whole("j"), 60, "replaced")
        assert (c.job("j").checkpoint, _number(c)) == (newest, number + 1)
        assert newest is not None
        for name in members(c):
            environments = c.nodes[name].machine.pods["uid-j"].env
            assert {env["NODEAGENT_CHECKPOINT"] for env in environments} == {newest.name}

    simulate(4, scenario)


SPENT = BudgetEntry(at=1, wall=0.0, kind="worker_failed", counts=True).to_json()


@pytest.mark.parametrize("what", ["spend", "members", "member"])
def test_an_entry_that_no_agent_can_count_by_ends_none_of_them(what: str) -> None:
    """Nothing signs it: every member's agent ended, one after the other, and ended again after each start."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        before, agents, number = pids(c), [node.agent for node in c.nodes.values()], _number(c)
        field = f"member:{members(c)[0]}"
        text = c.server.data.hget(f"{prefix(CLUSTER)}job:uid-j", field) or ""
        c.checker.store_loses()
        c.damaged = True
        if what == "members":
            c.server.run("local j = job_read(A.uid) put_entries(j, 'member', {}) job_save(j)", uid="uid-j")
        else:
            wrong = {"spend:x": SPENT} if what == "spend" else {field: text.replace('"node":"', '"node":"x')}
            c.server.run(
                "local j = job_read(A.uid) for f, t in pairs(A.wrong) do j[f] = t end job_save(j)",
                uid="uid-j", wrong=wrong,
            )  # fmt: skip
        await asyncio.sleep(15)
        assert (pids(c), [node.agent for node in c.nodes.values()]) == (before, agents), "nothing that runs is hurt"
        events = [event.text for event in c.server.state.events if event.kind == "StoreDamaged"]
        assert events and "job:uid-j" in events[0], "the key is named"
        c.nodes["n2"].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: _number(c) > number and c.whole("j"), 60, "it is replaced")
        assert [node.agent for node in c.nodes.values()] == agents

    simulate(4, scenario)


FALSEHOODS = [("start", "9"), ("start", "0"), ("life", "x"), ("lost", "1"), ("left", "1")]


@pytest.mark.parametrize(("field", "text"), FALSEHOODS)
def test_a_nodes_record_that_says_something_else_ends_neither_its_agent_nor_its_workers(field: str, text: str) -> None:
    """Its agent took a record with another start for a newer agent's, and ended; its workers were stopped."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        before, node = pids(c), c.nodes["n2"]
        agent = node.agent
        c.checker.store_loses()
        c.damaged = True
        c.server.spoil("node:n2", field, text)
        await asyncio.sleep(10)
        assert (pids(c), node.agent) == (before, agent), "nothing that runs is hurt"
        events = [event.text for event in c.server.state.events if event.kind == "StoreDamaged"]
        assert events and "node:n2" in events[0], "the key is named"
        node.machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: c.whole("j") and c.job("j").restarts == 1, 60, "it is replaced")

    simulate(4, scenario)


@pytest.mark.parametrize(
    ("field", "text"), [pytest.param(*one, marks=() if one[0] == "lost" else pytest.mark.slow) for one in FALSEHOODS]
)
def test_nor_is_it_believed_while_its_agent_is_dead(field: str, text: str) -> None:
    """The job re-forms meanwhile: never beside workers that the record denies."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        await c.nodes["n2"].kill_agent()
        c.checker.store_loses()
        c.damaged = True
        c.server.spoil("node:n2", field, text)
        await c.operate("j", restart=1)
        await asyncio.sleep(10)
        c.nodes["n2"].start_agent()
        await c.until(lambda: c.whole("j") and c.job("j").restarts, 60, "re-formed")

    simulate(4, scenario)


@pytest.mark.parametrize("other", ["node:n3", "job:uid-j"])
def test_another_record_in_the_place_of_a_nodes(other: str) -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        before = pids(c)
        _replace(c, "node:n2", other)
        await asyncio.sleep(10)
        assert pids(c) == before, "nothing that runs is hurt"
        assert c.server.state.nodes["n2"].id == "n2"

    simulate(4, scenario)


@pytest.mark.parametrize("agents_restart", [False, True])
def test_another_jobs_record_in_the_place_of_a_job_that_waits(agents_restart: bool) -> None:
    """No node runs it, so that no beat names it; whoever read everything anew took it for the other job, and the store
    removed that one. Both were lost."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        await c.submit("k", 4, 4, 4)
        await asyncio.sleep(5)
        before = pids(c)
        _replace(c, "job:uid-k", "job:uid-j")
        if agents_restart:
            for node in list(c.nodes.values())[:2]:
                await node.kill_agent()
                node.start_agent()
        await asyncio.sleep(20)
        assert set(c.server.state.jobs) == {"uid-j", "uid-k"}
        assert pids(c) == before, "nothing that runs is hurt"
        c.checker.check_kept()

    simulate(4, scenario)


@pytest.mark.parametrize("restarted", ["", "n1", "n4"], ids=["nobody", "a member's agent", "another agent"])
def test_an_older_record_of_a_job_starts_no_second_generation(restarted: str) -> None:
    """An agent that starts right then reads nothing but the older record."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        older = c.server.value("job:uid-j")
        assert older is not None
        for _ in range(2):
            number = _number(c)
            c.nodes[members(c)[0]].machine.worker_ends("uid-j", 0, signal=9)
            await c.until(lambda: _number(c) > number and c.whole("j"), 60, "re-formed")  # noqa: B023
        await c.cordon("n3", Cordon(reason="test", by="test", at=0.0, drain=True))
        await c.until(lambda: "n3" not in members(c) and c.whole("j"), 60, "moved")
        number, before = _number(c), pids(c)
        await c.damage_store({"job:uid-j": older})
        if restarted:
            await c.nodes[restarted].kill_agent()
            c.nodes[restarted].start_agent()
        await asyncio.sleep(15)
        assert (_number(c), pids(c)) == (number, before)
        events = [event.text for event in c.server.state.events if event.kind == "StoreDamaged"]
        assert events and "job:uid-j" in events[-1], "the key is named"

    simulate(4, scenario)


@pytest.mark.parametrize("key", ["changes", "names", "highest"])
def test_an_older_list_of_the_store_makes_no_second_job_of_a_name(key: str) -> None:
    """Where the list of all records did not name a job, a second one of its name was taken."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("other", 1, 2, 2)
        await running(c, 2, "other")
        older = c.server.value(key)
        assert older is not None
        await started(c, 1, 2)
        before, number = pids(c), _number(c)
        await c.damage_store({key: older})
        with pytest.raises(StoreRefusedError) as refused:
            await submit_one(HereStore(c.server), "uid-2", sim_spec("j", 1, 1, 1), 0, 0.0, "test", "again")
        assert refused.value.code in ("name_taken", "recovering")
        await asyncio.sleep(15)
        assert (_number(c), pids(c)) == (number, before)
        assert set(c.server.state.jobs) == {"uid-j", "uid-other"}

    simulate(4, scenario)


@pytest.mark.parametrize("seed", seeds([1, 2], range(3, 9)))
def test_an_older_list_of_revisions_is_put_right_once(seed: int) -> None:
    """It named all records, with earlier revisions: each recovery left it so, and the next one began at once. And an
    agent that read by it that nothing had changed gave back the generation before beside the one that ran."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        older, number = c.server.value("changes"), _number(c)
        assert older is not None
        c.nodes[members(c)[1]].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: _number(c) > number and c.whole("j"), 60, "re-formed")
        await c.damage_store({"changes": older})
        await asyncio.sleep(20)
        assert [event.kind for event in c.server.state.events].count("StoreDamaged") == 1
        number = _number(c)
        c.nodes[members(c)[1]].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: _number(c) > number and c.whole("j"), 60, "re-formed again")

    simulate(4, scenario, seed=seed)


def _replace(c: SimCluster, key: str, other: str) -> None:
    """Somebody writes what the other record holds over this one."""
    value = c.server.value(other)
    assert value is not None
    c.checker.store_loses()
    c.damaged = True
    c.server.overwrite(key, value)


@pytest.mark.parametrize("what", ["job", "lease", "all"])
def test_it_is_given_back_also_where_a_node_dies_with_it(what: str) -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        c.checker.store_loses()
        c.server.take(*DAMAGES[what])
        victim = members(c)[-1] if what == "lease" else "n2"
        await c.nodes[victim].power_cut()
        await c.until(lambda: c.whole("j") and victim not in members(c), 120, "re-formed without it")

    simulate(4, scenario)


UNREADABLE = "submitted"
"""A field of a job that no step looks at: only who reads the record finds that it cannot be read."""


def test_a_person_who_removes_a_record_that_cannot_be_read_goes_on_once_it_is_given_back() -> None:
    """One looked for the job at the moment of the removal, before anybody could have noticed it, and took it for lost;
    what one had asked for was never done."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        value = c.server.value("job:uid-j")
        assert isinstance(value, dict)
        await c.damage_store({"job:uid-j": {**value, UNREADABLE: "x"}})
        await c.operate("j", desired="pause")
        c.checker.check_kept()
        assert c.job("j").control.desired == "pause"
        await c.until(lambda: c.job("j").phase == "paused" and not alive(c), 60, "it pauses")

    simulate(4, scenario)


def test_a_job_that_nobody_gives_back_then_is_found_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long one waits for it."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        value = c.server.value("job:uid-j")
        assert isinstance(value, dict)
        await c.damage_store({"job:uid-j": {**value, UNREADABLE: "x"}})
        change(monkeypatch, ("local function restore_job(new)\n", "local function restore_job(new)\n  do return end\n"))
        await c.operate("j", desired="pause")

    with pytest.raises(ExceptionGroup) as failed:
        simulate(4, scenario)
    assert failed.group_contains(AssertionError, match="job:uid-j, which was removed by hand, is given back")


def test_a_job_that_is_deleted_by_its_owner_is_deleted() -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        await c.operate("j", desired="stop", delete=True)
        await c.until(lambda: not c.server.state.jobs and not alive(c), 60, "gone")
        await asyncio.sleep(20)
        assert not c.server.state.jobs
        assert "StoreDamaged" not in {event.kind for event in c.server.state.events}

    simulate(4, scenario)


@pytest.mark.parametrize("version", [9, 0])
def test_another_version_under_running_agents_ends_none_of_them(version: int) -> None:
    """Found by strangers: every agent ended for good."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        before = pids(c)
        c.server.run("redis.call('HSET', META, 'version', A.version)", version=version)
        await asyncio.sleep(60)
        assert pids(c) == before
        assert all(n.agent and n.agent.health().store_unusable for n in c.nodes.values())
        c.server.data.hset(f"{prefix(CLUSTER)}meta", "version", RECORD_VERSION)
        await asyncio.sleep(5)
        assert pids(c) == before
        c.nodes["n2"].machine.worker_ends("uid-j", 0, signal=9)
        await running(c, 3)

    simulate(4, scenario)


def test_of_more_silent_nodes_than_a_page_none_counts_as_live() -> None:
    """Found by strangers: those beyond the first 256 did, for a day."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 2)
        template = c.server.state.nodes["n1"]
        for number in range(300):
            name = f"old{number:03}"
            fields = codec.encode_node(template.model_copy(update={"id": name, "rev": 0})) | {"seq": "0", "dead": ""}
            c.server.run("node_save(A.node) redis.call('ZADD', LEASE, int(served), A.node.id)", node=fields)
        await asyncio.sleep(2)
        victim = members(c)[-1]
        await c.nodes[victim].power_cut()
        await c.until(lambda: c.whole("j") and victim not in members(c), TIMING.lease + 20, "re-formed without it")
        cluster = next(n.agent for n in c.nodes.values() if n.agent).cluster()
        assert not any(cluster.live(f"old{number:03}") for number in range(300))

    simulate(4, scenario)


def _number(c: SimCluster) -> int:
    generation = c.job("j").generation
    return generation.number if generation is not None else 0


def test_a_primary_that_comes_back_as_the_same_process_may_have_lost_writes() -> None:
    """Found by strangers: a fail-over there and back kept the run id, and no recovery opened."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        number = _number(c)
        rolling = asyncio.ensure_future(c.roll_back_store(6, same_process=True))
        await asyncio.sleep(0.5)
        c.nodes["n2"].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: _number(c) > number and c.whole("j"), 5, "re-formed in what is lost")
        newer, before = _number(c), pids(c)
        await rolling
        assert _number(c) == number
        await asyncio.sleep(15)
        assert (_number(c), pids(c)) == (newer, before), "the agents gave it back, and nothing was hurt"
        assert "StoreRestored" in {event.kind for event in c.server.state.events}

    simulate(4, scenario)


def test_such_a_primary_that_meets_those_first_who_know_less_decides_nothing() -> None:
    simulate(5, lambda c: store_loses_writes(c, same_process=True))


@pytest.mark.parametrize("failures", [1, 4])
def test_nodes_that_cannot_be_read_while_all_is_read_anew_cost_nobody_a_worker(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The beat itself is answered, the table of nodes is not: the view would have been one without any job."""
    real, left = NodeTable.read, [failures]

    async def read(self: NodeTable, era: str) -> FoundNodes | None:
        if left[0]:
            left[0] -= 1
            return None
        return await real(self, era)

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        before, number = pids(c), _number(c)
        c.checker.store_loses()
        monkeypatch.setattr(NodeTable, "read", read)
        c.server.take("job:uid-j")  # so all is read anew
        await asyncio.sleep(12)
        assert left == [0]
        assert (pids(c), _number(c), c.job("j").budget) == (before, number, {})

    simulate(4, scenario)


@pytest.mark.parametrize("what", ["a wake", "revisions", "a node of 5000 digits"])
def test_what_somebody_adds_by_hand_ends_no_agent(what: str) -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        before, number, place = pids(c), _number(c), prefix(CLUSTER)
        c.checker.store_loses()
        if what == "a wake":
            later = c.server.now() + 10**9
            c.server.data.call("XADD", place + "wake:job:uid-j", "MAXLEN", 1, f"{later}-0", "era", "x")
        elif what == "a node of 5000 digits":
            node, record = "n" + 5000 * "1", c.server.value("node:n1")
            assert isinstance(record, dict)
            rev = int(c.server.data.call("HINCRBY", place + "meta", "rev", 1))
            for field, text in {**record, "id": node, "rev": str(rev)}.items():
                c.server.data.call("HSET", f"{place}node:{node}", field, text)
            c.server.data.call("ZADD", place + "changes", rev, f"node:{node}")
            await c.submit("w", 1, 1, 1)
        else:
            rev = int(c.server.data.call("HGET", place + "meta", "rev"))
            for number_of in range(600):
                c.server.data.call("ZADD", place + "changes", f"{rev}.5", f"gone:job:x{number_of}")
        c.server._ring()
        await asyncio.sleep(40)
        assert (pids(c), _number(c)) == (before, number)
        c.nodes["n2"].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: _number(c) > number and c.whole("j"), 60, "the worker is replaced")

    simulate(4, scenario)


def test_an_agent_that_cannot_read_all_jobs_stops_nothing_and_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody invented so many that the one which runs here is not among those that it reads."""

    async def scenario(c: SimCluster) -> None:
        await c.submit("w", 9, 9, 9)
        await started(c, 2, 3)
        before, number = pids(c), _number(c)
        monkeypatch.setattr(client, "MOST_JOBS", 1)
        for node in c.nodes.values():
            await node.kill_agent()
            node.start_agent()
        await asyncio.sleep(20)
        agents = [node.agent for node in c.nodes.values() if node.agent is not None]
        assert [len(agent.cluster().jobs) for agent in agents] == [1] * 4
        assert not any(agent.certain for agent in agents)
        assert (pids(c), _number(c)) == (before, number)
        monkeypatch.undo()
        for node in c.nodes.values():
            await node.kill_agent()
            node.start_agent()
        await asyncio.sleep(20)
        assert (pids(c), _number(c)) == (before, number)
        assert all(node.agent is not None and node.agent.certain for node in c.nodes.values())

    simulate(4, scenario)
