"""Lease processes that talk over real sockets on loopback: what is signed, what is dropped, which port is taken."""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nodeagent.lease.lending import Ask, LoanAnswer
from nodeagent.lease.order import LeasePort
from nodeagent.lease.peers import (
    MOST,
    MOST_BYTES,
    DatagramSeal,
    Message,
    PeerPort,
    Sender,
    is_numeric,
    open_port,
    parse,
    split,
)
from nodeagent.lease.whichstore import LeaseAnswer, LeaseAsk

SECRET = b"s3cret"
BOUND = 10.0
PORTS = (29400, 29899)
QUESTION = Ask("u", (4, "g4"), {"n1": "x"}, "n2", "y", "n1", "x")
PLAIN = {
    "uid": "u", "token": {"number": 4, "id": "g4"}, "failsafe_members": {"n1": "x"}, "node": "n2", "life": "y",
    "to": "n1", "to_life": "x",
}  # fmt: skip
"""As it has been on the wire since the first version."""
LEASE = LeaseAnswer("n1", "c1", "e1", "10.0.0.1:6379", 0.25, True)
Make = Callable[..., PeerPort]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[PeerPort] = []

    def one(
        secret: bytes = SECRET, address: str = "127.0.0.1", ports: tuple[int, int] = PORTS, before: str = "",
        troubles: list[str] | None = None,
    ) -> PeerPort:  # fmt: skip
        found = PeerPort(LeasePort(address, ports, secret.hex()), before, ([] if troubles is None else troubles).append)
        made.append(found)
        return found

    yield one
    for peers in made:
        peers.close()


def received(peers: PeerPort, count: int = 1) -> list[tuple[Sender, str, Message]]:
    found: list[tuple[Sender, str, Message]] = []
    while len(found) < count:
        assert select.select([peers], [], [], BOUND)[0], found
        found += peers.receive()
    return found


def port(peers: PeerPort) -> int:
    return split(peers.address)[1]


def sealed(message: object, secret: bytes = SECRET) -> bytes:
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return hmac.digest(secret, body, hashlib.sha256) + body


@pytest.mark.parametrize("secret", [b"", b"k", b"k" * 64, b"k" * 65])
def test_the_signature_is_hmac_sha256(secret: bytes) -> None:
    for body in (b"", b"x" * 1000):
        assert DatagramSeal(secret)._mac(body) == hmac.digest(secret, body, hashlib.sha256)


def test_on_the_wire_it_is_as_it_has_always_been() -> None:
    packet = DatagramSeal(SECRET).sealed("n", QUESTION)
    assert json.loads(packet[32:]) == {"nonce": "n", "ask": PLAIN}
    answer = LoanAnswer(True, "", "n1", "x")
    assert json.loads(DatagramSeal(SECRET).sealed("n", answer)[32:]) == {
        "nonce": "n",
        "answer": {"yes": True, "why": "", "node": "n1", "life": "x"},
    }
    assert parse(packet[32:]) == ("n", QUESTION)
    assert parse(DatagramSeal(SECRET).sealed("n", answer)[32:]) == ("n", answer)


@pytest.mark.parametrize("message", [LeaseAsk(), LEASE, LeaseAnswer()], ids=str)
def test_where_a_lease_runs_is_asked_and_answered_in_the_same_way(message: Message) -> None:
    found = parse(DatagramSeal(SECRET).sealed("n", message)[32:])
    assert (found, type(found[1])) == (("n", message), type(message))


def test_a_question_arrives_and_so_does_its_answer(make: Make) -> None:
    one, other = make(), make()
    one.ask(other.address, "q", QUESTION)
    ((sender, nonce, message),) = received(other)
    assert (nonce, message) == ("q", QUESTION)
    other.send(sender, nonce, LoanAnswer(False, "no reason", "n1", "x"))
    ((sender, nonce, message),) = received(one)
    assert (sender, nonce, message) == (
        ("127.0.0.1", port(other)),
        "q",
        LoanAnswer(False, "no reason", "n1", "x"),
    )


def test_many_are_received_a_few_at_a_time(make: Make) -> None:
    one, other = make(), make()
    for number in range(MOST + 5):
        one.ask(other.address, str(number), QUESTION)
    goes: list[list[str]] = []
    while sum(map(len, goes)) < MOST + 5:  # on a busy machine they arrive a while after they were sent
        assert select.select([other], [], [], BOUND)[0], goes
        goes.append([nonce for _, nonce, _ in other.receive()])
    assert [nonce for nonces in goes for nonce in nonces] == [str(n) for n in range(MOST + 5)]
    assert max(map(len, goes)) <= MOST


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:1",
        "[::1]:29400",
        "nowhere",
        "",
        "127.0.0.1:x",
        "a.name:29400",
        "127.0.0.1:65536",
        "127.0.0.1:" + "9" * 5000,
    ],
)
def test_what_cannot_be_sent_is_lost(make: Make, address: str) -> None:
    one = make()
    for _ in range(3):
        one.ask(address, "q", QUESTION)
    assert list(one.receive()) == []


