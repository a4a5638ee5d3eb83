"""Which nodes a job gets: the gang as a whole or nothing. Survivors first, then those ready, up to the target."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from nodeagent.model.job import JobRecord
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.membership import Candidate, candidates, survivors


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice, and what was left out of it and why."""

    chosen: tuple[Candidate, ...]
    others: tuple[Candidate, ...]
    minimum: int
    target: int

    @property
    def fits(self) -> bool:
        return len(self.chosen) >= self.minimum

    @property
    def pending(self) -> tuple[Candidate, ...]:
        return tuple(c for c in self.others if c.standing == "pending")

    @property
    def missing(self) -> str:
        """One sentence: how many are needed, how many fit, what is wrong with the rest."""
        text = f"needs {self.minimum} node{'s' if self.minimum > 1 else ''}, {len(self.chosen)} fit"
        reasons = [c.why for c in self.others if c.why]
        if reasons:
            text += ": " + "; ".join(reasons[:8]) + (f"; and {len(reasons) - 8} more" if len(reasons) > 8 else "")
        elif not self.others and not self.chosen:
            text += ": no node has joined"
        return text

    def outside(self) -> dict[str, str]:
        """Nodes left out for a reason, for the workers to know."""
        return {c.node: c.why for c in self.others if c.why}


def place(cluster: Cluster, job: JobRecord, without: Collection[str] = ()) -> Placement:
    """Choose nodes for the next generation, never more than the target. ``without`` are nodes not to use this time.

    A member that is live keeps its place even while its standby is being rebuilt: its pod is checked when it
    acknowledges.
    """
    size = job.spec.role.nodes
    members = [m.node for m in survivors(cluster, job)]
    chosen: list[Candidate] = []
    others: list[Candidate] = []
    everyone = {c.node: c for c in candidates(cluster, job)}
    for node in members:
        one = everyone.pop(node)
        if one.standing == "pending":
            one = Candidate(one.node, one.life, "fit", "", one.devices, 0, one.joined)
        if one.standing != "fit" or node in without:
            others.append(one)
        elif len(chosen) < job.control.target:
            chosen.append(one)
        else:
            others.append(Candidate(one.node, one.life, "fit", "", one.devices, 0, one.joined))
    rest = [c for c in everyone.values() if c.node not in without]
    for one in rest:
        if one.standing == "fit" and len(chosen) < job.control.target:
            chosen.append(one)
        else:
            others.append(one)
    return Placement(tuple(chosen), tuple(others), size.min, job.control.target)
