"""Findings about this machine while no agent answers: how to start one, its config, its key, the machine, the store."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from nodeagent.doctor.cluster import store_findings
from nodeagent.doctor.machine import Looker
from nodeagent.model.facts import Finding
from nodeagent.plan.findings.cluster import Placed
from nodeagent.plan.findings.host import judge_host
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.spec.configfile import default_config_path, load_config
from nodeagent.spec.errors import Problem, SpecError
from nodeagent.trust.key import ClusterKey, KeyFileError

SYSTEMD = Path("/run/systemd/system")
"""This folder exists if systemd is the init system."""
UNITS = tuple(Path(folder, "nodeagent.service") for folder in ("/etc/systemd/system", "/usr/lib/systemd/system"))


async def without_agent(why: str, file: Path | None, environ: Mapping[str, str], peers: bool) -> list[Placed]:
    """All problems of this machine. ``why``: how the caller knows that no agent answers; ``file``: the config, if there
    is one; ``peers``: the user asked for the peers too."""
    config, problems = read_config(file, environ)
    found: list[Placed] = [("agent", Finding(severity="error", what=why, fix=how_to_start(file, SYSTEMD, UNITS)))]
    if peers:
        found.append(("agent", Finding(severity="warning", what="unknown: without an agent no peer is known", fix="")))
    for problem in problems:
        place = f"{problem.file}:{problem.line}:{problem.col}" if problem.line else problem.file
        fix = problem.right or f"correct it, then: nodeagent check-config {problem.file}"
        found.append((place, Finding(severity="error", what=problem.what, fix=fix)))
    if config is None:
        return found
    here = socket.gethostname()
    found += [("this machine", f) for f in judge_host(await Looker().look(config, here, "", None))]
    if file is not None:
        found += [("cluster_key", f) for f in _key_findings(config)]
        found += [("store", f) for f in await store_findings(config)]
    return found


def _key_findings(config: AgentConfig) -> list[Finding]:
    """Findings about the cluster's key: without it an agent does not start."""
    try:
        ClusterKey.load(config.cluster_key)
    except KeyFileError as error:
        what, _, fix = str(error).partition(": ")
        return [Finding(severity="error", what=what, fix=fix)]
    return []


def config_file(environ: Mapping[str, str]) -> Path | None:
    """The config that an agent started here would read, if there is one."""
    path = default_config_path(os.geteuid(), environ)
    return path if path is not None and path.exists() else None


def read_config(file: Path | None, environ: Mapping[str, str]) -> tuple[AgentConfig | None, tuple[Problem, ...]]:
    """The config that ``nodeagent run`` would use, or every mistake in it."""
    try:
        return load_config(file, environ), ()
    except SpecError as error:
        return None, error.problems


def how_to_start(file: Path | None, systemd: Path, units: tuple[Path, ...]) -> str:
    """The command that starts an agent on this machine."""
    if systemd.exists() and any(unit.exists() for unit in units):
        return "systemctl start nodeagent; if it does not stay up: journalctl -u nodeagent -n 50"
    run = f"nodeagent run --config {file}" if file is not None else "nodeagent run"
    return f"{run}; or, for development: nodeagentctl local up --nodes 2"
