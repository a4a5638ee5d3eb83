"""What Grafana does with a dashboard before it asks Prometheus: its queries, with their variables filled in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

VARIABLES = {
    "cluster": ".*", "job": ".*", "node": ".*",
    "__range": "1h", "__interval": "1s", "__interval_ms": "1000", "__rate_interval": "10s",
}  # fmt: skip
"""As for the last hour, of everything that there is, from a Prometheus that scrapes each second."""


def queries(board: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(panel, PromQL, legend) of each query."""
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]


def filled(expr: str) -> str:
    """The query as Prometheus gets it. Raises KeyError for a variable that nobody sets."""
    return re.sub(r"\$(\w+)", lambda found: VARIABLES[found[1]], expr)
