"""The copy of the store: newer records win, removed ones go, served time runs on by one credit at most."""

from __future__ import annotations

from dataclasses import replace

from nodeagent.agent.snapshot import MOST_UNREAD, Snapshot
from nodeagent.model.job import Setback
from nodeagent.model.node import Incarnation
from nodeagent.model.timing import Timing
from nodeagent.model.usage import UsageDay, UsageRow
from nodeagent.plan.cluster import VIEWS_KEPT, Notes, Refusal
from nodeagent.plan.job.gang import decide
from nodeagent.store.messages import BeatReply, Unread
from tests.unit.plan.build import UID, make_generation, make_job, make_node


def reply(**more: object) -> BeatReply:
    base = {"cluster_uid": "c1", "served": 1000, "lapsed": (), "next_lapse": None, "rev": 1}
    return BeatReply.model_validate(base | more)


def test_it_is_complete_when_nothing_more_waits() -> None:
    snapshot = Snapshot(Timing())
    complete = []
    for one in (
        reply(nodes=(make_node("n1"),), more=True),
        reply(nodes=(make_node("n2"),), rev=7, lapsed=("n2",), next_lapse=40),
    ):
        snapshot.absorb(one, 0.0)
        complete.append(snapshot.complete)
    assert complete == [False, True]
    cluster = snapshot.cluster(0.0)
    assert (set(cluster.nodes), cluster.lapsed, snapshot.rev) == ({"n1", "n2"}, frozenset({"n2"}), 7)
    assert cluster.next_lapse == 40


def test_a_view_of_which_a_part_is_still_to_be_read_says_so() -> None:
    snapshot, partial = Snapshot(Timing()), []
    for one in (reply(), reply(more=True, rev=2), reply(more=True, rev=3), reply(rev=4)):
        snapshot.absorb(one, 0.0)
        partial.append(snapshot.cluster(0.0).partial)
    assert partial == [False, True, True, False]


def returns(*replies: tuple[float, BeatReply]) -> list[dict[str, int]]:
    """After each reply: which nodes are back, and since when."""
    snapshot = Snapshot(Timing())
    out = []
    for at, one in replies:
        snapshot.absorb(one, at)
        out.append(dict(snapshot.cluster(at).returned))
    return out


def test_who_comes_back_in_the_same_life_may_be_followed_by_others() -> None:
    known, lapsed = (0.0, reply(nodes=(make_node("n1"), make_node("n2")))), (0.5, reply(lapsed=("n1", "n2")))
    later = [(1.0, reply(lapsed=("n2",), served=1500)), (2.0, reply(served=2500))]
    later += [(2.5, reply(lapsed=("n1",), served=3000))]
    assert returns(known, lapsed, *later) == [{}, {}, {"n1": 1500}, {"n1": 1500, "n2": 2500}, {"n2": 2500}]
    node = make_node("n1")
    for new in (
        node.model_copy(update={"incarnation": Incarnation(life="another", start=1)}),
        node.model_copy(update={"lost": True}),
        node.model_copy(update={"left": True}),
    ):
        assert returns(known, lapsed, (1.0, reply(nodes=(new,), lapsed=("n2",)))) == [{}, {}, {}]
    assert returns(known, lapsed, (1.0, reply(gone=("node:n1",), lapsed=("n2",)))) == [{}, {}, {}]


def test_who_was_itself_away_may_be_followed_by_others() -> None:
    known, later = reply(nodes=(make_node("n1"), make_node("n2"))), reply(lapsed=("n2",), served=4000)
    assert returns((50.0, known), (52.9, reply()), (56.0, later)) == [{}, {}, {"n1": 4000}]


def test_since_when_a_node_has_lapsed_is_when_that_was_first_read() -> None:
    snapshot, found = Snapshot(Timing()), []
    for one in (
        reply(lapsed=("n1",), served=1000),
        reply(lapsed=("n1", "n2"), served=2000),
        reply(lapsed=(), same=True, served=3000),
        reply(lapsed=("n2",), served=1500),
        reply(lapsed=("n1",), served=5000),
    ):
        snapshot.absorb(one, 0.0)
        found.append(dict(snapshot.cluster(0.0).lapsed_at))
    both = {"n1": 1000, "n2": 2000}
    assert found == [{"n1": 1000}, both, both, {"n2": 1500}, {"n1": 5000}], "a store that went back knows no later time"


