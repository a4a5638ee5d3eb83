"""Orders and tables for tests of the lease process."""

from __future__ import annotations

import select
from typing import Any, TypeVar

from nodeagent.lease.lending import Ask, FailsafeAddress, LoanRow, Table
from nodeagent.lease.order import LeaseOrder, LeasePort, Server
from nodeagent.lease.resp import Steps
from nodeagent.osutil.linux import boottime

T = TypeVar("T")

ORDER = LeaseOrder(
    boot="b", node="n1", life="l1", start=1, era="e1", cluster_uid="c1", heartbeat=0.5, lease=3.0, fence=2.0, kill=0.25,
    promise=4.0, timeout=0.5, failsafe=1.0, failsafe_limit=1000.0, patience=30.0, grace=10.0, prefix="na:{c}:",
    record_version="6", server=Server("", "127.0.0.1", 6379, (), None), renew="a", leave="b", let_go="c",
    door=LeasePort("10.0.0.1", (29400, 29899), "73656372657421"),
)  # fmt: skip
SOURCES = {"a": "return 1", "b": "return 2", "c": "return 3"}
"""Of its scripts."""
UID, TOKEN = "u-1", (4, "g4")
FAILSAFE_MEMBERS = {"n1": "l1", "n2": "l2", "n3": "l3"}
PLACES = {"n2": FailsafeAddress("10.0.0.2:29400", "l2"), "n3": FailsafeAddress("10.0.0.3:29400", "l3")}


def row(**more: Any) -> LoanRow:
    """Of a job that runs on n1 and n2."""
    plain = LoanRow(TOKEN, FAILSAFE_MEMBERS, {"n1": "l1", "n2": "l2"}, pod="p1", places=PLACES)
    return plain._replace(**more)


def table(jobs: dict[str, LoanRow] | None = None, **more: Any) -> Table:
    """n1's."""
    return Table("b", "n1", "l1", False, {UID: row()} if jobs is None else jobs)._replace(**more)


def ask(**more: Any) -> Ask:
    """n2's question to n1."""
    return Ask(UID, TOKEN, FAILSAFE_MEMBERS, "n2", "l2", "n1", "l1")._replace(**more)


def done(steps: Steps[T]) -> T:
    """What becomes of them, waited for."""
    came: bool | None = None
    while True:
        try:
            wanted = next(steps) if came is None else steps.send(came)
        except StopIteration as end:
            found: T = end.value
            return found
        poll = select.poll()
        poll.register(wanted.fd, wanted.events)
        came = bool(poll.poll(max(0.0, wanted.until - boottime()) * 1000)) and boottime() < wanted.until
