"""A node's own results, on disk, and the judgement of a new figure against them and against its peers.

A single deviating figure proves nothing: either of the two could be the wrong one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nodeagent.diag.crew import CheckOutcome
from nodeagent.model.health import Figure
from nodeagent.osutil.linux import write_atomic

VERSION = 1
FILE = "diag.json"
"""File in the agent's ``state`` folder."""
MOST_VALUES = 64
"""Results kept for each check and kind; the oldest are dropped first."""
MOST_REPORTED = 16
"""Checks and kinds that are kept, and published to other nodes: a node whose GPUs were replaced has at most two
kinds."""


@dataclass(frozen=True, slots=True)
class PastResults:
    """Results of one check on one kind of device, oldest first."""

    kind: str
    check: str
    unit: str
    values: tuple[float, ...]


def load(path: Path) -> tuple[PastResults, ...]:
    """The stored results; none if there is no file. Raises ValueError, with the file's name, for one that cannot be
    understood, OSError."""
    try:
        data = json.loads(path.read_text())
        version, past = data["version"], data["past"] if data["version"] == VERSION else []
        found = tuple(PastResults(p["kind"], p["check"], p["unit"], _numbers(p["values"])) for p in past)
        for one in found:
            if not all(isinstance(text, str) for text in (one.kind, one.check, one.unit)):
                raise TypeError(f"{one.kind!r}, {one.check!r}, {one.unit!r} are not three texts")
    except FileNotFoundError:
        return ()
    except KeyError as error:
        raise ValueError(f"{path} cannot be understood (it has no {error}); remove it") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be understood ({error}); remove it") from None
    if version != VERSION:
        raise ValueError(f"{path} is of version {version}, this nodeagent reads {VERSION}; remove it")
    return found


def _numbers(values: object) -> tuple[float, ...]:
    if not isinstance(values, list) or any(type(value) not in (int, float) for value in values):
        raise TypeError(f"values is {json.dumps(values)[:60]}, not a list of numbers")
    return tuple(map(float, values))


def save(path: Path, past: Iterable[PastResults]) -> None:
    """Writes the results. Raises OSError."""
    rows = [{"kind": p.kind, "check": p.check, "unit": p.unit, "values": p.values} for p in past]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"version": VERSION, "past": rows}), durable=False)


def with_results(past: Sequence[PastResults], outcomes: Iterable[CheckOutcome]) -> tuple[PastResults, ...]:
    """The past results with the new ones added; the kinds that were used last are kept."""
    known = {(p.kind, p.check): p for p in past}
    for outcome in outcomes:
        if outcome.value is None:
            continue
        old = known.pop((outcome.kind, outcome.name), None)
        values = (*(old.values if old is not None else ()), outcome.value)[-MOST_VALUES:]
        known[outcome.kind, outcome.name] = PastResults(outcome.kind, outcome.name, outcome.unit, values)
    return tuple(known.values())[-MOST_REPORTED:]


def median(values: Sequence[float]) -> float:
    """The median. (The standard library's version takes two megabytes of memory, and agents read this file.)"""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def figures(past: Iterable[PastResults]) -> tuple[Figure, ...]:
    """The figures that are published to other nodes: medians, to three digits, so that not every result is a change."""
    return tuple(
        Figure(kind=p.kind, check=p.check, value=float(f"{median(p.values):.3g}"), unit=p.unit)
        for p in past
        if p.values
    )


FEWEST_OWN = 3
"""Earlier figures of the node that are needed to compare with its history."""
FEWEST_PEERS = 2
"""Devices of the same kind, of this node or of others, that are needed to compare with peers."""


@dataclass(frozen=True, slots=True)
class Result:
    """One check with its judgement."""

    name: str
    gpu: str
    passed: bool
    value: float | None
    unit: str
    why: str


def judge(
    outcomes: Sequence[CheckOutcome],
    own: Iterable[tuple[str, str, Sequence[float]]],
    peers: Iterable[Figure],
    slower: float,
) -> list[Result]:
    """``own``: kind, check and values, oldest first; ``peers``: figures of other nodes. A figure is too low if it is
    below ``slower`` times the median of either (0: never)."""
    past = {(kind, check): values for kind, check, values in own}
    others: dict[tuple[str, str], list[float]] = {}
    for figure in peers:
        others.setdefault((figure.kind, figure.check), []).append(figure.value)
    out = []
    for outcome in outcomes:
        why = outcome.why
        if outcome.value is not None:
            key = (outcome.kind, outcome.name)
            beside = [o.value for o in outcomes if o is not outcome and (o.kind, o.name) == key and o.value is not None]
            why = "; ".join(
                (
                    *_low(outcome, past.get(key, ()), FEWEST_OWN, "this node's earlier results", slower),
                    *_low(outcome, beside + others.get(key, []), FEWEST_PEERS, "devices of the same kind", slower),
                )
            )
        out.append(Result(outcome.name, outcome.gpu, not why, outcome.value, outcome.unit, why))
    return out


def _low(outcome: CheckOutcome, known: Sequence[float], fewest: int, whose: str, slower: float) -> Iterable[str]:
    assert outcome.value is not None
    if len(known) < fewest:
        return
    usual = median(known)
    if outcome.value < slower * usual:
        share = outcome.value / usual
        yield (
            f"{outcome.value:g} {outcome.unit} is {share:.0%} of {usual:g}, the median of {whose} "
            f"(at least {slower:.0%} is asked)"
        )