def test_who_was_silent_before_an_amnesty_is_not_taken_for_live_in_it() -> None:
    """Else a store that is emptied then would wait for nodes that have been off for long."""
    snapshot = Snapshot(Timing())
    live = []
    for one in (
        reply(nodes=tuple(make_node(f"n{n}") for n in range(1, 4)), lapsed=("n2", "n3")),
        reply(sheltered=("n1", "n2", "n3"), recovering=True),
        reply(sheltered=("n2",)),
        reply(lapsed=("n1",)),
    ):
        snapshot.absorb(one, 0.0)
        live.append(snapshot.known(0.0).live)
    assert live == [("n1",), ("n1",), ("n1", "n3"), ("n2", "n3")]


def test_the_newest_revision_counts_replies_of_own_steps() -> None:
    snapshot = Snapshot(Timing())
    snapshot.absorb(reply(rev=9, era="e1", jobs=(make_job(),)), 0.0)
    assert (snapshot.newest, snapshot.known(0.0).newest) == (9, 9)
    snapshot.absorb_job(make_job("forming").model_copy(update={"rev": 12}))
    assert (snapshot.asked, snapshot.newest, snapshot.known(0.0).newest) == (("e1", 9), 12, 12)
    snapshot.read_again("e2")
    assert snapshot.newest == 0, "nothing of that era has been read yet"
    assert snapshot.known(0.0).newest == 12
    snapshot.forget()
    assert snapshot.newest == 0


def test_whom_the_store_waits_for_is_reported() -> None:
    snapshot = Snapshot(Timing())
    snapshot.absorb(reply(served=1000, recovering=True, recovers=9000, awaited=("n7", "n8"), awaits=2), 5.0)
    assert "n7, n8; nothing is decided until enough of them are back, or for another 8.8 s" in snapshot.waits(5.2)
    snapshot.absorb(reply(served=2000, recovering=True, recovers=100), 6.0)
    assert snapshot.waits(6.0) == ""


def test_removed_records_go() -> None:
    snapshot = Snapshot(Timing())
    snapshot.absorb(reply(nodes=(make_node("n1"),), jobs=(make_job(),)), 0.0)
    assert snapshot.node("n1") is not None
    assert snapshot.job(UID) is not None
    snapshot.absorb(reply(gone=("node:n1", f"job:{UID}", "job:unknown")), 0.0)
    assert snapshot.node("n1") is None
    assert snapshot.job(UID) is None


def test_use_of_a_day_is_replaced_and_goes() -> None:
    snapshot, day = Snapshot(Timing()), UsageDay(day=20_000, rows={"1000 default": UsageRow(jobs=1)}, rev=1)
    snapshot.absorb(reply(usage=(day,)), 0.0)
    view = snapshot.cluster(0.0)
    assert view.usage == {"20000": day}
    assert snapshot.known(0.0).usage == (day,)
    snapshot.absorb(reply(unread=(Unread(key="usage:20000", why="mood"),), rev=2), 0.0)
    snapshot.read_again("")
    snapshot.absorb(reply(unread=(Unread(key="usage:20000", why="mood"),), rev=3), 0.0)
    assert snapshot.cluster(0.0).usage == {"20000": day}, "what cannot be read stays as it was"
    newer = day.model_copy(update={"rev": 4})
    snapshot.absorb(reply(usage=(newer,), rev=4), 0.0)
    assert (snapshot.cluster(0.0).usage, snapshot.unread) == ({"20000": newer}, {})
    assert view.usage == {"20000": day}
    snapshot.absorb(reply(gone=("usage:20000",), rev=5), 0.0)
    assert snapshot.cluster(0.0).usage == {}


def test_an_older_record_never_replaces_a_newer_one() -> None:
    snapshot = Snapshot(Timing())
    new = make_job("forming").model_copy(update={"rev": 5})
    assert snapshot.absorb_job(new)
    assert not snapshot.absorb_job(make_job().model_copy(update={"rev": 4}))
    assert snapshot.job(UID) == new
    assert snapshot.absorb_job(new), "the same again is no step back"


