"""What a shim says may be anything: it is cut, or no status; and what any shim of ours says goes on as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from nodeagent.model.world import BRIEF
from nodeagent.pods.base import PodStatus
from nodeagent.pods.bounds import COUNT_MAX, FOLDER_MAX, NAME_MAX, PORTLESS_MAX, TEXT_MAX, bounded
from nodeagent.shim.record import MAX_CHARS, WHOLE_ERRORS

TOKEN = {"number": 1, "id": "g1"}
LARGE = 10**400


def parsed(**status: object) -> PodStatus:
    """As it comes from the socket."""
    return bounded(PodStatus.from_json(json.dumps({"uid": "u", "phase": "running", **status})))


def ended(**more: object) -> dict[str, Any]:
    return {"rank": 0, "local_rank": 0, "pid": 5, "code": 1, **more}


def stalled(*ranks: Mapping[str, object], limit: float = 5.0) -> dict[str, object]:
    return {"limit": limit, "suspects": True, "ranks": [{"rank": 0, "state": "idle", **facts} for facts in ranks]}


@pytest.mark.parametrize(
    "status",
    [
        {"stepped": float("-inf")},
        {"stepped": float("nan")},
        {"stepped": 1e300},
        {"snapshot_bytes": LARGE},
        {"preforked": {"1": LARGE}},
        {"generation": {"number": LARGE, "id": "g"}},
        {"workers": [{"rank": LARGE, "local_rank": 0, "pid": 5, "state": "running"}]},
        {"workers": [{"rank": 0, "local_rank": 0, "pid": 5, "state": "running", "doing": "x" * 9000}]},
        {"exits": [ended(at=float("inf"))]},
        {"exits": [ended(code=LARGE)]},
        {"exits": [ended(saved_in=1e308)]},
        {"exits": [ended(place="x" * (NAME_MAX + 1))]},
        {"exits": [ended()] * (COUNT_MAX + 1)},
        {"restarted": [ended(order=LARGE)]},
        {"ports": [1] * (COUNT_MAX + 1)},
        {"ports": [0]},
        {"ports": [29400, 65536]},
        {"ports": [10**15]},
        {"rendezvous": {"token": TOKEN, "address": "x", "store_hosted": True}},
        {"rendezvous": {"token": TOKEN, "address": "", "store_hosted": True}},
        {"rendezvous": {"token": TOKEN, "address": ":29400", "store_hosted": True}},
        {"rendezvous": {"token": TOKEN, "address": "n1:", "store_hosted": True}},
        {"rendezvous": {"token": TOKEN, "address": "n1:0", "store_hosted": True}},
        {"rendezvous": {"token": TOKEN, "address": "n1:65536", "store_hosted": True}},
        {"rendezvous": {"token": TOKEN, "address": "n1:29_400", "store_hosted": True}},
        {"rendezvous": {"token": TOKEN, "address": "n\n1:29400", "store_hosted": True}},
        {"rendezvous": {"token": TOKEN, "address": "n1:" + "9" * 500, "store_hosted": True}},
        {"ready": ["x"] * (COUNT_MAX + 1)},
        {"rounds": {"trainer": LARGE}},
        {"rounds": {str(number): 1 for number in range(COUNT_MAX + 1)}},
        {"folder": "x" * (FOLDER_MAX + 1)},
        {"folder": "\x01"},
        {"rendezvous": {"token": TOKEN, "address": "x" * (NAME_MAX + 1), "store_hosted": True}},
        {"commit": {"token": TOKEN, "name": "x" * (NAME_MAX + 1), "step": 1, "order": 1}},
        {"commit": {"token": TOKEN, "name": "x", "step": LARGE, "order": 1}},
        {"stall": stalled({}, limit=1e308)},
        {"stall": stalled({"age": 1e308})},
        {"stall": stalled({"step": LARGE})},
        {"stall": stalled(*[{}] * (COUNT_MAX + 1))},
        {"stall": stalled(*[{"site": "x" * 1000}] * 2000)},
    ],
)
def test_what_no_shim_of_ours_says_is_no_status(status: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"more than|valid|than|finite|not a host and a port|not 1 to 65535"):
        parsed(**status)


def test_what_people_are_to_read_is_cut() -> None:
    long = "x" * 100_000
    found = parsed(reason=long, refused=long, written=long, exits=[ended(error=long + "end")] * (WHOLE_ERRORS + 1))
    assert {len(found.reason), len(found.refused), len(found.written)} == {TEXT_MAX}
    assert [len(one.error) for one in found.exits] == [MAX_CHARS] * WHOLE_ERRORS + [BRIEF]
    assert all(one.error.endswith("end") for one in found.exits)


def test_a_sentence_has_lines_and_no_other_control_characters() -> None:
    found = parsed(reason="hook a: one\n\ttwo\r\n", portless="\x01\x7f no \x85port", refused="\x1b[31mred")
    assert (found.reason, found.portless) == ("hook a: one\n\ttwo\r\n", "\ufffd\ufffd no \ufffdport")
    assert found.refused == "\ufffd[31mred"
    assert len(parsed(portless="\x01" * 8192).portless) == PORTLESS_MAX


def test_what_a_thousand_workers_that_all_failed_leave_goes_on_as_it_is() -> None:
    workers = [{"rank": n, "local_rank": n, "pid": n + 1, "state": "exited", "exit": 1} for n in range(1024)]
    exits = [ended(rank=n, order=n, error="x" * (MAX_CHARS if n < WHOLE_ERRORS else 200)) for n in range(1024)]
    site = {"site": "all_reduce (distributed_c10d.py:2501)" * 4, "stacks": "/var/log/nodeagent/" + "x" * 200}
    status = {"workers": workers, "exits": exits, "stall": stalled(*[site] * 1024), "reason": "x" * TEXT_MAX}
    plain = PodStatus.from_json(json.dumps({"uid": "u", "phase": "running", **status}))
    assert bounded(plain) is plain