def test_a_wrong_secret_is_dropped_and_reported(make: Make) -> None:
    troubles: list[str] = []
    one, other = make(troubles=troubles), make(secret=b"another")
    other.ask(one.address, "q", QUESTION)
    make().ask(one.address, "after", QUESTION)
    assert [nonce for _, nonce, _ in received(one)] == ["after"]
    assert troubles == ["a datagram without the cluster's signature was dropped"]


@pytest.mark.parametrize(
    "packet",
    [
        b"", b"x", b"x" * 32, b"x" * 500, sealed(b""), sealed(b"not JSON"), sealed(b"\xff\xfe"), sealed(b"[1, 2]"),
        sealed(b"[" * 8000), sealed({}), sealed({"nonce": "a"}), sealed({"nonce": 1, "ask": PLAIN}),
        sealed({"nonce": "a", "ask": {"uid": "u"}}), sealed({"nonce": "a", "ask": PLAIN | {"more": 1}}),
        sealed({"nonce": "a", "ask": 7}), sealed({"nonce": "a", "ask": PLAIN | {"life": None}}),
        sealed({"nonce": "a", "ask": PLAIN | {"token": {"number": True, "id": "x"}}}),
        sealed({"nonce": "a", "ask": PLAIN | {"failsafe_members": {"n1": 1}}}),
        sealed({"nonce": "a", "ask": PLAIN, "padding": "x" * MOST_BYTES}),
        sealed({"nonce": "a", "answer": {"yes": "perhaps"}}), sealed({"nonce": "a", "answer": {"yes": True, "x": ""}}),
        sealed({"nonce": "a", "answer": None}), sealed({"nonce": "a", "lease_ask": {"more": 1}}),
        sealed({"nonce": "a", "lease_ask": []}), sealed({"nonce": "a", "lease_answer": {}}),
        sealed({"nonce": "a", "lease_answer": LEASE._asdict() | {"age": True}}),
        sealed({"nonce": "a", "lease_answer": LEASE._asdict() | {"age": float("nan")}}),
        sealed({"nonce": "a", "lease_answer": LEASE._asdict() | {"away": None}}),
        sealed({"nonce": "a", "lease_answer": LEASE._asdict() | {"era": 1}}),
        sealed({"nonce": "a", "lease_answer": LEASE._asdict() | {"more": ""}}),
    ],
)  # fmt: skip
def test_garbage_is_dropped_and_the_next_is_received(make: Make, packet: bytes) -> None:
    one, other = make(), make()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as raw:
        raw.sendto(packet, split(one.address))
        raw.sendto(sealed({"nonce": "after", "ask": PLAIN}), split(one.address))
    assert [nonce for _, nonce, _ in received(one)] == ["after"]
    assert other.fileno() >= 0


# --- ports


def test_that_none_can_be_bound_is_not_that_none_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(socket.socket):
        def bind(self, _: object) -> None:
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    monkeypatch.setattr(socket, "socket", Full)
    with pytest.raises(OSError, match="No buffer space"):
        open_port("127.0.0.1", [29400, 29401])


def test_the_second_takes_the_next_port(make: Make) -> None:
    first, second = make(), make()
    assert PORTS[0] <= port(first) < port(second) <= PORTS[1]
    troubles: list[str] = []
    crowd = make(ports=(port(first), port(first)), troubles=troubles)
    assert (crowd.address, crowd.fileno()) == ("", -1)
    assert list(crowd.receive()) == []
    crowd.ask(first.address, "q", QUESTION)
    assert len(troubles) == 1 and "nobody can ask" in troubles[0]


def test_one_that_follows_takes_the_port_that_others_know(make: Make) -> None:
    first, second = make(), make()
    known = second.address
    first.close()
    second.close()
    assert make(before=known).address == known
    assert make(before="10.9.9.9:29500").address != "10.9.9.9:29500"
    for wrong in ("", "127.0.0.1:1", "127.0.0.1:x"):
        assert PORTS[0] <= port(make(before=wrong)) <= PORTS[1]


def test_an_address_that_only_others_know_is_reported_and_all_addresses_are_listened_on(make: Make) -> None:
    reported, asks = make(address="192.0.2.7"), make()
    assert reported.address.startswith("192.0.2.7:")
    asks.ask(f"127.0.0.1:{port(reported)}", "q", QUESTION)
    assert received(reported)[0][1] == "q"
    assert make(address="node.example").address.startswith("node.example:")


def test_ipv6(make: Make) -> None:
    probe = open_port("::1", [0])
    assert probe is not None
    with probe:
        if probe.family != socket.AF_INET6:
            pytest.skip("this machine has no ::1")
    first, second = make(address="::1"), make(address="::1")
    assert first.address.startswith("[::1]:")
    first.ask(second.address, "q", QUESTION)
    assert received(second)[0][1] == "q"


@pytest.mark.parametrize(("host", "yes"), [("10.0.0.1", True), ("fe80::1", True), ("n1", False), ("", False)])
def test_numeric(host: str, yes: bool) -> None:
    assert is_numeric(host) is yes


def test_no_text_makes_a_message_of_what_is_none() -> None:
    wrong: Any
    for wrong in ("null", "[]", '"x"', '{"nonce": "a", "ask": []}'):
        with pytest.raises(ValueError):
            parse(wrong.encode())
