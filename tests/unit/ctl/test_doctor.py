"""Findings as text."""

from __future__ import annotations

from typing import Any

from nodeagent.ctl.doctor import lines, summary

FOUND: list[dict[str, Any]] = [
    {"severity": "error", "where": "node/n2", "what": "silent", "fix": "systemctl status nodeagent"},
    {"severity": "warning", "where": "store", "what": "unknown: its clock", "fix": ""},
]


def test_each_finding_with_its_fix_below() -> None:
    assert lines(FOUND, False) == [
        "error    node/n2  silent",
        "                  fix: systemctl status nodeagent",
        "warning  store    unknown: its clock",
    ]
    assert lines([], True) == []
    assert lines(FOUND, True)[0].startswith("\x1b[31merror")


def test_summary() -> None:
    assert summary({"items": FOUND, "node": "n1", "peers": None}) == "1 error, 1 warning; node n1 was asked"
    assert summary({"items": FOUND[:1] * 2, "node": None, "peers": None}) == "2 errors"
    peers = [{"outcome": "refused"}, {"outcome": "accepted"}, {"outcome": "timeout"}]
    assert summary({"items": [], "node": "n1", "peers": peers}) == (
        "nothing is wrong; node n1 was asked; 2 of its 3 peers can be reached"
    )
