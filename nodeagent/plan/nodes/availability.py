"""For how long a node is there for work: what maintenance windows mean for the nodes of a view, and nodes that may be
taken away at short notice (spot).

Before a window begins no job starts on its nodes that would not have ended by then, and what runs there leaves as for a
drain; until it ends the nodes take no work. A view has this in its nodes' records, so every rule on cordons and drains
holds for windows too. Of time nothing else gets in there, and that in steps: what is worked out from a view does not
depend on its clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.node import Cordon, NodeFacts, NodeRecord
from nodeagent.model.timing import millis
from nodeagent.model.window import NodeWindow, Window, Windows
from nodeagent.plan.cluster import Cluster, Notes, SeenNodes, changed, seen

MARGIN = 60.0
"""Seconds before a window begins, beside the longest grace of the jobs there, at which what runs there is to leave."""
UNLIMITED = 86_400.0
"""A job without a time limit counts as one that takes so many seconds."""
BRIEF = 600.0
"""A job that goes on with fewer nodes takes a node that it has to leave again, if it has so many seconds there."""
DAY_STEP, FAR_STEP = 60.0, 3600.0
"""Seconds in which the time that is left counts down: on the last day, and before."""
KEPT = 86_400.0
"""Seconds for which a window that is over is still shown; then it is removed."""
BY = "a maintenance window"
"""Who drains a node, in a view: no user can be called so."""


@dataclass(frozen=True, slots=True)
class Closing:
    """The nodes that some window concerns now, and until when (served time, 0 for ever) that stays so while the view
    does."""

    nodes: Mapping[str, NodeWindow]
    until: int = 0


NO_CLOSING = Closing({})


def outdated(window: Window, served: int) -> bool:
    """It was over long ago."""
    return served >= window.end + millis(KEPT)


def closing(
    notes: Notes, windows: Windows, nodes: Mapping[str, NodeRecord], jobs: Iterable[JobRecord], served: int
) -> Closing:
    """Which windows concern which of these nodes at this time. Of several the one that begins first."""
    of = notes.once("windows of", (windows, nodes), lambda before: _match(windows, nodes, before)).of
    now = {node: first for node, mine in of.items() if (first := next((w for w in mine if served < w.end), None))}
    if not now:
        return NO_CLOSING
    grace = _grace(jobs, now)
    found: dict[str, NodeWindow] = {}
    ends: list[int] = []
    for node, window in now.items():
        goes = window.start - millis(MARGIN) - grace.get(node, 0)
        leaves = served >= goes
        left = 0 if leaves else _rounded(goes - served)
        found[node] = NodeWindow(window=window.id, text=window.text, leaves=leaves, left=left)
        ends.append(window.end if leaves else goes - left + bool(left))
    return Closing(found, min(ends))


@dataclass(frozen=True, slots=True)
class _Matched:
    windows: Windows
    names: frozenset[str]
    of: Mapping[str, list[Window]]
    """Node to its windows, whether over or not, in the order in which they begin."""


def _match(windows: Windows, nodes: Mapping[str, NodeRecord], before: _Matched | None) -> _Matched:
    if before is not None and before.windows is windows and before.names == nodes.keys():
        return before
    ordered = sorted(windows.windows, key=lambda w: (w.start, w.id))
    of = {node: mine for node in nodes if (mine := [w for w in ordered if w.names(node)])}
    return _Matched(windows, frozenset(nodes), of)


def _grace(jobs: Iterable[JobRecord], nodes: Mapping[str, object]) -> dict[str, int]:
    """Node to the longest grace (ms) of the jobs there."""
    found: dict[str, int] = {}
    for job in jobs:
        if job.generation is not None and job.generation.state != "ended":
            for node in nodes.keys() & {*job.generation.members, *job.generation.holders}:
                found[node] = max(found.get(node, 0), millis(job.spec.longest_grace))
    return found


def _rounded(left: int) -> int:
    step = millis(DAY_STEP if left < millis(UNLIMITED) else FAR_STEP)
    return left // step * step


@dataclass(frozen=True, slots=True)
class _Closed:
    """The records of a view's nodes, and the same with what windows say in them."""

    before: Mapping[str, NodeRecord]
    windows: Mapping[str, NodeWindow]
    nodes: Mapping[str, NodeRecord]


