"""The health of a node as records: findings and figures, verdicts, and repairs."""

from __future__ import annotations

from typing import Literal

from nodeagent.model.base import Record


class Figure(Record):
    """The median of a node's results of one check."""

    kind: str
    """The device's name ("NVIDIA H200"); if several devices work together, with their number ("8 x NVIDIA H200")."""
    check: str
    value: float
    unit: str = ""


Severity = Literal["ok", "info", "app", "degraded", "fatal", "unknown"]
"""``fatal``: running jobs leave the hardware now. ``degraded``: new generations avoid it; it never stops a run.
``app``: the workers caused it; the hardware stays in use. ``unknown``: the state cannot be determined. It is never
treated as healthy: no new work, but running work continues."""

Action = Literal["none", "restart_app", "diagnose", "reset_gpu", "reboot", "service"]
"""The repair, from the lightest to a technician's visit."""

Stage = Literal["active", "repaired", "probation"]
"""``active``: the verdict applies. ``repaired``: its repair was done and must still be verified. ``probation``: the
repair was verified, and the device is watched for a while before the verdict is removed."""

ORDER: dict[Severity, int] = {"ok": 0, "info": 1, "app": 2, "unknown": 3, "degraded": 4, "fatal": 5}
"""From harmless to worst."""


class Verdict(Record):
    """One rule that fired for one device, and the state of its repair."""

    rule: str
    device: str = ""
    """UUID of the GPU; empty: the node itself."""
    severity: Severity
    action: Action
    text: str
    """What it means, in a sentence for people."""
    raw: str = ""
    """The line or value that made the rule fire, as the agent read it."""
    since: float
    """Unix time at which the rule fired first. By this node's clock: compared with nothing of another node's."""
    since_served: int | None = None
    """The same in served time (ms), as the node's agent publishes it. Below 0: before the cluster began; None: not
    known yet."""
    seen: float
    """Unix time at which the rule fired last."""
    count: int = 1
    """How often the rule has fired since then."""
    stage: Stage = "active"
    until: float | None = None
    """Unix time at which the probation ends; None in the other stages."""
    boot: str = ""
    """Boot id in which the rule fired last: another boot id means that the machine was rebooted since."""
    dry_run: bool = False
    """The verdict is reported and counted; the agent never acts on it."""

    @property
    def bars(self) -> bool:
        """Returns whether the device (without one: the node) gets no work."""
        return self.severity == "fatal" and not self.dry_run

    @property
    def unknown(self) -> bool:
        """Returns whether the agent cannot determine if the device (without one: any GPU of the node) is sound. Such a
        device gets no new work, and running work continues."""
        return self.severity == "unknown" and self.stage == "active" and not self.dry_run


def worst(verdicts: tuple[Verdict, ...]) -> Severity:
    """The worst severity of the verdicts that the agent acts on; ``ok`` without any."""
    found: list[Severity] = [v.severity for v in verdicts if not v.dry_run]
    return max(found, key=lambda s: ORDER[s], default="ok")


Kind = Literal["reset_gpu", "reboot", "service"]
"""The repairs that can be a command. ``service`` only calls a person: it repairs nothing by itself."""

ClaimPhase = Literal["asks", "holds", "runs", "verifies"]
"""``asks``: the agent requests the repair; nothing changes yet. ``holds``: it is this repair's turn, so its hardware
gets no more work, and the pods that still use it leave. ``runs``: the command runs, or the machine is down for it.
``verifies``: the agent checks whether the repair helped."""

RepairOutcome = Literal["", "done", "failed", "interrupted"]
"""Empty: not known yet. ``interrupted``: the agent did not see its end, so it counts as having repaired nothing."""


class Claim(Record):
    """One node's repair, as other agents see it."""

    kind: Kind
    rule: str
    """Rule of the verdict that asks for the repair."""
    device: str = ""
    """UUID of the GPU; empty: the node."""
    whole: bool
    """The repair needs the node to itself."""
    phase: ClaimPhase
    since: float
    """Unix time at which this phase began."""
    why: str = ""
    """What the repair waits for, for people."""

    @property
    def bars(self) -> bool:
        """Returns whether the repair's hardware gets no work."""
        return self.phase != "asks"

    def takes(self, device: str) -> bool:
        """Returns whether the repair needs this device to itself now."""
        return self.bars and (self.whole or device == self.device)


class RepairState(Record):
    """The repairs that a node's agent makes by itself."""

    kinds: tuple[Kind, ...] = ()
    """The repairs that are configured."""
    claim: Claim | None = None
    why: str = ""
    """Why no repair begins though one is needed; empty otherwise."""


class Attempt(Record):
    """One repair of this node; the agent writes this record before the repair begins."""

    kind: Kind
    rule: str
    device: str = ""
    whole: bool
    at: float
    """Unix time at which the repair began."""
    boot: str
    """Boot id in which the repair began."""
    pid: int = 0
    start: int = 0
    """Start time of the command's process, which distinguishes it from a later process with the same pid. 0: the
    command has not been started."""
    outcome: RepairOutcome = ""
    text: str = ""
    """How the repair ended, for people."""
    over: bool = False
    """The repair is complete, verification included."""


LABEL: dict[Kind, str] = {"reset_gpu": "GPU reset", "reboot": "reboot", "service": "call for service"}
"""The repairs' names for people."""