def test_another_store_replaces_everything() -> None:
    snapshot = Snapshot(Timing())
    snapshot.absorb(reply(nodes=(make_node("n1"),), jobs=(make_job(),)), 0.0)
    snapshot.absorb(reply(nodes=(make_node("n9"),), more=True, cluster_uid="c2", era="another"), 0.0)
    assert not snapshot.complete
    cluster = snapshot.cluster(0.0)
    assert (set(cluster.nodes), set(cluster.jobs)) == ({"n9"}, set())


def test_another_name_of_the_same_store_replaces_nothing() -> None:
    snapshot = Snapshot(Timing())
    snapshot.absorb(reply(nodes=(make_node("n1"),), jobs=(make_job(),)), 0.0)
    snapshot.absorb(reply(cluster_uid="evil"), 0.0)
    assert snapshot.complete
    assert set(snapshot.cluster(0.0).jobs) == {UID}


def test_served_time_runs_on_but_never_by_more_than_a_credit() -> None:
    snapshot = Snapshot(Timing(credit=0.5))
    snapshot.absorb(reply(served=1000), 10.0)
    assert [snapshot.cluster(now).served for now in (9.0, 10.0, 10.2, 10.5, 99.0)] == [1000, 1000, 1200, 1500, 1500]


def test_a_view_does_not_change_when_the_snapshot_does() -> None:
    snapshot = Snapshot(Timing())
    snapshot.absorb(reply(nodes=(make_node("n1"),), jobs=(make_job(),)), 0.0)
    view = snapshot.cluster(0.0)
    snapshot.forget_job(UID)
    snapshot.absorb(reply(gone=("node:n1",)), 0.0)
    assert (set(view.nodes), set(view.jobs)) == ({"n1"}, {UID})


def test_everything_can_be_read_again_and_replaces_the_view_when_it_is_whole() -> None:
    snapshot = Snapshot(Timing())
    snapshot.absorb(reply(rev=9, era="e1", nodes=(make_node("n1"),), jobs=(make_job(),)), 0.0)
    snapshot.read_again("e2")
    assert (snapshot.asked, snapshot.era, snapshot.rev) == (("e2", 0), "e1", 9)
    snapshot.absorb(reply(rev=3, era="e2", nodes=(make_node("n2"),), more=True), 0.0)
    assert (snapshot.asked, set(snapshot.cluster(0.0).nodes)) == (("e2", 3), {"n1"})
    newer = make_job("forming").model_copy(update={"rev": 12})
    snapshot.absorb_job(newer)
    snapshot.absorb(reply(rev=11, era="e2"), 0.0)
    assert (snapshot.asked, snapshot.era, set(snapshot.cluster(0.0).nodes)) == (("e2", 11), "e2", {"n2"})
    assert snapshot.job(UID) == newer


def test_the_view_stays_while_the_store_recovers() -> None:
    snapshot = Snapshot(Timing())
    snapshot.absorb(reply(rev=9, era="e1", jobs=(make_job(),)), 0.0)
    snapshot.absorb(reply(rev=9, era="e2", recovering=True, served=5000, lapsed=("n1",)), 0.0)
    assert (snapshot.recovering, snapshot.asked, snapshot.job(UID)) == (True, ("e1", 9), make_job())
    assert (snapshot.cluster(0.0).served, snapshot.cluster(0.0).lapsed) == (5000, frozenset({"n1"}))
    snapshot.absorb(reply(rev=10, era="e2"), 0.0)
    assert (snapshot.recovering, snapshot.asked) == (False, ("e2", 10))


