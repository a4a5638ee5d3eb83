"""Findings in the form that the API and the tool return."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nodeagent.plan.clusterhealth import Placed, ranked


def report(found: Iterable[Placed]) -> dict[str, Any]:
    """A list, errors first; ``ok`` if none is an error."""
    rows = [{"severity": f.severity, "where": where, "what": f.what, "fix": f.fix} for where, f in ranked(found)]
    return {"apiVersion": "nodeagent/v1", "items": rows, "ok": all(row["severity"] != "error" for row in rows)}
