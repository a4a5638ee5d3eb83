"""Findings as text."""

from __future__ import annotations

from typing import Any

from nodeagent.api.limits import limits_json
from nodeagent.ctl.doctor import COLUMNS, limit_lines, lines, summary
from nodeagent.ctl.output import table_lines
from nodeagent.spec.sections import LimitsConfig, SubmitConfig

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


def test_findings_fit_a_terminal() -> None:
    long = FOUND[0] | {"what": "silent: its lease has lapsed; nobody has needed to declare it lost"}
    shown = lines([long], True, 60)
    assert shown == [
        "\x1b[31merror  \x1b[0m  node/n2  silent: its lease has lapsed; nobody has",
        "                  needed to declare it lost",
        "                  fix: systemctl status nodeagent",
    ]
    wide = table_lines(COLUMNS, [long | {"fix": "on host2: " + "journalctl -u nodeagent -n 50; " * 3}], 60)
    assert max(map(len, [*wide, *lines([long], False, 60), *lines([long], False, 30)])) <= 60


def test_summary() -> None:
    assert summary({"items": FOUND, "node": "n1", "peers": None}) == "1 error, 1 warning; node n1 was asked"
    assert summary({"items": FOUND[:1] * 2, "node": None, "peers": None}) == "2 errors"
    peers = [{"outcome": "refused"}, {"outcome": "accepted"}, {"outcome": "timeout"}]
    assert summary({"items": [], "node": "n1", "peers": peers}) == (
        "nothing is wrong; node n1 was asked; 2 of its 3 peers can be reached"
    )


def test_the_limits_of_users_fit_a_terminal() -> None:
    site = LimitsConfig(nodes_per_job=64, submit=SubmitConfig(users=("alice",), groups=("ml",)))
    shown = limit_lines({"limits": limits_json(site), "node": "n1"}, 80)
    assert shown == [
        "limits of a user (config of node n1): 100 live jobs, 16MiB of job specs, 50",
        "  requests a second, 32 at once, 16 followers; of a job: at most 64 nodes, any",
        "  number of restarts an hour; may submit: alice, group ml",
    ]
    assert limit_lines({"limits": None, "node": None}, 80) == []
