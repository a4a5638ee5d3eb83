"""The parts that dashboards are made of: panels, targets, variables, in the JSON that Grafana reads.

Owns the shape. What is asked, and why, is in ``dashboards.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Json = dict[str, Any]
Kind = Literal["stat", "timeseries", "state-timeline", "table", "bargauge"]

SCHEMA_VERSION = 41
SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
INSTANT: frozenset[Kind] = frozenset({"stat", "table", "bargauge"})
"""Panels that show one moment: asked for the end of the shown range only."""


@dataclass(frozen=True)
class Panel:
    """One panel: ``queries`` are pairs of PromQL and legend."""

    title: str
    about: str
    kind: Kind
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    width: int = 8
    height: int = 7
    limits: Sequence[tuple[float, str]] = ()
    """From a value on, this colour; below the first: green."""
    more: Json = field(default_factory=dict)
    """Of the field's defaults."""

    def json(self, number: int, x: int, y: int) -> Json:
        steps = [{"color": "green", "value": None}, *({"color": c, "value": v} for v, c in self.limits)]
        defaults: Json = {"unit": self.unit, "thresholds": {"mode": "absolute", "steps": steps}, **self.more}
        defaults["color"] = {"mode": "thresholds" if self.limits or self.kind == "stat" else "palette-classic"}
        if self.kind == "timeseries":
            defaults.setdefault("min", 0)
            defaults["custom"] = {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never", "spanNulls": False}
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.about,
            "datasource": SOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": _OPTIONS[self.kind],
            "transformations": self._merged() if self.kind == "table" else [],
            "targets": [self._target(i, *query) for i, query in enumerate(self.queries)],
        }

    def _merged(self) -> list[Json]:
        """A table has one row for each set of labels, with the value of each query in a column of its name."""
        if len(self.queries) == 1:
            names = {"Value": self.queries[0][1]}
        else:
            names = {f"Value #{_letter(i)}": legend for i, (_, legend) in enumerate(self.queries)}
        hidden = {"Time": True} | dict.fromkeys((name for name, legend in names.items() if not legend), True)
        names = {name: legend for name, legend in names.items() if legend}
        return [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": hidden, "renameByName": names}},
        ]

    def _target(self, index: int, expr: str, legend: str) -> Json:
        now = self.kind in INSTANT
        return {
            "refId": _letter(index),
            "datasource": SOURCE,
            "expr": expr,
            "legendFormat": legend,
            "instant": now,
            "range": not now,
            "format": "table" if self.kind == "table" else "time_series",
        }


_LAST = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: dict[Kind, Json] = {
    "stat": {"reduceOptions": _LAST, "colorMode": "value", "graphMode": "none", "textMode": "value_and_name"},
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "state-timeline": {"mergeValues": True, "showValue": "auto", "rowHeight": 0.8, "legend": {"showLegend": False}},
    "table": {"showHeader": True, "cellHeight": "sm"},
    "bargauge": {"reduceOptions": _LAST, "orientation": "horizontal", "displayMode": "basic"},
}


def _letter(index: int) -> str:
    return chr(ord("A") + index)


def variable(name: str, query: str) -> Json:
    """One that is chosen from a label's values; all of them at first."""
    return {
        "name": name,
        "label": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": f"variable-{name}"},
        "definition": query,
        "refresh": 2,
        "sort": 7,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard(uid: str, title: str, about: str, variables: Sequence[Json], panels: Sequence[Panel]) -> Json:
    """The whole of it; panels are laid out in rows, as they come."""
    placed, x, y, tallest = [], 0, 0, 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > WIDTH:
            x, y, tallest = 0, y + tallest, 0
        placed.append(panel.json(number, x, y))
        x, tallest = x + panel.width, max(tallest, panel.height)
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1}
    return {
        "uid": uid,
        "title": title,
        "description": about,
        "tags": ["nodeagent"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [{"title": "nodeagent", "type": "dashboards", "tags": ["nodeagent"], "asDropdown": True,
                   "includeVars": True, "keepTime": True}],
        "annotations": {"list": []},
        "templating": {"list": [source, *variables]},
        "panels": placed,
    }  # fmt: skip
