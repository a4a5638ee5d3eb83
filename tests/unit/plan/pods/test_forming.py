"""What a node does for a generation that forms: get ready, promise, acknowledge; each step only after the last."""

from __future__ import annotations

import json

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.node import Incarnation
from nodeagent.model.world import PodReport, Token
from nodeagent.plan.pods.actions import PodAction, Prepare, Promise, SendAck, Stop
from nodeagent.pods.base import PodStatus, Rendezvous
from nodeagent.pods.environment import worker_environments
from tests.unit.plan.build import UID, failed, life, make_cluster, make_exit, make_generation, make_job, make_node
from tests.unit.plan.planning import plan_node
from tests.unit.plan.pods.podstates import ENDED, NEW, OLD, RUNNING, act, acts, forming, status


def test_it_promises_while_what_is_older_dies_but_not_while_that_has_its_grace() -> None:
    old = status("running", generation=OLD, highest=OLD, workers=RUNNING)

    def promised(job: JobRecord, pod: PodStatus, node: str = "n1") -> PodAction | None:
        stop, *more = acts(job, pod, node=node)
        assert isinstance(stop, Stop)
        return more[0] if more else None

    assert promised(forming(), old) == Promise(UID, NEW, True, "generation 2 is forming", above=2)
    assert promised(forming(), old, "n2") == Promise(UID, NEW, False, "generation 2 is forming")
    assert promised(forming(planned=True), old) is None, "it may still need its rendezvous"
    assert promised(forming(), status("stopping", generation=OLD, highest=NEW)) is None, "once is enough"
    assert promised(forming(members=("n1",)), old, "n2") is None, "it only leaves"


def test_then_it_promises_and_rank_0_holds_a_rendezvous() -> None:
    stopped = status("exited", generation=OLD, highest=OLD)
    assert act(forming(), stopped) == Promise(UID, NEW, True, "generation 2 is forming", above=2)
    assert act(forming(), stopped, node="n2") == Promise(UID, NEW, False, "generation 2 is forming")


@pytest.mark.parametrize("shared", [(), ("n1", "n2"), ("n2", "n3"), ("n1", "n2", "n3")])
@pytest.mark.parametrize("hosted", [True, False])
def test_it_takes_a_rendezvous_after_which_there_is_room_for_the_ports_of_all_workers(
    shared: tuple[str, ...], hosted: bool
) -> None:
    """As they are told of them, whichever nodes share an address."""
    names = ("n1", "n2", "n3")
    plain = {name: make_node(name) for name in names}
    at = {name: "10.9.9.9" if name in shared else f"10.0.0.{i}" for i, name in enumerate(names)}
    nodes = {
        name: node.model_copy(update={"facts": node.facts.model_copy(update={"address": at[name]})})
        for name, node in plain.items()
    }
    generation = make_generation(names, state="forming", number=2, workers=4)
    cluster = make_cluster(nodes.values(), make_job("forming", generation))
    statuses = {UID: status("ready", generation=OLD, highest=OLD)}
    (promise,) = plan_node(cluster, "n1", Incarnation(life=life("n1"), start=3), statuses, 2)
    assert isinstance(promise, Promise)

    generation = generation.model_copy(
        update={"state": "active", "address": f"{at['n1']}:29400", "store_hosted": hosted}
    )
    found = set()
    for name in names:
        for env in worker_environments(make_job("running", generation), generation, nodes[name], nodes):
            given = [*json.loads(env["TF_CONFIG"])["cluster"]["worker"], env["JAX_COORDINATOR_ADDRESS"]]
            found |= {int(address.rpartition(":")[2]) - 29400 for address in given}
    assert 0 <= promise.above - max(found) <= (0 if hosted else 1), "JAX needs one more where torch's store is served"