def test_views_share_what_was_worked_out_until_something_changes() -> None:
    snapshot = Snapshot(Timing())
    snapshot.absorb(reply(nodes=(make_node("n1"), make_node("n2")), jobs=(make_job(),), lapsed=("n2",)), 0.0)
    first = snapshot.cluster(0.0)
    snapshot.absorb(reply(served=1500, lapsed=("n2",), rev=2), 0.5)
    second = snapshot.cluster(0.5)
    assert (second.nodes, second.jobs, second.lapsed) == (first.nodes, first.jobs, first.lapsed)
    assert second.once("x", lambda _before: [1]) is first.once("x", lambda _before: [1])
    kept = first.once("x", lambda _before: [1])
    changes = (
        lambda: snapshot.absorb(reply(lapsed=()), 1.0),
        lambda: snapshot.absorb(reply(nodes=(make_node("n1", cordon=True),), rev=3), 1.0),
        lambda: snapshot.absorb(reply(gone=("node:n2",), rev=4), 1.0),
        lambda: snapshot.absorb_job(make_job("holding").model_copy(update={"rev": 9})),
        lambda: snapshot.forget_job(UID),
        lambda: snapshot.absorb(reply(cluster_uid="c2", era="b", nodes=(make_node("n1"),), jobs=(make_job(),)), 1.0),
        snapshot.forget,
    )
    for change in changes:
        change()
        new = snapshot.cluster(1.0).once("x", lambda _before: [1])
        assert new is not kept
        kept = new


def test_jobs_that_come_and_go_leave_no_past_view_behind() -> None:
    """What was worked out for a job that is gone would keep the nodes of its last view."""
    snapshot = Snapshot(Timing())
    for number in range(1, 10 * VIEWS_KEPT):
        job = make_job().model_copy(update={"uid": f"u-{number}"})
        snapshot.absorb(reply(nodes=(make_node("n1"),), jobs=(job,), gone=(f"job:u-{number - 1}",), rev=number), 0.0)
        view = snapshot.cluster(0.0)
        assert set(view.jobs) == {job.uid}
        decide(view, job, 0.0)
        view.once("always", lambda _before: 1)
    each = Notes()
    decide(replace(view, notes=each), job, 0.0)
    assert len(view.notes) <= 2 * VIEWS_KEPT * (len(each) + 1)
    assert view.once("always", lambda _before: 2) == 1, "what is asked for stays"


def test_what_cannot_be_read_stays_as_it_was() -> None:
    snapshot, damaged = Snapshot(Timing()), (Unread(key=f"job:{UID}", why="mood"), Unread(key="node:n2", why="mood"))
    job, nodes = make_job(), (make_node("n1"), make_node("n2"))
    snapshot.absorb(reply(nodes=nodes, jobs=(job,)), 0.0)
    snapshot.absorb(reply(unread=damaged, rev=2), 1.0)
    view = snapshot.cluster(1.0)
    assert (view.jobs[UID], set(view.nodes), view.unread) == (job, {"n1", "n2"}, frozenset({UID}))
    snapshot.read_again("")  # the store has come back with another history
    snapshot.absorb(reply(nodes=nodes[:1], unread=damaged, rev=3), 2.0)
    again = snapshot.cluster(2.0)
    assert (again.jobs[UID], set(again.nodes), again.unread) == (job, {"n1", "n2"}, frozenset({UID}))
    snapshot.absorb(reply(jobs=(job,), gone=("node:n2",), rev=4), 3.0)
    assert (snapshot.unread, set(snapshot.cluster(3.0).nodes)) == ({}, {"n1"})


def test_a_start_knows_of_what_it_cannot_read() -> None:
    snapshot = Snapshot(Timing())
    snapshot.absorb(reply(unread=(Unread(key=f"job:{UID}", why="mood"),)), 0.0)
    assert (snapshot.complete, snapshot.cluster(0.0).jobs, snapshot.cluster(0.0).unread) == (True, {}, frozenset({UID}))
    snapshot.forget()
    assert snapshot.cluster(0.0).unread == frozenset()


def unread(*numbers: int, kind: str = "job") -> tuple[Unread, ...]:
    return tuple(Unread(key=f"{kind}:x{number}", why="mood") for number in numbers)


def test_of_what_somebody_invents_and_cannot_be_read_so_much_is_named() -> None:
    """What the view has is always named: it stays as it was. Of the rest no more than the bound."""
    snapshot, job = Snapshot(Timing()), make_job()
    snapshot.absorb(reply(jobs=(job,)), 0.0)
    for start in range(0, MOST_UNREAD + 512, 256):
        snapshot.absorb(reply(unread=unread(*range(start, start + 256), kind="node"), rev=2), 0.0)
    assert (len(snapshot.unread), snapshot.beyond, snapshot.certain) == (MOST_UNREAD, (), True)
    snapshot.absorb(reply(unread=(Unread(key=f"job:{UID}", why="mood"),), rev=3), 0.0)
    assert (snapshot.cluster(0.0).unread, snapshot.certain) == (frozenset({UID}), True)


