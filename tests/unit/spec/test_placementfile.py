"""``placement`` in a job file: what it means, and how each mistake is told."""

from __future__ import annotations

import pytest

from nodeagent.model.constraints import Constraints, Match
from nodeagent.model.jobspec import Together
from nodeagent.spec.jobcheck import check_spec
from tests.unit.spec.helpers import check_marked, job

LEAST = "name: a\ncommand: x\nnodes: 4\n"


def test_everything_given() -> None:
    spec = job(
        LEAST
        + """
placement:
  require: {gpu: h100, zone: [a, b], node: "n[1-8]"}
  exclude: {spot: true}
  prefer: [nvlink]
  avoid: {class: old}
  within: rack
  segments: 2
"""
    )
    assert spec.role.placement == Constraints(
        require=(
            Match(label="gpu", values=("h100",)),
            Match(label="zone", values=("a", "b")),
            Match(label="node", values=("n[1-8]",)),
        ),
        exclude=(Match(label="spot"),),
        prefer=(Match(label="nvlink"),),
        avoid=(Match(label="class", values=("old",)),),
    )
    assert (spec.within, spec.segments) == ("rack", 2)
    assert check_spec(spec) == []


def test_none_is_none() -> None:
    assert job(LEAST).role.placement is None
    assert job(LEAST + "placement: {within: rack}\n").role.placement is None


def test_a_role_has_what_the_job_asks_and_its_own() -> None:
    spec = job(
        """
name: a
placement: {require: {zone: a}, spread: rack}
roles:
  ps: {command: x, replicas: 2, placement: {pack: node, exclude: [gpu]}}
  trainer: {command: x, nodes: 2, placement: {require: {gpu: h100}}}
"""
    )
    zone = Match(label="zone", values=("a",))
    ps, trainer = (role.placement for role in spec.roles)
    assert ps == Constraints(require=(zone,), exclude=(Match(label="gpu"),), pack="node")
    assert trainer == Constraints(require=(zone, Match(label="gpu", values=("h100",))), spread="rack")


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("placement: {require: {gpu: >>7}}", "7 is not a label's value, values are text: write '7' or true"),
        ("placement: {require: {spot: >>false}}", "false is not a label's value, values are text"),
        ("placement: {require: {node: >>true}}", "every node has a name, write {node: 'n[1-8]'}, or {node: [n1, n2]}"),
        ("placement: {exclude: {node: >>'n[8-1]'}}", "'n[8-1]' names no nodes, write n7, n[1-8] or n[01-16,20]"),
        ("placement: {>>requires: {gpu: a}}", "unknown key 'requires' in placement, did you mean 'require'?"),
        ("placement: >>{spread: rack, pack: rack}", "spread stands beside pack, keep one of them"),
        ("placement: {segments: >>3}", "4 nodes cannot be divided into segments of 3, make min, max and target"),
        ("placement: >>{segments: 2, spread: rack}", "segments stand beside spread, keep one of them"),
        ("placement: {within: >>7}", "7 is not a label, write the name of a label"),
        ("placement: {prefer: >>fast}", "'fast' does not name labels, write for instance"),
        ("placement: {require: {gpu: >>[]}}", "0 values, give 1 to 256, or true for any"),
    ],
)  # fmt: skip
def test_mistakes_and_their_places(text: str, reported: str) -> None:
    check_marked(LEAST + text, job, reported)


def test_a_request_written_by_hand_is_checked_alike() -> None:
    spec = job(LEAST)
    asked = Constraints(require=(Match(label="node", values=("n[2-1]",)),), spread="a", pack="b")
    bad = spec.model_copy(
        update={"placement": Together(segments=3), "roles": (spec.role.model_copy(update={"placement": asked}),)},
    )
    assert check_spec(bad) == [
        "placement.segments: 4 nodes cannot be divided into segments of 3, make min, max and target multiples of 3",
        "roles.worker.placement: spread stands beside pack, keep one of them",
        "roles.worker.placement: segments stand beside spread, keep one of them",
        "roles.worker.placement.require: 'n[2-1]' names no nodes, write n7, n[1-8] or n[01-16,20]",
    ]


def test_ranges_are_bounded_since_each_node_is_held_against_each_of_them() -> None:
    def asked(count: int) -> tuple[Match, ...]:
        return (Match(label="node", values=tuple(f"n{i}-[1-9]" for i in range(count))),)

    def reported(found: Constraints) -> list[str]:
        return check_spec(job(LEAST).model_copy(update={"roles": (role.model_copy(update={"placement": found}),)}))

    role = job(LEAST).role
    assert reported(Constraints(require=asked(16), exclude=asked(16))) == []
    assert reported(Constraints(require=asked(17))) == [
        "roles.worker.placement.require: more than 16 values with ranges, join them: n[1-8,12,20-30]"
    ]
    assert reported(Constraints(require=asked(16), exclude=asked(16), avoid=asked(1))) == [
        "roles.worker.placement: more than 32 values with ranges, join them: n[1-8,12,20-30]"
    ]
