"""What a node does as a failsafe member, beside its own pods: lend, let go, see to it that there are enough failsafe
members."""

from __future__ import annotations

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.node import Incarnation
from nodeagent.model.pod import WorkerState
from nodeagent.model.world import Generation, Token
from nodeagent.plan.pods.actions import PodAction, Prepare, Retire, SendAck, SetFailsafeMembers, Stop
from nodeagent.plan.pods.pod import RULES, decide_pod
from nodeagent.plan.pods.podcase import PodCase
from nodeagent.pods.base import PodStatus, Rendezvous
from tests.unit.plan.build import UID, UNFIT, life, make_cluster, make_generation, make_job, make_node
from tests.unit.plan.planning import plan_node

OLD, NEW = Token(number=1, id="g1"), Token(number=2, id="g2")
NAMES = ("n1", "n2", "n3", "n4", "n5")


def status(phase: str, **more: object) -> PodStatus:
    return PodStatus.model_validate({"uid": UID, "phase": phase} | more)


PROMISED = status("ready", highest=NEW, rendezvous=Rendezvous(token=NEW, address="h:2", store_hosted=False))
WARM = status("ready")


def act(
    job: JobRecord,
    now: PodStatus | None,
    node: str,
    *,
    lends: bool = False,
    unfit: bool = False,
    lapsed: tuple[str, ...] = (),
) -> PodAction | None:
    nodes = [make_node(n, peer=True, ready={UID: UNFIT} if unfit and n == node else None) for n in NAMES]
    cluster = make_cluster(nodes, job, lapsed=lapsed)
    statuses = {UID: now} if now is not None else {}
    lent = frozenset({UID}) if lends else frozenset()
    actions = plan_node(cluster, node, Incarnation(life=life(node), start=3), statuses, 2, lent)
    assert len(actions) <= 1
    return actions[0] if actions else None


def forming(
    members: tuple[str, ...],
    failsafe_members: tuple[str, ...],
    *,
    holders: tuple[str, ...] = (),
    acks: tuple[str, ...] = (),
    lends: tuple[str, ...] = (),
) -> JobRecord:
    released = any(n in failsafe_members for n in acks)
    shown = (*acks, *lends)
    generation = make_generation(members, state="forming", number=2, holders=holders, acks=shown, released=released)
    return make_job("forming", generation, active=1, failsafe_members=failsafe_members)


def says_it_lends(action: PodAction | None) -> bool:
    assert isinstance(action, SendAck), action
    return action.ack.lends


def test_who_may_still_run_what_is_older_lets_go_only_when_that_has_ended() -> None:
    """To the store the one is the other. The agent of n1 has just started and has not heard from its shim."""
    job = forming(("n4",), ("n1", "n2", "n3"), holders=("n1",))
    assert act(job, status("unknown"), "n1") is None
    assert isinstance(act(job, WARM, "n1"), SendAck)
    assert isinstance(act(job, None, "n2"), SendAck), "it has nothing there"


# --- acknowledging


def test_an_ack_says_that_it_lends_only_for_a_failsafe_member_that_does() -> None:
    job = forming(("n1", "n4"), ("n1", "n2", "n3"), holders=("n1", "n2"))
    assert says_it_lends(act(job, PROMISED, "n1", lends=True))
    assert not says_it_lends(act(job, PROMISED, "n1"))
    assert not says_it_lends(act(job, PROMISED, "n4", lends=True)), "no failsafe member"
    assert says_it_lends(act(job, None, "n2", lends=True)), "a holder that is no member"
    assert not says_it_lends(act(job, None, "n2"))


def test_lending_does_not_hold_up_the_ack_of_a_member() -> None:
    """That nothing older runs here is news for the gang at once, and leaves it one step less when the time comes."""
    assert isinstance(act(forming(("n1",), ("n1",), holders=("n1",)), PROMISED, "n1", lends=True), SendAck)


def test_a_member_acknowledges_again_when_its_promise_has_run_out() -> None:
    job = forming(("n1", "n4"), ("n1", "n2", "n3"), lends=("n1",), acks=("n4",))
    assert act(job, PROMISED, "n1", lends=True) is None
    for status in (PROMISED, WARM, None):  # whatever became of its shim since: that shows at the start
        again = act(job, status, "n1")
        assert isinstance(again, SendAck)
        assert (again.token, again.ack.life, again.ack.lends) == (NEW, life("n1"), False)
    done = forming(("n1", "n4"), ("n1", "n2", "n3"), acks=("n1", "n4"))
    assert act(done, PROMISED, "n1") is None


# --- letting go


def test_a_failsafe_member_outside_lets_go_only_when_it_is_needed() -> None:
    assert act(forming(("n1", "n4"), ("n1", "n2", "n3")), WARM, "n3") is None, "n1 will"
    needed = forming(("n4", "n5"), ("n2", "n3"))
    action = act(needed, WARM, "n3")
    assert not says_it_lends(action)
    assert isinstance(action, SendAck)
    assert (action.token, action.ack.life, action.last) == (NEW, life("n3"), None)
    assert act(needed, WARM, "n3", lends=True) is None, "not while a promise of its own stands"
    assert act(forming(("n4", "n5"), ("n2", "n3"), acks=("n2",)), WARM, "n3") is None, "another one did"


