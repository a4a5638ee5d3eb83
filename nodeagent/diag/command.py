"""``nodeagent diag``: the checks on this machine, started by a person or by the verification of a repair."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from nodeagent.diag.order import CheckOrder, Code, Report, run
from nodeagent.hardware.discovery import asked_for_gpus
from nodeagent.model.health import Figure
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.spec.healthconfig import HealthConfig


def diag(config: AgentConfig, gpus: Sequence[str], busy: bool, verify: bool, as_json: bool) -> Code:
    """Run the checks, print the report, and return the exit code."""
    order = make_order(config, gpus, "check" if busy else "skip" if verify else "refuse", peer_figures(config.dirs.run))

    def announce(step: str) -> None:
        if not as_json:
            click.echo(step, err=True)

    found, code = asyncio.run(run(order, os.environ, announce))
    if as_json:
        click.echo(json.dumps(found))
    else:
        for line in lines(found):
            click.echo(line)
    return code


def make_order(config: AgentConfig, gpus: Sequence[str], busy: str, peers: Sequence[Figure]) -> CheckOrder:
    """The order that follows from the config; ``gpus``: only these GPUs."""
    health = config.health or HealthConfig()
    named = config.node.gpus if isinstance(config.node.gpus, tuple) else ()
    return CheckOrder.model_validate(
        {
            "python": str(health.diag.python or sys.executable), "state": str(config.dirs.state),
            "driver": asked_for_gpus(config), "gpus": tuple(gpu for gpu in gpus if gpu) or named, "busy": busy,
            "bound": health.diag.bound, "slower": health.diag.slower, "peers": tuple(peers),
        }
    )  # fmt: skip


def peer_figures(run_folder: Path) -> tuple[Figure, ...]:
    """Figures that other nodes measured, from this node's agent; none if no agent answers."""
    from nodeagent.ctl.client import Client
    from nodeagent.ctl.terminal import CtlError

    try:
        nodes = Client([str(run_folder / "api.sock")]).pages("/v1/nodes")["items"]
    except CtlError:
        return ()
    boot, socket = _boot(), str(run_folder / "api.sock")
    others = [node for node in nodes if not (node["boot_id"] == boot and node["api_socket"] == socket)]
    return tuple(Figure.model_validate(figure) for node in others for figure in node.get("figures", ()))


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def lines(found: Report) -> list[str]:
    """The report for people: a line for each check, and a summary."""
    if found["problem"]:
        return [f"could not check: {found['problem']}"]
    rows = [row(check) for check in found["checks"]]
    wide = [max((len(one[i]) for one in rows), default=0) for i in range(3)]
    out = ["  ".join((*map(str.ljust, one[:3], wide), one[3])) for one in rows]
    bad = sum(not check["passed"] for check in found["checks"])
    out += [f"note: {note}" for note in found["notes"]]
    return [*out, f"failed: {bad} of {len(rows)} checks" if bad else f"passed: {len(rows)} checks"]


def row(check: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Name, device, outcome, and the figure or the fault."""
    figure = "" if check["value"] is None else f"{check['value']:g} {check['unit']}"
    return check["name"], check["gpu"] or "-", "passed" if check["passed"] else "FAILED", check["why"] or figure
