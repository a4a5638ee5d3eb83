"""Tickets between agents: good once, for one thing, for a while."""

from __future__ import annotations

import base64
import json

import pytest

from nodeagent.trust.key import ClusterKey
from nodeagent.trust.ticket import LIFE, MOST_USED, PURPOSE, SCHEME, Gate, Ticket, TicketError, write

KEY, OTHER = ClusterKey(bytes(32)), ClusterKey(bytes([1]) * 32)
PATH, CERTIFICATE = "/v1/jobs/u1/logs?rank=1", "ab" * 32


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def ticket(gate: Gate, **more: object) -> Ticket:
    values = {
        "challenge": gate.challenge(), "node": "n2", "certificate": CERTIFICATE, "path": PATH, "uid": 1000,
        "name": "alice", "operator": False, "by": "n1",
    }  # fmt: skip
    return Ticket.model_validate(values | more)


def test_a_ticket_is_taken_once() -> None:
    gate = Gate(KEY, "n2", Clock())
    written = write(KEY, ticket(gate))
    taken = gate.take(written, PATH, CERTIFICATE)
    assert (taken.uid, taken.name, taken.operator, taken.by) == (1000, "alice", False, "n1")
    with pytest.raises(TicketError, match="used before"):
        gate.take(written, PATH, CERTIFICATE)


@pytest.mark.parametrize(
    ("more", "path", "certificate"),
    [
        ({"node": "n3"}, PATH, CERTIFICATE),
        ({}, PATH + "0", CERTIFICATE),
        ({}, "/v1/jobs/u2/logs?rank=1", CERTIFICATE),
        ({}, PATH, "cd" * 32),
    ],
)
def test_for_nothing_else(more: dict[str, object], path: str, certificate: str) -> None:
    gate = Gate(KEY, "n2", Clock())
    written = write(KEY, ticket(gate, **more))
    with pytest.raises(TicketError, match="something else"):
        gate.take(written, path, certificate)


def test_not_signed_with_the_clusters_key() -> None:
    gate = Gate(KEY, "n2", Clock())
    mine = ticket(gate)
    with pytest.raises(TicketError, match="not signed with this cluster's key"):
        gate.take(write(OTHER, mine), PATH, CERTIFICATE)
    body = base64.urlsafe_b64encode(json.dumps(mine.model_dump() | {"operator": True}).encode()).decode()
    signature = write(KEY, mine).rpartition(".")[2]
    with pytest.raises(TicketError, match="not signed with this cluster's key"):
        gate.take(f"{SCHEME} {body}.{signature}", PATH, CERTIFICATE)
    other = KEY.sign("api-endpoint", mine.to_json().encode())
    with pytest.raises(TicketError, match="not signed with this cluster's key"):
        gate.take(f"{write(KEY, mine).rpartition('.')[0]}.{other}", PATH, CERTIFICATE)


@pytest.mark.parametrize(
    "written",
    [f"{SCHEME} ", f"{SCHEME} !!.00", f"{SCHEME} " + "A" * 8000 + ".00", SCHEME, f"{SCHEME} YQ==.\udcff"],
)
def test_nonsense(written: str) -> None:
    with pytest.raises(TicketError):
        Gate(KEY, "n2", Clock()).take(written, PATH, CERTIFICATE)


def test_signed_nonsense() -> None:
    body = b'{"challenge": 1}'
    written = f"{SCHEME} {base64.urlsafe_b64encode(body).decode()}.{KEY.sign(PURPOSE, body)}"
    with pytest.raises(TicketError, match="another version"):
        Gate(KEY, "n2", Clock()).take(written, PATH, CERTIFICATE)


def test_its_age_counts_from_the_challenge() -> None:
    clock = Clock()
    gate = Gate(KEY, "n2", clock)
    first, second = write(KEY, ticket(gate)), write(KEY, ticket(gate))
    clock.now += LIFE - 0.01
    gate.take(first, PATH, CERTIFICATE)
    clock.now += 0.02
    with pytest.raises(TicketError, match="older than 15 s"):
        gate.take(second, PATH, CERTIFICATE)
    with pytest.raises(TicketError, match="older than 15 s"):
        gate.take(first, PATH, CERTIFICATE)


@pytest.mark.parametrize("challenge", ["", ".", "999999999.aa.", "999999999000.aa.bb"])
def test_a_challenge_that_is_not_its_own(challenge: str) -> None:
    gate = Gate(KEY, "n2", Clock())
    with pytest.raises(TicketError, match="challenge"):
        gate.take(write(KEY, ticket(gate, challenge=challenge)), PATH, CERTIFICATE)


def test_the_next_run_of_the_agent_takes_none_of_the_last_ones() -> None:
    clock = Clock()
    written = write(KEY, ticket(Gate(KEY, "n2", clock)))
    with pytest.raises(TicketError, match="before its restart"):
        Gate(KEY, "n2", clock).take(written, PATH, CERTIFICATE)


def test_what_is_remembered_is_bounded() -> None:
    clock = Clock()
    gate = Gate(KEY, "n2", clock)
    for _ in range(MOST_USED):
        gate.take(write(KEY, ticket(gate)), PATH, CERTIFICATE)
    with pytest.raises(TicketError, match="more than 4096 tickets"):
        gate.take(write(KEY, ticket(gate)), PATH, CERTIFICATE)
    clock.now += LIFE + 0.01
    gate.take(write(KEY, ticket(gate)), PATH, CERTIFICATE)