def test_then_it_acknowledges_rank_0_with_its_address() -> None:
    promised = status("ready", highest=NEW)
    stale = Rendezvous(token=OLD, address="h:1", store_hosted=True)
    for now in (promised, status("ready", highest=NEW, rendezvous=stale)):
        assert isinstance(act(forming(), now), Promise), "a shim that has read its promise holds no address"
    held = Rendezvous(token=NEW, address="h:2", store_hosted=True)
    ack = act(forming(), status("ready", highest=NEW, rendezvous=held))
    assert isinstance(ack, SendAck)
    assert (ack.token, ack.ack.life, ack.ack.address, ack.ack.store_hosted) == (NEW, "life-n1", "h:2", True)
    assert not ack.ack.ended
    other = act(forming(), promised, node="n2")
    assert isinstance(other, SendAck)
    assert (other.ack.address, other.ack.stuck, other.last) == ("", False, None)


def test_it_acknowledges_once_and_starts_nothing_before_all_have() -> None:
    promised = status("ready", highest=NEW, rendezvous=Rendezvous(token=NEW, address="h:2", store_hosted=False))
    assert act(forming((), acks=("n1",)), promised) is None
    assert isinstance(act(forming(("n1",), acks=("n1",)), promised), SendAck), "the store has it still as a holder"


def test_the_ack_carries_how_the_last_generation_ended() -> None:
    crashed = status("exited", generation=OLD, highest=NEW, exits=(make_exit(code=3),), workers=ENDED)
    ack = act(forming(), crashed, node="n2")
    assert isinstance(ack, SendAck)
    assert ack.last == failed(make_exit(code=3), seq=0)
    saved = make_exit(code=101, stopped=True).model_copy(update={"left_at": 12, "saved_in": 0.3})
    ack = act(forming(), crashed.model_copy(update={"exits": (saved,)}), node="n2")
    assert isinstance(ack, SendAck)
    assert ack.last == PodReport(state="left", exits=(saved,), reason="checkpoint at step 12 in 0.30 s")
    unreported = crashed.model_copy(update={"exits": (make_exit(signal=15, stopped=True),)})
    ack = act(forming(), unreported, node="n2")
    assert isinstance(ack, SendAck)
    assert ack.last is None, "nothing is known of how they took it"
    older = crashed.model_copy(update={"generation": Token(number=9, id="g9")})
    ack = act(forming(), older, node="n2")
    assert isinstance(ack, SendAck)
    assert ack.last is None


def test_an_answer_that_is_waited_for_tells_of_a_shim_that_died() -> None:
    """Else the workers that ended because of it would be taken for the cause."""
    silent = {"silent": {"n2": life("n2")}}
    again = status("ready", lost=OLD, highest=NEW)
    ended = make_generation(["n1", "n2"], state="ended", number=1, holders=["n1", "n2"])
    holding = make_job("holding", ended, active=1)
    gone = status("gone", reason="the shim died", generation=OLD, workers=RUNNING)
    for job, now in ((forming(), again), (holding, gone)):
        ack = act(job.model_copy(update=silent), now, node="n2")
        assert isinstance(ack, SendAck)
        assert ack.last == PodReport(state="lost", reason="the shim died")
        ack = act(job, now, node="n2")
        assert isinstance(ack, SendAck)
        assert ack.last is None, "it has answered before"
    for other in (
        again.model_copy(update={"lost": NEW}),
        gone.model_copy(update={"workers": ENDED}),
        gone.model_copy(update={"generation": NEW}),
    ):
        job = forming() if other.phase == "ready" else holding
        ack = act(job.model_copy(update=silent), other, node="n2")
        assert isinstance(ack, SendAck)
        assert ack.last is None


def test_a_member_without_a_usable_pod_gets_ready_first() -> None:
    assert isinstance(act(forming(), None), Prepare)
    assert isinstance(act(forming(), status("gone")), Prepare)
    for phase in ("preparing", "unfit"):
        assert act(forming(), status(phase)) is None


def test_a_holder_that_is_no_member_stops_and_acknowledges_without_a_promise() -> None:
    job = forming(("n1",), members=("n2",))
    assert isinstance(act(job, status("running", generation=OLD, workers=RUNNING)), Stop)
    ack = act(job, status("exited", generation=OLD, highest=OLD))
    assert isinstance(ack, SendAck)
    assert ack.ack.address == ""
    assert isinstance(act(job, None), SendAck), "nothing runs where there is no shim"