def test_where_jobs_that_cannot_be_read_are_too_many_nothing_is_decided_until_all_is_read_anew() -> None:
    snapshot = Snapshot(Timing())
    snapshot.absorb(reply(unread=unread(*range(MOST_UNREAD)), beyond=("nodes",)), 0.0)
    assert (snapshot.beyond, snapshot.certain) == (("nodes",), True)
    snapshot.absorb(reply(unread=unread(MOST_UNREAD), rev=2), 0.0)
    assert (len(snapshot.unread), snapshot.beyond, snapshot.certain) == (MOST_UNREAD, ("jobs",), False)
    snapshot.absorb(reply(gone=tuple(f"job:x{number}" for number in range(MOST_UNREAD)), rev=3), 0.0)
    assert (snapshot.unread, snapshot.beyond, snapshot.certain) == ({}, ("jobs",), False)
    snapshot.read_again("")
    snapshot.absorb(reply(rev=4), 0.0)
    assert (snapshot.beyond, snapshot.certain) == ((), True)


def test_what_cannot_be_read_is_the_same_object_until_it_changes() -> None:
    """What is made of each is not made again at each beat."""
    snapshot = Snapshot(Timing())
    snapshot.absorb(reply(unread=unread(1, 2)), 0.0)
    known, view = snapshot.unread, snapshot.cluster(0.0).unread
    snapshot.absorb(reply(jobs=(make_job(),), rev=2), 0.0)
    assert snapshot.unread is known
    assert snapshot.cluster(0.0).unread is view
    snapshot.absorb(reply(gone=("job:x1",), rev=3), 0.0)
    assert (snapshot.unread, snapshot.cluster(0.0).unread) == ({"job:x2": "mood"}, frozenset({"x2"}))


def test_a_view_is_the_same_only_while_nothing_of_it_changed() -> None:
    snapshot = Snapshot(Timing())
    snapshot.absorb(reply(nodes=(make_node("n1"),), jobs=(make_job(),), next_lapse=900), 5.0)
    refused = {UID: Refusal("changed", "changed", False)}
    view = snapshot.cluster(5.0)
    assert snapshot.cluster(5.0) is view
    assert snapshot.cluster(5.0, refused).refused == refused
    assert snapshot.cluster(5.0, {}) == view
    assert snapshot.cluster(5.1).served == view.served + 100
    for news in (
        reply(lapsed=("n1",), next_lapse=900),
        reply(next_lapse=None),
        reply(nodes=(make_node("n1", cordon=True),)),
        reply(jobs=(make_job("holding"),)),
        reply(unread=(Unread(key=f"job:{UID}", why="it is damaged"),)),
    ):
        before = snapshot.cluster(5.0)
        snapshot.absorb(news, 5.0)
        assert snapshot.cluster(5.0) != before, news


def test_jobs_that_are_newer_than_the_view_are_known_until_a_beat_has_read_as_far() -> None:
    snapshot, job = Snapshot(Timing()), make_job()
    assert not snapshot.absorb_jobs([job]), "nothing has been read yet"
    snapshot.absorb(reply(jobs=(job,), rev=5, era="a"), 0.0)
    assert snapshot.ahead == {}
    assert snapshot.absorb_jobs([job.model_copy(update={"rev": 7})])
    assert (snapshot.ahead, snapshot.newest, snapshot.asked) == ({UID: 7}, 7, ("a", 5))
    snapshot.absorb(reply(rev=6, era="a"), 0.0)
    assert snapshot.ahead == {UID: 7}
    snapshot.absorb(reply(rev=8, era="a"), 0.0)
    assert snapshot.ahead == {}


def test_what_is_known_ahead_is_of_one_era_and_one_view() -> None:
    snapshot, newer = Snapshot(Timing()), make_job().model_copy(update={"rev": 9})
    snapshot.absorb(reply(jobs=(make_job(),), rev=5, era="a"), 0.0)
    assert snapshot.absorb_jobs([newer])
    snapshot.absorb(reply(rev=6, era="b"), 0.0)
    assert snapshot.ahead == {}, "revisions of another era say nothing"
    assert snapshot.absorb_jobs([newer])
    snapshot.read_again("c")
    assert (snapshot.ahead, snapshot.absorb_jobs([newer])) == ({}, False)
    assert not snapshot.absorb_jobs([]), "the wake brought nothing"


