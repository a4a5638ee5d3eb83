"""Worlds: ranks are a permutation, survivors keep their order, and their very rank where a hole is filled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.world import Member
from nodeagent.plan.job.proposal import make_world, order_nodes
from nodeagent.plan.nodes.candidates import Candidate
from tests.unit.plan.build import REPEATABLE, life, make_generation, make_node, make_spec


def world(last: list[str] | None, chosen: list[str], workers: int = 1) -> dict[str, Member]:
    devices = tuple(f"cpu{i}" for i in range(workers))
    candidates = [Candidate(n, life(n), "fit", devices=devices) for n in chosen]
    facts = {n: make_node(n).facts for n in chosen}
    generation = make_generation(last) if last is not None else None
    return make_world(generation, candidates, make_spec(workers=workers).role, facts, {})


@pytest.mark.parametrize(
    ("last", "chosen", "expected"),
    [
        ([], ["n1", "n2"], ["n1", "n2"]),
        (["a", "b", "c"], ["a", "c", "new"], ["a", "new", "c"]),  # the hole is filled, all ranks stay
        (["a", "b", "c"], ["b", "c", "new"], ["new", "b", "c"]),
        (["a", "b", "c"], ["a", "c"], ["a", "c"]),  # shrunk: order stays
        (["a", "b"], ["a", "b", "x", "y"], ["a", "b", "x", "y"]),  # grown: newcomers at the end
        (["a", "b", "c", "d"], ["c", "d", "x"], ["x", "c", "d"]),
        (["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]),
    ],
)
def test_order(last: list[str], chosen: list[str], expected: list[str]) -> None:
    assert order_nodes(make_generation(last), chosen) == expected


@pytest.mark.parametrize(
    ("chosen", "segment", "portless", "expected"),
    [
        ("abcd", 0, "", "abcd"),
        ("abcd", 0, "bcd", "abcd"),
        ("abcd", 0, "ab", "cbad"),  # two change places, the others keep their ranks
        ("abcdef", 2, "a", "bacdef"),  # within the group
        ("abcdef", 2, "abc", "dcabef"),  # groups stay together
        ("ab", 0, "ab", "ab"),  # nobody can
        ("", 0, "", ""),
    ],
)
def test_a_node_without_a_port_is_not_the_first(chosen: str, segment: int, portless: str, expected: str) -> None:
    assert "".join(order_nodes(None, list(chosen), None, segment, set(portless))) == expected


NODES = [f"n{i}" for i in range(8)]


@REPEATABLE
@given(
    st.lists(st.sampled_from(NODES), unique=True, min_size=1),
    st.lists(st.sampled_from(NODES), unique=True, min_size=1),
    st.integers(1, 3),
)
def test_ranks(last: list[str], chosen: list[str], workers: int) -> None:
    members = world(last, chosen, workers)
    ordered = sorted(members.values(), key=lambda m: m.group_rank)
    assert sorted(members) == sorted(chosen)
    assert [m.group_rank for m in ordered] == list(range(len(chosen)))
    ranks = [r for m in ordered for r in range(m.first_rank, m.first_rank + m.workers)]
    assert ranks == list(range(len(chosen) * workers))
    stayed = [m.node for m in ordered if m.node in last]
    assert stayed == [n for n in last if n in chosen], "survivors keep their order"
    if len(chosen) == len(last):
        for n in stayed:
            assert members[n].group_rank == last.index(n), "a filled hole moves nobody"


def test_workers_follow_from_the_devices() -> None:
    facts = {"n1": make_node("n1", gpus=4).facts, "n2": make_node("n2", gpus=2).facts}
    chosen = [
        Candidate("n1", "l1", "fit", devices=tuple(f"GPU-n1-{i}" for i in range(4))),
        Candidate("n2", "l2", "fit", devices=("GPU-n2-0", "GPU-n2-1")),
    ]
    members = make_world(None, chosen, make_spec(workers="gpu", gpus=2, uneven=True).role, facts, {})
    assert [(m.first_rank, m.workers, m.life) for m in members.values()] == [(0, 2, "l1"), (2, 1, "l2")]
