"""Which nodes of those that are able make a gang, by how they lie to each other: in the smallest domain of the topology
that holds it, beside those that run already, in segments, or spread. Knows no jobs; who is able is
``nodes/candidates.py``'s.

Everything is a function of the view alone: the topology is what most nodes' agents were configured with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nodeagent.model.constraints import NODE, Constraints
from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import JobSpec
from nodeagent.plan.cluster import Cluster, natural, some
from nodeagent.plan.nodes.labels import TopologyPath, tree


@dataclass(frozen=True, slots=True)
class GangLayout:
    """How the nodes of one gang are to lie."""

    levels: tuple[str, ...]
    paths: Mapping[str, TopologyPath]
    within: int = 0
    """All of them are in one domain of so many levels; 0: they need not be."""
    segment: int = 0
    """They are groups of so many, each within one of the smallest domains; 0: they are not."""


@dataclass(frozen=True, slots=True)
class PastPlaces:
    """Where the gang was."""

    members: tuple[str, ...] = ()
    """Of its newest generation, by rank, whether they are still there or not."""
    staying: tuple[str, ...] = ()
    """Those of them that are able to go on, by rank."""
    warm: frozenset[str] = frozenset()
    """Nodes that get ready for it already: of equal domains the one with most of them is taken."""


def gather(pool: Sequence[Sequence[str]], want: int, least: int, gang: GangLayout, past: PastPlaces) -> list[str]:
    """Up to ``want`` of the nodes that are able, in the order of their ranks; fewer than ``least`` where no more can be
    together. ``pool``: nodes that are no members any more, in groups of equally welcome ones, the best group first."""
    groups = [[n for n in group if _placed(gang, n)] for group in pool]
    staying = [n for n in past.staying if _placed(gang, n)]
    if staying:
        domain = _home(gang, staying, [n for group in groups for n in group], want, least, len(past.members))
        if domain is not None:
            inside = [[n for n in group if _in(gang, n, domain)] for group in groups]
            stay = [n for n in staying if _in(gang, n, domain)]
            return _beside(inside, stay, want, gang, replace(past, staying=tuple(stay)))
        groups = [staying, *groups]  # it moves as a whole: nobody's place is better than another's
    return _anew(groups, want, gang, past)


def closer(nodes: Sequence[str], others: Sequence[str], gang: GangLayout) -> bool:
    """These nodes are in a smaller domain than the others."""
    return _depth(nodes, gang) > _depth(others, gang)


def closest(nodes: Sequence[str], gang: GangLayout) -> bool:
    """They are in one of the smallest domains already."""
    return _depth(nodes, gang) == len(gang.levels)


def _depth(nodes: Sequence[str], gang: GangLayout) -> int:
    """Levels of the smallest domain that all of them are in; 0 if there is none, or no node."""
    first = gang.paths.get(nodes[0], ()) if nodes else ()
    depth = next((i for i, value in enumerate(first) if not value), len(first))
    for node in nodes[1:]:
        path = gang.paths.get(node, ())
        depth = next((i for i in range(depth) if path[i : i + 1] != first[i : i + 1]), depth)
    return depth


def most(nodes: Iterable[str], gang: GangLayout) -> int:
    """How many of these nodes could be in one gang."""
    leaves = Counter(gang.paths[n] for n in nodes if _placed(gang, n))
    domains = Counter[TopologyPath]()
    for path, count in leaves.items():
        domains[path[: gang.within]] += segments_of(count, gang.segment)
    return max(domains.values(), default=0)


def parts(nodes: Iterable[str], gang: GangLayout) -> list[list[list[str]]]:
    """By domain that may hold the gang: what it takes or leaves as a whole there, which is segments, or single nodes.
    The nodes of each are in the order given."""
    size, found = max(gang.segment, 1), list[list[list[str]]]()
    for own in _by_domain((n for n in nodes if _placed(gang, n)), gang, gang.within).values():
        leaves = _by_domain(own, gang, len(gang.levels)).values() if gang.segment else [own]
        whole = [leaf[: segments_of(len(leaf), gang.segment)] for leaf in leaves]
        found.append([leaf[i : i + size] for leaf in whole for i in range(0, len(leaf), size)])
    return found


def segments_of(nodes: int, segment: int) -> int:
    """How many of these nodes can be used in whole segments."""
    return nodes - nodes % segment if segment else nodes


def _placed(gang: GangLayout, node: str) -> bool:
    """It is in a domain of each level that matters."""
    path = gang.paths.get(node)
    if path is None:
        return False
    return (not gang.within or bool(path[gang.within - 1])) and (not gang.segment or bool(path and path[-1]))


def _in(gang: GangLayout, node: str, domain: TopologyPath) -> bool:
    return gang.paths[node][: len(domain)] == domain


def _home(
    gang: GangLayout, staying: Sequence[str], others: Sequence[str], want: int, least: int, had: int
) -> TopologyPath | None:
    """The domain that a gang with survivors stays in; None: it moves to another as a whole. It moves only where it
    would have to become smaller, or could not go on, and another domain holds as many as it was."""
    if not gang.within:
        return ()
    able = Counter[TopologyPath]()
    for path, count in Counter(gang.paths[n] for n in (*staying, *others)).items():
        able[path[: gang.within]] += segments_of(count, gang.segment)
    homes = Counter(gang.paths[n][: gang.within] for n in staying)
    home = max(homes, key=lambda d: homes[d])  # of equals the one of the lowest rank
    enough = max(least, min(want, had))
    best = max(able.values())
    if able[home] >= enough or (able[home] >= least and best < enough) or best < least:
        return home
    return None


def _anew(groups: Sequence[Sequence[str]], want: int, gang: GangLayout, past: PastPlaces) -> list[str]:
    """A whole gang. The nodes of the best groups alone if they suffice; else the next best as well."""
    nodes: list[str] = []
    found: list[str] = []
    want = segments_of(want, gang.segment)
    for group in groups:
        nodes += group
        found = _together(_trimmed(nodes, gang), want, gang, past.warm)
        if len(found) >= want:
            break
    return found


def _trimmed(nodes: Sequence[str], gang: GangLayout) -> list[str]:
    """Without those that would be in no whole segment."""
    if not gang.segment:
        return list(nodes)
    by_leaf = _by_domain(nodes, gang, len(gang.levels))
    inner = {n for leaf in by_leaf.values() for n in leaf[: segments_of(len(leaf), gang.segment)]}
    return [n for n in nodes if n in inner]


def _together(nodes: Sequence[str], want: int, gang: GangLayout, warm: Collection[str]) -> list[str]:
    """So many of these, in the smallest domain that holds them, the one with the fewest left over; in as few domains as
    will do where none does."""
    if gang.within:
        domains = _by_domain(nodes, gang, gang.within)
        if not any(len(own) >= want for own in domains.values()):
            largest = max(domains.values(), key=len, default=[])
            return _take(largest, want, gang, warm, gang.within)
    return _take(nodes, want, gang, warm, gang.within)


def _take(nodes: Sequence[str], want: int, gang: GangLayout, warm: Collection[str], top: int) -> list[str]:
    """The smallest domain below ``top`` levels that holds so many, else these nodes' own."""
    if want <= 0:
        return []
    for depth in range(len(gang.levels), max(top, 1) - 1, -1):
        able = {d: own for d, own in _by_domain(nodes, gang, depth).items() if len(own) >= want}
        if able:
            best = min(able, key=lambda d: (-sum(n in warm for n in able[d]), len(able[d]), _sortable(d)))
            return _split(able[best], want, gang, warm, depth)
    return _split(nodes, want, gang, warm, top)