def test_a_wake_changes_nothing_while_the_store_recovers() -> None:
    snapshot = Snapshot(Timing())
    snapshot.absorb(reply(jobs=(make_job(),), rev=5), 0.0)
    snapshot.absorb(reply(rev=5, recovering=True), 0.0)
    assert not snapshot.absorb_jobs([make_job().model_copy(update={"rev": 7})])


def test_a_view_with_a_record_that_cannot_be_read_is_not_offered_as_the_whole() -> None:
    """An agent that had just started could not read one job, and offered all others as all that there are: the store
    took the job from no other view, and it was lost. The simulation found it."""
    snapshot = Snapshot(Timing())
    snapshot.absorb(reply(jobs=(make_job(),), rev=2), 0.0)
    assert (snapshot.known(0.0).whole, snapshot.known(0.0).rev) == (True, 2)
    snapshot.absorb(reply(unread=(Unread(key=f"job:{UID}", why="mood"),), rev=3), 1.0)
    known = snapshot.known(1.0)
    assert (known.whole, known.rev, [job.uid for job in known.jobs]) == (False, 0, [UID])
    snapshot.absorb(reply(jobs=(make_job(),), rev=4), 2.0)
    assert (snapshot.known(2.0).whole, snapshot.known(2.0).rev) == (True, 4)


def test_a_beat_of_which_only_a_part_could_be_read_changes_no_view() -> None:
    """Else who reads everything anew would take all that it does not bring for removed."""
    snapshot = Snapshot(Timing())
    snapshot.absorb(reply(unfinished=True, rev=0), 0.0)
    assert not snapshot.complete
    job = make_job("running")
    snapshot.absorb(reply(nodes=(make_node("n1"),), jobs=(job,), rev=5, era="e1"), 0.0)
    snapshot.read_again("e2")
    snapshot.absorb(reply(unfinished=True, rev=0, era="e2"), 0.0)
    assert snapshot.rereads
    assert (set(snapshot.jobs), snapshot.asked) == ({UID}, ("e2", 0))
    snapshot.absorb(reply(nodes=(make_node("n1"),), rev=7, era="e2"), 0.0)
    assert (snapshot.rereads, set(snapshot.jobs), snapshot.rev) == (False, set(), 7)


def test_a_view_that_lacks_jobs_is_not_certain_until_all_is_read_anew() -> None:
    """A job that it lacks may run: nothing is decided on it, and no other agent is told that such a job was removed."""
    snapshot, certain = Snapshot(Timing()), []
    beyond = reply(beyond=("jobs", "nodes"))
    for one in (reply(), reply(beyond=("nodes",)), beyond):
        snapshot.absorb(one, 0.0)
        certain.append((snapshot.certain, snapshot.known(0.0).whole))
    snapshot.read_again("")
    for one in (reply(more=True), reply(rev=2)):
        snapshot.absorb(one, 0.0)
        certain.append((snapshot.certain, snapshot.known(0.0).whole))
    assert certain == [(True, True), (True, True), (False, False), (False, False), (True, True)]


def test_a_node_that_did_not_acknowledge_is_marked_until_it_is_tried_again_and_given_back_as_it_was_read() -> None:
    snapshot = Snapshot(Timing(credit=100.0))
    late = Setback(node="n2", kind="unanswered", life="life-n2", times=1, at=1000)
    job = make_job("running", make_generation(["n1"]), target=2).model_copy(update={"setbacks": (late,)})
    snapshot.absorb(reply(nodes=(make_node("n1"), make_node("n2")), jobs=(job,)), 0.0)
    first, second = snapshot.cluster(0.0), snapshot.cluster(59.0)
    assert UID in first.nodes["n2"].left_out and not first.nodes["n1"].left_out
    assert (first.left_out_until, first.nodes is second.nodes) == (61_000, True)
    assert not any(node.left_out for node in snapshot.known(0.0).nodes)
    after = snapshot.cluster(60.0)
    assert not after.nodes["n2"].left_out and not after.left_out_until
