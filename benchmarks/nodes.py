"""What ``make nodes`` has measured, as Markdown. Measures nothing."""

from __future__ import annotations

from typing import Any


def section(results: dict[str, Any]) -> str:
    """A row for each scenario."""
    machine = results["machine"]
    rows = [
        " | ".join(("", row["what"], "" if row["seconds"] is None else f"{row['seconds']:.1f}", row["training"], ""))
        for row in results["rows"]
    ]
    return "\n".join(
        [
            "## On systemd nodes\n",
            f"By `make nodes` ([tests/nodes](../tests/nodes/README.md)) on {machine['date']}: {results['tests']} tests "
            f"in {results['minutes']:g} minutes, all passed. Each node is a whole system with its own systemd, in "
            "containers of one machine; the training uses gloo, with one worker on each node. "
            f"{machine['machine']}, {machine['system'].partition(',')[0]}; load {machine['load']}: other work ran "
            "beside it, so these are upper bounds.\n",
            "| what | seconds | training |",
            "| --- | --- | --- |",
            *(row.strip() for row in rows),
            "",
        ]
    )
