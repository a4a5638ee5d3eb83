"""What a job asks of its nodes, and where these are in the topology, in words for people. Decides nothing."""

from __future__ import annotations

from collections import Counter

from nodeagent.model.constraints import Constraints
from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import JobSpec
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.membership import natural
from nodeagent.plan.placement import gang_of

SHOWN = 6
"""Domains that are named at once."""


def asks(spec: JobSpec) -> str:
    """What its nodes must and should be like; empty if it asks nothing."""
    parts = [f"all in one {spec.within}"] * bool(spec.within)
    parts += [f"segments of {spec.segments}"] * bool(spec.segments)
    if not spec.several:
        return "; ".join([*_asked(spec.role.placement), *parts])
    parts = [f"{role.name} {', '.join(own)}" for role in spec.roles if (own := _asked(role.placement))] + parts
    return "; ".join(parts)


def _asked(asked: Constraints | None) -> list[str]:
    if asked is None:
        return []
    prefers, avoids = " and ".join(map(str, asked.prefer)), " and ".join(map(str, asked.avoid))
    return [
        *[asked.words] * asked.hard,
        *[f"prefers {prefers}"] * bool(prefers),
        *[f"avoids {avoids}"] * bool(avoids),
        *[f"spread over {asked.spread}"] * bool(asked.spread),
        *[f"packed by {asked.pack}"] * bool(asked.pack),
    ]


def placed_text(cluster: Cluster, job: JobRecord) -> str:
    """Where the nodes of the newest generation stand: in the smallest domain that holds them, or in which domains and
    how many in each; empty if nobody says where they stand."""
    gang, head = gang_of(cluster, job.spec), job.head
    paths = [gang.paths[m.node] for m in head.ordered() if m.node in gang.paths] if head is not None else []
    if not paths or not gang.levels:
        return ""
    for depth in range(len(gang.levels), 0, -1):
        if len({path[:depth] for path in paths}) == 1 and paths[0][depth - 1]:
            return f"in one {gang.levels[depth - 1]}, {_named(paths[0][:depth])}"
    counts = Counter(path[:1] for path in paths)
    some = sorted(counts, key=lambda domain: tuple(map(natural, domain)))
    named = ", ".join(f"{_named(domain)} ({counts[domain]})" for domain in some[:SHOWN])
    more = f" and {len(some) - SHOWN} more" if len(some) > SHOWN else ""
    return f"by {gang.levels[0]}: {named}{more}"


def _named(domain: tuple[str, ...]) -> str:
    return "/".join(part or "-" for part in domain)
