"""SIGHUP: a config is taken whole or not at all."""

from __future__ import annotations

import pytest
import structlog.testing

from nodeagent.agent.serve import RESTART, differing, reload
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.spec.configfile import parse_config

OLD = "node: {address: 10.0.0.7}\njobs: {standbys: 1}\n"


def config(text: str) -> AgentConfig:
    return parse_config(text, "test", {}, uid=0)


def reloaded(text: str) -> tuple[str, list[AgentConfig]]:
    taken: list[AgentConfig] = []
    return reload(lambda: config(text), config(OLD), taken.append), taken


def test_what_can_change_while_running_is_taken() -> None:
    message, taken = reloaded(
        "node: {address: 10.0.0.7}\njobs: {standbys: 0, logs: {keep: 9}}\nlimits: {jobs: 7}\ndrain: 5s\n"
        "without_agent: 50s\n"
    )
    assert message == "config reloaded: without_agent, drain, jobs.logs.keep, jobs.standbys, limits.jobs"
    assert [(one.jobs.standbys, one.jobs.logs.keep, one.drain, one.without_agent) for one in taken] == [
        (0, 9, 5.0, 50.0)
    ]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("redis: {replicas: 0}", "redis.replicas"),
        ("health: off", "health"),
        ("log: {level: debug}", "log.level"),
    ],
)
def test_one_key_that_needs_a_restart_keeps_all_as_it_was(change: str, key: str) -> None:
    message, taken = reloaded(f"{OLD}drain: 5s\n{change}\n")
    assert (message, taken) == (f"config not reloaded: {key} needs a restart", [])


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        ("timing: {lease: 4s}", "timing.lease", "another timing than the cluster's is refused"),
        ("cluster_key: /etc/other.key", "cluster_key", "another key is refused"),
        ("cluster: other", "cluster", "drain it before"),
        ("redis: {url: redis://other:6379/0}", "redis.url", "only if it leads to the same Redis"),
    ],
)
def test_a_restart_that_ends_training_is_not_recommended(change: str, key: str, says: str) -> None:
    """Of each key the log said that training goes on. The agent was refused, and its node's workers were stopped half a
    minute later."""
    with structlog.testing.capture_logs() as logged:
        message, taken = reloaded(f"{OLD}log: {{level: debug}}\n{change}\n")
    assert message.endswith("needs more than a restart") and key in message
    (line,) = logged
    assert (taken, says in line["fix"], RESTART in line["fix"]) == ([], True, False)


@pytest.mark.parametrize("text", ["jobs: {standbys: -1}", "drain: never", "jobs: [", "unknown: 1"])
def test_a_config_that_is_wrong_changes_nothing(text: str) -> None:
    message, taken = reloaded(text)
    assert (message, taken) == ("config not reloaded: it is wrong, see the log", [])


def test_nothing_differs_from_itself() -> None:
    assert differing(config(OLD), config(OLD)) == []
    assert reloaded(OLD)[0] == "config reloaded: nothing changed"
