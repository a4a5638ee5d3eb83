"""How often TLS may begin, without a socket; whole connections are in tests/integration/test_api_remote.py."""

from __future__ import annotations

from nodeagent.api.https import ADDRESSES, Handshakes, ServerBounds

BOUNDS = ServerBounds(
    connections=8, at_once=4, per_second=1.0, strangers_at_once=10, strangers_per_second=2.0
)  # fmt: skip
FLOOD, OTHER, AGENT = "192.0.2.1", "192.0.2.2", "10.0.0.2"


class Case:
    """One agent's, with a clock that only the test moves."""

    def __init__(self, *agents: str) -> None:
        self.now = 100.0
        self.complaints: list[str] = []
        self.handshakes = Handshakes(BOUNDS, lambda: agents, self.complaints.append, lambda: self.now)

    def begin(self, host: str, count: int) -> int:
        """How many of so many may begin."""
        return sum(self.handshakes.may(host) for _ in range(count))


def test_one_address_that_floods_gets_few_handshakes_and_locks_out_no_other() -> None:
    case = Case()
    assert case.begin(FLOOD, 10_000) == 4
    assert case.begin(OTHER, 2) == 2
    case.now += 3
    assert case.begin(FLOOD, 10_000) == 3
    assert case.begin(OTHER, 2) == 2


def test_many_addresses_that_flood_get_few_together_and_lock_out_no_agent() -> None:
    """Before, every hello was signed: 1,700 a second took 0.65 of a core, at the niceness of the agent."""
    case = Case(AGENT)
    assert sum(case.begin(f"192.0.{n >> 8}.{n & 255}", 5) for n in range(20_000)) == 10
    assert len(case.handshakes) == ADDRESSES
    assert case.begin(AGENT, 20) == 8, "as many as connections"


def test_an_agents_address_that_floods_is_bounded_as_well() -> None:
    case = Case(AGENT)
    assert case.begin(AGENT, 10_000) == 8
    case.now += 2
    assert case.begin(AGENT, 10_000) == 2


def test_what_a_known_callers_handshake_took_is_given_back() -> None:
    case = Case(AGENT)
    for host in (OTHER, AGENT):
        for _ in range(1000):
            assert case.begin(host, 1) == 1
            case.handshakes.known(host)
    assert case.begin(OTHER, 10_000) == 4


def test_a_network_of_ipv6_is_one_address_but_for_agents() -> None:
    case = Case("2001:db8::2")
    assert sum(case.begin(f"2001:db8::{n:x}", 1) for n in range(3, 1000)) == 4
    assert case.begin("2001:db8:0:0::2", 20) == 8
    assert case.begin("2001:db8:0:1::3", 20) == 4


def test_an_ipv4_address_is_the_same_over_ipv6() -> None:
    case = Case(AGENT)
    assert case.begin(f"::ffff:{AGENT}", 5) + case.begin(AGENT, 20) == 8


def test_an_agent_that_joins_is_known_after_some_seconds() -> None:
    agents = list[str]()
    now = [100.0]
    handshakes = Handshakes(BOUNDS, lambda: agents, lambda _: None, lambda: now[0])
    assert handshakes.may(OTHER)
    agents.append(AGENT)
    now[0] += 5
    assert sum(handshakes.may(AGENT) for _ in range(20)) == 8


def test_who_is_hung_up_on_is_in_the_log_once_a_minute() -> None:
    case = Case()
    for _ in range(3):
        case.begin(FLOOD, 100)
        case.now += 25
    assert case.complaints == [FLOOD]
    case.begin(FLOOD, 100)
    assert case.complaints == [FLOOD] * 2
