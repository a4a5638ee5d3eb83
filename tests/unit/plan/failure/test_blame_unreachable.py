"""Members that cannot reach each other, in words: of what is published, and behind the words of a hang or a failure."""

from __future__ import annotations

from nodeagent.model.pod import PodState
from nodeagent.model.world import PodReport
from nodeagent.plan.failure.blame import blame, describe_cut, describe_pairs, find_cuts
from nodeagent.plan.failure.hang import find_hang
from nodeagent.plan.findings.cluster import judge_cuts
from tests.unit.plan.build import VICTIM, failed, make_exit, make_generation, make_node
from tests.unit.plan.failure.test_hang import WAITS, rank, report

CUT = {"unreachable": {"n2": "10.0.0.2:7402"}}


def pod(node: str, **unreachable: float) -> PodState:
    return PodState(uid="u", job="a", role="worker", node=node, phase="running", unreachable=unreachable)


def test_a_pair_is_named_once_with_the_address_that_does_not_answer() -> None:
    node = make_node("n10")
    nodes = {"n10": node.model_copy(update={"facts": node.facts.model_copy(update={"peer": "10.0.0.5:7402"})})}
    found = find_cuts({"n10": pod("n10", n2=101.0), "n2": pod("n2", n10=100.0), "n1": pod("n1", n10=90.0)}, nodes)
    (away,) = find_cuts({"n1": pod("n1", n10=90.0)}, nodes, known=False)
    assert describe_cut(away, 140.2).endswith(
        "; while the store is away nobody knows whether n10 is up: see there, and check the network between them"
    )
    assert [describe_cut(cut, 140.2) for cut in found] == [
        "n1 cannot reach n10 at 10.0.0.5:7402 (no answer over UDP for 50 s), though both are alive: "
        "check the network between them",
        "n2 cannot reach n10 at 10.0.0.5:7402, nor n10 n2 (no answer over UDP for 40 s), though both are alive: "
        "check the network between them",
    ]
    assert find_cuts({"n1": pod("n1")}, nodes) == ()


def test_a_failsafe_member_outside_the_gang_is_called_so_and_says_what_it_costs() -> None:
    cuts = find_cuts({"n2": pod("n2", n1=100.0, n3=100.0)}, {}, outside=("n1",))
    assert [describe_cut(cut, 140.0).partition(" (")[0] for cut in cuts] == [
        "n2 cannot reach its failsafe member n1", "n2 cannot reach n3",
    ]  # fmt: skip
    outside, member = (one for _, one in judge_cuts({"a": cuts}, 140.0))
    assert outside.what.endswith("the job's workers stop when the store does not answer for a few seconds")
    assert "nodeagentctl cordon n1: others replace it" in outside.fix
    assert member.what.endswith("its workers may wait for each other")


def test_a_hang_names_the_pair_and_blames_nobody_for_it() -> None:
    ranks = [rank(i, WAITS) for i in range(4)]
    quiet = {"n1": report(*ranks[:2]), "n2": report(*ranks[2:])}
    cut = quiet | {"n1": quiet["n1"].model_copy(update=CUT)}
    before = find_hang(make_generation(["n1", "n2"], workers=2, reports=quiet))
    after = find_hang(make_generation(["n1", "n2"], workers=2, reports=cut))
    assert before is not None
    assert after is not None
    assert after.text == f"{before.text}; n1 cannot reach n2 at 10.0.0.2:7402: check the network between them"
    assert (after.rank, after.node, after.table) == (before.rank, before.node, before.table)


def test_a_failure_names_the_pair_only_where_it_speaks_of_lost_peers() -> None:
    lost = {"n1": failed(make_exit(0, error=VICTIM), seq=1).model_copy(update=CUT)}
    own = {"n1": failed(make_exit(0), seq=1).model_copy(update=CUT)}
    victim, guilty = blame(lost), blame(own)
    assert victim is not None
    assert guilty is not None
    assert victim.text == (
        "rank 0 on n1 lost its peers (exit code 1); who failed first is not known; "
        "n1 cannot reach n2 at 10.0.0.2:7402: check the network between them"
    )
    assert "cannot reach" not in guilty.text


def test_of_many_pairs_a_few_are_named() -> None:
    reports = {f"n{i}": PodReport(state="running", unreachable={f"n{i + 1}": ""}) for i in range(1, 7)}
    assert describe_pairs(reports) == (
        "; n1 cannot reach n2, n2 cannot reach n3, n3 cannot reach n4, n4 cannot reach n5, and 2 more pairs: "
        "check the network between them"
    )
    assert describe_pairs({}) == ""