def _split(nodes: Sequence[str], want: int, gang: GangLayout, warm: Collection[str], depth: int) -> list[str]:
    """So many of a domain's nodes, of which no domain below it holds as many: the largest of those whole, and the rest
    from the one with the fewest left over."""
    if depth == len(gang.levels):
        return list(nodes[:want])
    below = _by_domain(nodes, gang, depth + 1)
    alone = [n for n in nodes if not gang.paths[n][depth]]
    got: list[str] = []
    for domain in sorted(below, key=lambda d: (-len(below[d]), _sortable(d))):
        own = below[domain]
        if len(got) + len(own) > want:
            break
        got += _split(own, len(own), gang, warm, depth + 1)
        del below[domain]
    rest = [n for own in below.values() for n in own]
    if rest and len(got) < want:
        got += _take(rest, min(want - len(got), len(rest)), gang, warm, depth + 1)
    return got + alone[: want - len(got)]


def _by_domain(nodes: Iterable[str], gang: GangLayout, depth: int) -> dict[TopologyPath, list[str]]:
    found: dict[TopologyPath, list[str]] = {}
    for node in nodes:
        path = gang.paths[node]
        if depth == 0 or path[depth - 1]:
            found.setdefault(path[:depth], []).append(node)
    return found


def _sortable(domain: TopologyPath) -> tuple[object, ...]:
    return tuple(natural(part) for part in domain)


def _beside(
    groups: Sequence[Sequence[str]], staying: Sequence[str], want: int, gang: GangLayout, past: PastPlaces
) -> list[str]:
    """Those that go on, and newcomers near to where the gang is."""
    if gang.segment:
        return _segments(groups, staying, want, gang, past)
    chosen = list(staying[:want])
    near = [gang.paths[n] for n in past.members if n not in chosen and n in gang.paths]
    home = [domain for domain, _ in Counter(gang.paths[n] for n in chosen).most_common()]
    for group in groups:
        chosen += nearest(group, want - len(chosen), gang.paths, [*near, *home])
        near = near[max(0, len(chosen) - len(staying)) :]
    return chosen


