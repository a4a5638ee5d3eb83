"""The ``health`` section: off, or rules and folders that exist."""

from __future__ import annotations

import sys

import pytest

from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.spec.configfile import parse_config
from nodeagent.spec.errors import SpecError


def config(text: str, **environ: str) -> AgentConfig:
    return parse_config(text, "a.yaml", environ, uid=0)


def test_health_is_looked_after_unless_it_is_off() -> None:
    found = config("").health
    assert found is not None
    assert (found.probation, found.dry_run, found.ignore, found.folders) == (600.0, frozenset(), frozenset(), ())
    assert config("health: off").health is None
    assert config("", NODEAGENT__HEALTH="off").health is None


def test_every_key() -> None:
    found = config(
        "health: {probation: 2m, dry_run: [nvlink.down, xid.79], ignore: [xid.4711], folders: [/shared, /data]}"
    ).health
    assert found is not None
    assert (found.probation, found.dry_run, found.ignore) == (
        120.0,
        frozenset({"nvlink.down", "xid.79"}),
        frozenset({"xid.4711"}),
    )
    assert found.folders == ("/shared", "/data")


def test_a_sites_own_checks() -> None:
    found = config(
        "health: {checks: {lustre: {command: [check-lustre, -q]}, nfs_2: {command: [nfs], every: 1m, bound: 5s}}}"
    ).health
    assert found is not None
    assert {name: (c.command, c.every, c.bound) for name, c in found.checks.items()} == {
        "lustre": (("check-lustre", "-q"), 300.0, 30.0),
        "nfs_2": (("nfs",), 60.0, 5.0),
    }


def test_rules_of_checks_and_of_installed_plug_ins_can_be_named_before_they_run() -> None:
    found = config("health: {ignore: [ascend.warning, check.lustre]}").health
    assert found is not None
    assert found.ignore == {"ascend.warning", "check.lustre"}


def test_nothing_is_repaired_without_a_command() -> None:
    found = config("").health
    assert found is not None
    assert (found.repair.commands(), found.repair.whole(), found.repair.per_day) == ({}, {}, 3)
    assert found.repair.verify == ("nodeagent", "diag", "--verify", "--json", "--gpu={gpu}")


def test_a_reset_that_names_its_gpu_needs_that_gpu_alone() -> None:
    found = config(
        'health: {repair: {gpu_reset: [reset, "-i={gpu}"], reboot: [reboot], service: [call, "{node}"], verify: off, '
        "deadline: 2m, per_day: 1}}"
    ).health
    assert found is not None
    assert found.repair.whole() == {"reset_gpu": False, "reboot": True, "service": False}
    assert (found.repair.verify, found.repair.deadline, found.repair.per_day) == (None, 120.0, 1)
    every = config('health: {repair: {gpu_reset: [sh, -c, "reset ${all} {}"]}}').health
    assert every is not None
    assert every.repair.whole() == {"reset_gpu": True}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("health: {repair: {reboot: reboot}}", "is not a command, write its words as a list"),
        ("health: {repair: {reboot: []}}", "is not a command"),
        ('health: {repair: {gpu_reset: [reset, "{uuid}"]}}', "{uuid} stands for nothing"),
        ("health: {repair: {per_day: 101}}", "per_day"),
        ("health: {repair: {gpu_rest: [reset]}}", "did you mean 'gpu_reset'?"),
        ("health: {dry_run: [nvlink.dwon]}", "there is no rule 'nvlink.dwon', did you mean 'nvlink.down'?"),
        ("health: {ignore: [qqq]}", "there is no rule 'qqq', see them all: nodeagentctl health rules"),
        ("health: {ignore: xid.79}", "is not a list of rules"),
        ("health: {ignore: [acme.warning]}", "there is no rule 'acme.warning'"),
        ("health: {checks: {Lustre: {command: [a]}}}", "'Lustre' is not a name of a check"),
        ("health: {checks: {lustre: {command: check}}}", "is not a command, write its words as a list"),
        ("health: {checks: {lustre: {}}}", "command"),
        ("health: {checks: {lustre: {command: [a], every: 1s}}}", "every"),
        ("health: {checks: [a]}", "checks"),
        ("health: {folders: [shared]}", "is not an absolute path"),
        ("health: {folders: /shared}", "is not a list of folders"),
        ("health: {probation: 10}\nlog: {}\nhealt: off", "did you mean 'health'?"),
        ("health: {probation: 0s}", "health.probation"),
        ("health:", "has no value"),
        ("health: no", "health"),
    ],
)
def test_mistakes(text: str, message: str) -> None:
    with pytest.raises(SpecError) as wrong:
        config(text)
    assert message in str(wrong.value)


def test_rules_cannot_be_named_without_the_package_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nodeagent.hardware", None)
    assert config("health: {ignore: []}").health is not None
    with pytest.raises(SpecError, match=r"no rule can be named: nodeagent\.hardware is not installed"):
        config("health: {ignore: [xid.79]}")
