"""What the rules for a pod know of it: whether the node has a part in the job, and what of the machine is the pod's."""

from __future__ import annotations

import pytest

from nodeagent.model.node import Incarnation
from nodeagent.model.world import Starved
from nodeagent.plan.pods.actions import ReportPod, SendAck, Stop
from tests.unit.plan.build import UID, make_cluster, make_exit, make_generation, make_job
from tests.unit.plan.planning import plan_node
from tests.unit.plan.pods.podstates import ENDED, NEW, RUNNING, act, active, status


def test_a_node_of_another_life_is_no_member() -> None:
    cluster = make_cluster(["n1", "n2"], active())
    running = status("running", generation=NEW, workers=RUNNING)
    (action,) = plan_node(cluster, "n1", Incarnation(life="reborn", start=1), {UID: running}, 2)
    assert action == Stop(UID, None, "this node is not in the newest generation")


@pytest.mark.parametrize(("held", "free"), [(3, True), (5, False)])
def test_what_a_killed_workers_pod_held_is_judged_by_its_share_of_the_node(held: int, free: bool) -> None:
    """It has one slot of four. So it is, too, where the report goes with the acknowledgement."""
    hit = make_exit(signal=9).model_copy(update={"starved": Starved(held=held, total=16)})
    crashed = status("exited", generation=NEW, highest=NEW, workers=ENDED, exits=(hit,))
    shown = act(active(), crashed)
    assert isinstance(shown, ReportPod)
    assert (shown.report.state, bool(shown.report.crowded)) == ("failed", free)
    ended = make_generation(["n1", "n2"], state="ended", number=2, holders=["n1"])
    job = make_job("holding", ended).model_copy(update={"last_number": 2})
    answer = act(job, crashed)
    assert isinstance(answer, SendAck) and answer.last is not None
    assert bool(answer.last.crowded) is free
