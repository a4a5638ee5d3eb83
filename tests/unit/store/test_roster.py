"""Members that follow from what is known of their nodes are names; nothing else is ever made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import pytest

from nodeagent.model.node import NodeRecord
from nodeagent.model.world import Member, Place
from nodeagent.store.roster import expand, shorten
from tests.unit.plan.build import make_node

GPUS = 8
NODES = {name: make_node(name, gpus=GPUS) for name in ("a", "b", "c")}


def member(name: str, rank: int, first: int, devices: tuple[str, ...], workers: int = 2, **more: object) -> Member:
    life = NODES[name].incarnation.life
    plain = {"node": name, "life": life, "group_rank": rank, "first_rank": first, "workers": workers}
    return Member.model_validate(plain | {"devices": devices} | more)


def gpus(name: str, begin: int = 0, end: int = GPUS) -> tuple[str, ...]:
    return tuple(gpu.uuid for gpu in NODES[name].facts.gpus)[begin:end]


GANG = {
    "c": member("c", 0, 0, gpus("c")),
    "a": member("a", 1, 2, gpus("a", 4), workers=4),
    "b": member("b", 2, 6, ("cpu1", "cpu2")),
}


def texts(members: Mapping[str, Member]) -> dict[str, str]:
    return {name: one.to_json() for name, one in members.items()}


def digest(members: Mapping[str, Member]) -> str:
    """Of the texts, in the order of ranks, as the store makes it."""
    order = sorted(members, key=lambda name: members[name].group_rank)
    return hashlib.sha1("\n".join(f"{name}\n{members[name].to_json()}" for name in order).encode()).hexdigest()


def test_members_are_names_and_few_numbers() -> None:
    words = shorten(GANG, NODES)
    assert words == ["c", "2 0 8", "a", "4 4 4", "b", "2 9 2"]
    assert expand(words, digest(GANG), NODES) == texts(GANG)


PLACES = (Place(role="trainer", index=0, workers=2, devices=gpus("a")),)
ODD = {
    "devices in another order": member("a", 1, 2, gpus("a")[::-1]),
    "devices with a gap": member("a", 1, 2, (gpus("a")[0], gpus("a")[2])),
    "devices that the node does not report": member("a", 1, 2, ("GPU-x",)),
    "another life": member("a", 1, 2, gpus("a"), life="another"),
    "places of roles": member("a", 1, 2, gpus("a"), places=PLACES),
    "another first rank": member("a", 1, 3, gpus("a")),
    "another group rank": member("a", 3, 2, gpus("a")),
}


@pytest.mark.parametrize("why", ODD)
def test_a_member_that_does_not_follow_is_its_record(why: str) -> None:
    gang = GANG | {"a": ODD[why]}
    words = shorten(gang, NODES)
    assert words[words.index("a") + 1] == ODD[why].to_json()
    assert expand(words, digest(gang), NODES) == texts(gang)


def test_a_node_that_the_proposer_does_not_know_is_its_record() -> None:
    words = shorten(GANG, {})
    assert words[1::2] == [GANG[name].to_json() for name in words[::2]]
    assert expand(words, digest(GANG), {}) == texts(GANG)


KNOWN: dict[str, dict[str, NodeRecord]] = {
    "no node": {"a": NODES["a"], "b": NODES["b"]},
    "an earlier life": NODES | {"a": make_node("a", gpus=GPUS, of_life="earlier")},
    "fewer devices": NODES | {"a": make_node("a", gpus=GPUS - 1, slots=0)},
    "other devices": NODES | {"b": make_node("b", gpus=GPUS - 1, slots=8)},
}


@pytest.mark.parametrize("what", KNOWN)
def test_who_knows_another_node_makes_no_members(what: str) -> None:
    assert expand(shorten(GANG, NODES), digest(GANG), KNOWN[what]) is None


@pytest.mark.parametrize("words", [["a"], ["a", ""], ["a", "2 0"], ["a", "2 0 x"], ["a", "{"]])
def test_what_is_no_list_is_an_error(words: list[str]) -> None:
    with pytest.raises(ValueError):
        expand(words, "", NODES)