def nearest(
    nodes: Sequence[str], want: int, paths: Mapping[str, TopologyPath], to: Sequence[TopologyPath]
) -> list[str]:
    """So many of these nodes: one near each of the places ``to`` in turn, then more near the last of them, of equally
    near ones the first."""
    if want <= 0:
        return []
    if not to or not to[0]:
        return list(nodes[:want])
    places = list(dict.fromkeys(to))
    at: dict[TopologyPath, list[str]] = {}
    for node in reversed(nodes):
        path = paths[node]
        for depth in range(len(path) + 1):
            at.setdefault(path[:depth], []).append(node)
    chosen: dict[str, None] = {}

    def one(goals: Sequence[TopologyPath]) -> bool:
        for depth in range(len(to[0]), -1, -1):
            for goal in goals:
                here = at.get(goal[:depth], [])
                while here and here[-1] in chosen:
                    here.pop()
                if here and (depth == 0 or goal[depth - 1]):
                    chosen[here.pop()] = None
                    return True
        return False

    for goal in to:
        if len(chosen) < want:
            one([goal])
    while len(chosen) < want and one(places):
        pass
    return list(chosen)


def _segments(
    groups: Sequence[Sequence[str]], staying: Sequence[str], want: int, gang: GangLayout, past: PastPlaces
) -> list[str]:
    """Whole segments: those with survivors first, filled up from their own domains."""
    size, leaf = gang.segment, len(gang.levels)
    want = segments_of(want, size)
    others = _by_domain([n for group in groups for n in group], gang, leaf)
    whole: list[list[str]] = []
    for domain, mine in _by_domain(staying, gang, leaf).items():
        able = [*mine, *others.get(domain, ())]
        count = min(segments_of(len(able), size), segments_of(len(mine) + size - 1, size))
        whole += [able[i : i + size] for i in range(0, count, size)]
    rank = {n: i for i, n in enumerate(staying)}
    whole.sort(key=lambda segment: min(rank.get(n, len(rank)) for n in segment))
    chosen = [n for segment in whole[: want // size] for n in segment]
    taken = set(chosen)
    rest = [[n for n in group if n not in taken] for group in (staying, *groups)]
    if len(chosen) < want:
        chosen += _anew(rest, want - len(chosen), replace(gang, within=0), past)
    return chosen


def spread(pool: Sequence[Sequence[str]], want: int, values: Mapping[str, str], staying: Sequence[str]) -> list[str]:
    """Those that go on, then of each group of newcomers those whose value fewest have so far."""
    chosen = list(staying[:want])
    counts = Counter(values[n] for n in chosen)
    for group in pool:
        waiting: dict[str, list[str]] = {}
        for node in reversed(group):
            waiting.setdefault(values[node], []).append(node)
        first = {value: i for i, value in enumerate(reversed(waiting))}
        while waiting and len(chosen) < want:
            value = min(waiting, key=lambda v: (not v, counts[v], first[v]))
            chosen.append(waiting[value].pop())
            counts[value] += 1
            if not waiting[value]:
                del waiting[value]
    return chosen


DOMAINS_SHOWN = 6
"""Domains that are named at once."""


def placement_asked(spec: JobSpec) -> str:
    """What its nodes must and should be like; empty if it asks nothing."""
    parts = [f"all in one {spec.within}"] * bool(spec.within)
    parts += [f"segments of {spec.segments}"] * bool(spec.segments)
    if not spec.several:
        return "; ".join([*_constraints_asked(spec.role.placement), *parts])
    parts = [
        f"{role.name} {', '.join(own)}" for role in spec.roles if (own := _constraints_asked(role.placement))
    ] + parts
    return "; ".join(parts)


def _constraints_asked(asked: Constraints | None) -> list[str]:
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
    gang, generation = gang_of(cluster, job.spec), job.generation
    paths = [gang.paths[m.node] for m in generation.ordered() if m.node in gang.paths] if generation is not None else []
    if not paths or not gang.levels:
        return ""
    for depth in range(len(gang.levels), 0, -1):
        if len({path[:depth] for path in paths}) == 1 and paths[0][depth - 1]:
            return f"in one {gang.levels[depth - 1]}, {_name_of(paths[0][:depth])}"
    counts = Counter(path[:1] for path in paths)
    domains = sorted(counts, key=lambda domain: tuple(map(natural, domain)))
    named = [f"{_name_of(domain)} ({counts[domain]})" for domain in domains]
    return f"by {gang.levels[0]}: {some(named, DOMAINS_SHOWN)}"


def _name_of(domain: tuple[str, ...]) -> str:
    return "/".join(part or "-" for part in domain)


def gang_of(cluster: Cluster, spec: JobSpec) -> GangLayout:
    """How the nodes of a job have to lie."""
    known, role = tree(cluster), None if spec.several else spec.role.placement
    levels = known.levels_for(spec.within)
    if role is not None and role.pack not in ("", NODE) and spec.placement is None:
        levels = (role.pack,)
    within = levels.index(spec.within) + 1 if spec.within else 0
    return GangLayout(levels, known.paths(levels), within, spec.segments)
