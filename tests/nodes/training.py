"""A training on a site's nodes: brought to its first steps, and judged at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.e2e.support import check_complete, check_steps, check_undisturbed
from tests.nodes.support import Site


def running(calm: Site, name: str, nodes: str, count: int, steps: int = 60, delay: float = 0.3) -> dict[str, Any]:
    """A training that has made its first steps."""
    calm.train(name, nodes=nodes, steps=steps, delay=delay)
    job = calm.until_running(name, count)
    calm.until_steps(name, 5)
    return job


def ends_well(calm: Site, name: str, reference: dict[int, float], steps: int = 60) -> None:
    """It reaches its last step, with the losses of an undisturbed run; no worker of an older generation ever stepped
    beside a newer one."""
    calm.until_phase(name, "succeeded", 400)
    rows = calm.steps(name)
    check_steps(rows, reference)
    check_complete(rows, steps)


def undisturbed(calm: Site, name: str, reference: dict[int, float], steps: int = 60) -> None:
    ends_well(calm, name, reference, steps)
    check_undisturbed(calm.steps(name))


def stopped_as_planned(calm: Site, name: str, reference: dict[int, float], steps: int) -> None:
    """It ends well, and made no step twice: whatever stopped it had the last step saved first."""
    ends_well(calm, name, reference, steps)
    check_made_once(calm.steps(name))


def check_made_once(rows: Sequence[Mapping[str, Any]]) -> None:
    made = [row["step"] for row in rows if row["rank"] == 0]
    assert len(made) == len(set(made)), "a step was made twice: it had not been saved when its workers were stopped"


def member(job: dict[str, Any]) -> str:
    """A node that runs it, but not rank 0."""
    return next(str(p["node"]) for p in job["pods"] if p["node"] != job["chief"])


def starts(calm: Site) -> dict[str, int]:
    return {n["name"]: n["incarnation"]["start"] for n in calm.ask("/v1/nodes")["items"]}
