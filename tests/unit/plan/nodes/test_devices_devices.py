"""Devices of a part of a node: near each other, and the same again where the job has some."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.jobspec import Nodes
from nodeagent.model.node import Gpu, NodeRecord
from nodeagent.plan.nodes.candidates import NodeKind, kind_of, offer
from nodeagent.plan.nodes.devices import pick
from nodeagent.plan.placing.places import Site, lay_out
from tests.unit.plan.build import REPEATABLE, make_node, make_spec


def gpus(*numa: int | None) -> list[Gpu]:
    return [Gpu(uuid=f"g{i}", index=i, numa=n) for i, n in enumerate(numa)]


@pytest.mark.parametrize(
    ("numa", "count", "held", "expected"),
    [
        ((0, 0, 0, 0, 1, 1, 1, 1), 4, "", "g0 g1 g2 g3"),
        ((0, 0, 0, 1, 1), 2, "", "g3 g4"),  # fewest left over
        ((0, 1, 1, 1, 0), 3, "", "g1 g2 g3"),
        ((0, 1, 0, 1), 2, "", "g0 g2"),
        ((0, 1, 0, 1), 2, "g3", "g1 g3"),  # beside those that it has
        ((0, 1, 1, 2), 3, "", "g0 g1 g2"),  # no node has all: where most are, then the next
        ((0, 0, 1, 1), 2, "g0 g3", "g0 g3"),
        ((None, None, None), 2, "", "g0 g1"),
        ((0, 1), 5, "", "g0 g1"),
    ],
)
def test_as_few_numa_nodes_as_possible(numa: tuple[int | None, ...], count: int, held: str, expected: str) -> None:
    assert " ".join(pick(gpus(*numa), count, held.split())) == expected


@REPEATABLE
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 8))
def test_each_once_and_never_more_numa_nodes_than_need_be(numa: list[int], count: int) -> None:
    chosen = pick(gpus(*numa), count)
    assert len(set(chosen)) == len(chosen) == min(count, len(numa))
    sizes = sorted((numa.count(n) for n in set(numa)), reverse=True)
    least = next(i for i in range(1, len(sizes) + 1) if sum(sizes[:i]) >= len(chosen))
    assert len({numa[int(g[1:])] for g in chosen}) == least


def test_what_processes_have_that_do_not_end_is_given_to_nobody() -> None:
    node = make_node("n1", slots=2, gpus=2)
    facts = node.facts.model_copy(update={"held": {"GPU-n1-0": "gone", "cpu1": "gone"}})
    assert facts.devices() == facts.devices({"GPU-n1-0"}) == ("GPU-n1-1", "cpu0")
    assert kind_of(node.model_copy(update={"facts": facts}), ()) == NodeKind(2, 1, 1)
    role = make_spec(workers=2, gpus=1).role
    assert offer(role, facts, (), ()) == "has 1 free GPUs, 2 needed"
    assert offer(role, node.facts, (), ()) == ("GPU-n1-0", "GPU-n1-1")


def test_a_part_of_a_node_and_places_of_roles_are_taken_so() -> None:
    node = make_node("n1", gpus=4)
    apart = tuple(g.model_copy(update={"numa": g.index % 2}) for g in node.facts.gpus)
    node = NodeRecord.model_validate({**dict(node), "facts": node.facts.model_copy(update={"gpus": apart})})
    role = make_spec(workers=2, gpus=1).role
    assert offer(role, node.facts, (), ()) == ("GPU-n1-0", "GPU-n1-2")
    assert offer(role, node.facts, ("GPU-n1-0",), ()) == ("GPU-n1-1", "GPU-n1-3")
    two = role.model_copy(update={"replicas": Nodes(min=2, max=2, target=2), "name": "a"})
    layout = lay_out([two], [Site("n1", node.facts, node.facts.devices())])
    assert [p.devices for p in layout.places["n1"]] == [("GPU-n1-0", "GPU-n1-2"), ("GPU-n1-1", "GPU-n1-3")]