@pytest.mark.parametrize(
    ("now", "unfit"),
    [(status("unfit"), True), (None, True), (status("gone"), False), (status("stuck", generation=OLD), False)],
)
def test_a_pod_that_never_gets_well_does_not_keep_the_others_waiting(now: PodStatus | None, unfit: bool) -> None:
    """What is tried again and again for this pod would otherwise come before letting go, for ever."""
    job = forming(("n4", "n5"), ("n3",))
    assert not says_it_lends(act(job, now, "n3", unfit=unfit))
    done = forming(("n4", "n5"), ("n3",), acks=("n3",))
    assert isinstance(act(done, now, "n3", unfit=unfit), Prepare | Stop), "then it is tried again"


def test_what_still_runs_here_is_stopped_before_anything_is_let_go_of() -> None:
    workers = (WorkerState(rank=0, local_rank=0, pid=7, state="running"),)
    old = status("running", generation=OLD, workers=workers)
    assert isinstance(act(forming(("n4",), ("n3",)), old, "n3"), Stop)
    assert isinstance(act(forming(("n4",), ("n3",), holders=("n3",)), old, "n3"), Stop)


def ended(*holders: str) -> JobRecord:
    generation: Generation = make_generation(["n1", "n2"], state="ended", holders=holders)
    return make_job("stopped", generation, active=1, failsafe_members=["n1", "n2", "n3"])


def test_an_ended_job_is_let_go_of_by_one() -> None:
    action = act(ended(), None, "n1")
    assert not says_it_lends(action)
    assert isinstance(action, SendAck)
    assert action.ack.ended
    assert act(ended(), None, "n1", lends=True) is None
    assert act(ended(), None, "n2") is None
    assert act(ended(), None, "n3") is None
    assert says_it_lends(act(ended("n1"), None, "n1", lends=True)), "its workers are gone, its promise is not"
    assert act(ended("n2"), None, "n1") is None, "n2's own acknowledgement will say it"
    assert isinstance(act(ended(), WARM, "n1"), Retire | SendAck)


# --- choosing others


def running(*failsafe_members: str) -> JobRecord:
    return make_job("running", make_generation(["n1", "n2"]), failsafe_members=failsafe_members, target=2)


STARTED = status("running", generation=OLD, highest=OLD)


def test_other_failsafe_members_are_chosen_by_one_node_only() -> None:
    job = running("n1", "n2", "n3")
    found = {n: act(job, STARTED if n in ("n1", "n2") else WARM, n, lapsed=("n3",)) for n in NAMES if n != "n3"}
    expect = SetFailsafeMembers(
        UID, OLD, {n: life(n) for n in ("n1", "n2", "n3")}, {n: life(n) for n in ("n1", "n2", "n4")},
        "failsafe members are n1, n2, n4",
    )  # fmt: skip
    assert {n: a for n, a in found.items() if isinstance(a, SetFailsafeMembers)} == {"n1": expect}
    assert act(job, STARTED, "n1") is None, "all are there"


def test_a_node_that_lends_does_not_have_the_failsafe_members_replaced() -> None:
    assert act(running("n1", "n2", "n3"), STARTED, "n1", lends=True, lapsed=("n3",)) is None


def test_a_generation_without_failsafe_members_gets_some_from_its_first_member() -> None:
    found = {n: act(running(), STARTED if n in ("n1", "n2") else WARM, n) for n in NAMES}
    assert [n for n, a in found.items() if isinstance(a, SetFailsafeMembers)] == ["n1"]


def test_a_chooser_whose_pod_is_unfit_chooses_all_the_same() -> None:
    job = make_job("running", make_generation(["n4", "n5"]), failsafe_members=["n1", "n2", "n4"], target=2)
    action = act(job, status("unfit"), "n1", unfit=True, lapsed=("n4",))
    assert isinstance(action, SetFailsafeMembers), "no member is one any more"


# --- the order of the rules


RUNS = (WorkerState(rank=0, local_rank=0, pid=7, state="running"),)


@pytest.mark.parametrize(
    ("job", "now", "node", "speak", "decides"),
    [
        (forming(("n4",), ("n3",)), status("running", generation=OLD, workers=RUNS), "n3", "end failsafe", "end"),
        (forming(("n4",), ("n3",), holders=("n3",)), WARM, "n3", "form", "form"),
        (running(), status("running", generation=OLD, workers=RUNS), "n1", "failsafe", "failsafe"),
        (running(), status("gone"), "n1", "run failsafe", "run"),
        (ended(), WARM, "n1", "retire failsafe", "retire"),
        (ended("n1"), WARM, "n1", "release", "release"),
        (forming(("n4", "n5"), ("n3",)), status("stuck", generation=OLD), "n3", "end failsafe", "failsafe"),
        (forming(("n4", "n5"), ("n3",)), status("gone"), "n3", "failsafe prepare", "failsafe"),
        (make_job("queued", None), None, "n3", "prepare", "prepare"),
    ],
)
def test_of_several_rules_that_have_something_to_say_the_first_decides_and_what_is_repeated_comes_last(
    job: JobRecord, now: PodStatus | None, node: str, speak: str, decides: str
) -> None:
    case = PodCase(
        make_cluster([make_node(n, peer=True) for n in NAMES], job), node, life(node), job, now, False, {UID}
    )
    answers = {rule.__name__: rule(case) for rule in RULES}
    assert " ".join(name for name, action in answers.items() if action is not None) == speak
    assert decide_pod(case) == answers[decides]
