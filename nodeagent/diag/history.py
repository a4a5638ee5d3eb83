"""A node's own results, on disk: the last few of each check on each kind of device. Owns one file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nodeagent.model.figure import Figure
from nodeagent.osutil.linux import write_atomic

if TYPE_CHECKING:
    from nodeagent.diag.crew import Outcome

VERSION = 1
FILE = "diag.json"
"""In the agent's ``state`` folder."""
MOST_VALUES = 64
"""Results kept of each check and kind; the oldest go first."""
MOST_TOLD = 16
"""Checks and kinds kept, and told to other nodes: a node whose GPUs were replaced has two kinds at most."""


@dataclass(frozen=True, slots=True)
class Past:
    """Results of one check on one kind of device, oldest first."""

    kind: str
    check: str
    unit: str
    values: tuple[float, ...]


def load(path: Path) -> tuple[Past, ...]:
    """What was kept; nothing if there is no file. Raises ValueError for one that cannot be understood, OSError."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return ()
    try:
        if data["version"] != VERSION:
            raise ValueError(f"{path} is of version {data['version']}, this nodeagent reads {VERSION}; remove it")
        return tuple(Past(p["kind"], p["check"], p["unit"], tuple(map(float, p["values"]))) for p in data["past"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be understood ({error!r}); remove it") from None


def save(path: Path, past: Iterable[Past]) -> None:
    """Raises OSError."""
    rows = [{"kind": p.kind, "check": p.check, "unit": p.unit, "values": p.values} for p in past]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"version": VERSION, "past": rows}), durable=False)


def with_results(past: Sequence[Past], outcomes: Iterable[Outcome]) -> tuple[Past, ...]:
    """The past with these results in it; the kinds used last are kept."""
    known = {(p.kind, p.check): p for p in past}
    for outcome in outcomes:
        if outcome.value is None:
            continue
        old = known.pop((outcome.kind, outcome.name), None)
        values = (*(old.values if old is not None else ()), outcome.value)[-MOST_VALUES:]
        known[outcome.kind, outcome.name] = Past(outcome.kind, outcome.name, outcome.unit, values)
    return tuple(known.values())[-MOST_TOLD:]


def median(values: Sequence[float]) -> float:
    """The middle one. (The standard library's brings two megabytes along, and agents read this file.)"""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def figures(past: Iterable[Past]) -> tuple[Figure, ...]:
    """As other nodes hear of it: medians, to three digits, so that not each result is news."""
    return tuple(
        Figure(kind=p.kind, check=p.check, value=float(f"{median(p.values):.3g}"), unit=p.unit)
        for p in past
        if p.values
    )
