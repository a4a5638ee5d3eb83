"""The health of a node as records: findings and figures, verdicts, and repairs."""

from __future__ import annotations

from typing import Literal

from nodeagent.model.base import Record


class Figure(Record):
    """The median of a node's results of one check."""

    kind: str
    """The device's name ("NVIDIA H200"), with their number where several work together ("8 x NVIDIA H200")."""
    check: str
    value: float
    unit: str = ""


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


Kind = Literal["reset_gpu", "reboot", "service"]
"""The repairs that can be a command. ``service`` only asks for a person: it repairs nothing by itself."""

ClaimPhase = Literal["asks", "holds", "runs", "verifies"]
"""``asks``: it would like to, and nothing is different for anybody. ``holds``: it is its turn, so its hardware gets no
more work, and what still uses it goes. ``runs``: the command runs, or the machine is away for it. ``verifies``: it is
checked whether that helped."""

Outcome = Literal["", "done", "failed", "interrupted"]
"""Empty: not known yet. ``interrupted``: its end was not seen, so it counts as done nothing."""


class Claim(Record):
    """One node's repair, as the others see it."""

    kind: Kind
    rule: str
    """Of the verdict that asks for it."""
    device: str = ""
    """UUID of the GPU; empty: the node."""
    whole: bool
    """It needs the node to itself."""
    phase: ClaimPhase
    since: float
    """Unix time that this phase began."""
    why: str = ""
    """What it waits for, for people."""

    @property
    def bars(self) -> bool:
        """No work is to be given to its hardware."""
        return self.phase != "asks"

    def takes(self, device: str) -> bool:
        """It needs this device to itself now."""
        return self.bars and (self.whole or device == self.device)


class RepairState(Record):
    """What a node's agent repairs by itself."""

    kinds: tuple[Kind, ...] = ()
    """The repairs that are configured."""
    claim: Claim | None = None
    why: str = ""
    """Why nothing is begun though something is to be repaired; empty otherwise."""


class Attempt(Record):
    """One repair of this node, as it is written down before it begins."""

    kind: Kind
    rule: str
    device: str = ""
    whole: bool
    at: float
    """Unix time that it began."""
    boot: str
    """Boot id in which it began."""
    pid: int = 0
    start: int = 0
    """The command's process: its start time tells it from a later one of that number. 0: it has not been started."""
    outcome: Outcome = ""
    text: str = ""
    """How it ended, for people."""
    over: bool = False
    """Nothing of it is left to be done, verifying included."""


LABEL: dict[Kind, str] = {"reset_gpu": "GPU reset", "reboot": "reboot", "service": "call for service"}
"""As people read it."""