def closed(
    notes: Notes, nodes: Mapping[str, NodeRecord], windows: Mapping[str, NodeWindow]
) -> Mapping[str, NodeRecord]:
    """The nodes of a view, as decisions see them. The very same records for as long as nothing about them changes."""

    def work(last: _Closed | None) -> _Closed:
        found = dict(nodes)
        for name, one in windows.items():
            record = nodes[name]
            if last is not None and last.before.get(name) is record and last.windows.get(name) == one:
                found[name] = last.nodes[name]
            else:
                found[name] = _closed_by(record, one)
        return _Closed(nodes, windows, found)

    return notes.once("closed", (nodes, windows), work).nodes if windows else nodes


def _closed_by(node: NodeRecord, window: NodeWindow) -> NodeRecord:
    cordon = node.cordon
    if window.leaves and cordon is not None:  # a person's words stay
        cordon = cordon.model_copy(update={"drain": True})
    elif window.leaves:
        cordon = Cordon(reason=window.text, by=BY, at=0.0, drain=True)
    return node.model_copy(update={"cordon": cordon, "window": window})


def too_long(spec: JobSpec, node: NodeRecord) -> str:
    """Why a job may not start on a node that has a window later, as what follows its name; empty if it may."""
    window = node.window
    if window is None or window.leaves or takes(spec) <= window.left:
        return ""
    return f"is {window.text}, and the job may not have ended by then"


def takes(spec: JobSpec) -> int:
    """For how long (ms) a node has to be free of windows for a job to start there: as long as it takes, and its grace,
    for which it would have to leave earlier. So a node that has left does not come back in between."""
    needs = BRIEF if spec.elastic else UNLIMITED
    if spec.time_limit is not None:
        needs = min(needs, spec.time_limit) if spec.elastic else spec.time_limit
    return millis(needs + spec.longest_grace)


SPARE = 5.0
"""Seconds before a node is taken away by which its workers are to have ended."""


def shuns(spec: JobSpec, facts: NodeFacts) -> str:
    """Why a job does not use a node that may be taken away, as what follows its name; empty if it would."""
    if not facts.spot or spec.elastic or spec.spot:
        return ""
    return "is a spot node, which a job that needs all its nodes uses only with spot: allow"


@dataclass(frozen=True, slots=True)
class _Spot:
    seen: SeenNodes
    nodes: frozenset[str]


def spot_nodes(cluster: Cluster) -> frozenset[str]:
    """All of them, live or not. The very same object for as long as they are the same."""
    return cluster.once("spot", lambda before: _look_for_spot(cluster, before)).nodes


def _look_for_spot(cluster: Cluster, before: _Spot | None) -> _Spot:
    news = changed(cluster, before.seen) if before is not None else None
    if before is None or news is None:
        return _Spot(seen(cluster), frozenset(n for n, record in cluster.nodes.items() if record.facts.spot))
    found = before.nodes - news | {n for n in news if n in cluster.nodes and cluster.nodes[n].facts.spot}
    return _Spot(seen(cluster), before.nodes if found == before.nodes else found)


def grace_left(cluster: Cluster, job: JobRecord, nodes: Iterable[str]) -> float | None:
    """Seconds that workers have to leave, where these nodes are taken away sooner than the job's grace ends; None: all
    of that."""
    notices = (cluster.nodes[n].facts.notice for n in nodes)
    longest = job.spec.longest_grace
    ends = (notice.until_served for notice in notices if notice is not None and notice.until_served)
    left = min(((end - cluster.served) / 1000 - SPARE for end in ends), default=longest)
    return max(0.0, round(left, 1)) if left < longest else None
