"""What is said about the health of a node or of one of its GPUs. Owns the words; judges nothing."""

from __future__ import annotations

from typing import Literal

from nodeagent.model.base import Record

Severity = Literal["ok", "info", "app", "degraded", "fatal", "unknown"]
"""``fatal``: out of running jobs now. ``degraded``: avoided at the next pause, never stops a run. ``app``: the workers'
own doing, the hardware stays. ``unknown``: cannot be told, which is never taken for healthy: no new work, and what runs
goes on."""

Action = Literal["none", "restart_app", "diagnose", "reset_gpu", "reboot", "service"]
"""What repairs it, from the lightest to a technician's visit."""

Stage = Literal["active", "repaired", "probation"]
"""``active``: it holds. ``repaired``: its repair was done and waits to be verified. ``probation``: verified, and
watched for a while before it is forgotten."""

ORDER: dict[Severity, int] = {"ok": 0, "info": 1, "app": 2, "unknown": 3, "degraded": 4, "fatal": 5}
"""From harmless to worst."""


class Verdict(Record):
    """One rule that fired for one device, and what became of it."""

    rule: str
    device: str = ""
    """UUID of the GPU; empty: the node itself."""
    severity: Severity
    action: Action
    text: str
    """What it means, for the person."""
    raw: str = ""
    """The line or value that made it fire, as it was read."""
    since: float
    """Unix time it fired first."""
    seen: float
    """Unix time it fired last."""
    count: int = 1
    """How often since then."""
    stage: Stage = "active"
    until: float | None = None
    """Unix time the probation ends; None in the other stages."""
    boot: str = ""
    """Boot id in which it fired last: another one means that the machine was rebooted since."""
    dry_run: bool = False
    """Told and counted, never acted upon."""

    @property
    def bars(self) -> bool:
        """No work is to be given to the device (or, without one, to the node)."""
        return self.severity == "fatal" and not self.dry_run

    @property
    def unknown(self) -> bool:
        """Nobody can tell whether the device (without one: any GPU of the node) is sound: it gets no new work, and what
        runs on it goes on."""
        return self.severity == "unknown" and self.stage == "active" and not self.dry_run


def worst(verdicts: tuple[Verdict, ...]) -> Severity:
    """The worst severity of those that are acted upon; ``ok`` without any."""
    found: list[Severity] = [v.severity for v in verdicts if not v.dry_run]
    return max(found, key=lambda s: ORDER[s], default="ok")
