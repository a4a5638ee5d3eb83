"""Where the places of a job of several roles go: all of them, or none; of an elastic role as many as fit, from its
fewest up to those that it wants. Pure; who may take part is ``nodes/candidates.py``'s.

Looks for a spread in which places stay where they were, then for any spread, then packs them densely. It is no
exhaustive search: with odd sizes of GPUs a packing that exists may be missed, and then the job waits, and says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from nodeagent.model.constraints import Constraints, value_of
from nodeagent.model.jobspec import MOST_NODES, Role
from nodeagent.model.node import NodeFacts
from nodeagent.model.world import Member, Place
from nodeagent.plan.cluster import natural
from nodeagent.plan.fairshare.resources import devices_for
from nodeagent.plan.nodes.candidates import allowed, workers_wanted
from nodeagent.plan.nodes.devices import pick


@dataclass(frozen=True, slots=True)
class Site:
    """A node that may take part, with the devices that are free for the job."""

    node: str
    facts: NodeFacts
    devices: tuple[str, ...]
    had: frozenset[str] = frozenset()
    """Names of the places that it holds now."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Node to its places, in the roles' order; empty with the reason if not all of them fit."""

    places: Mapping[str, tuple[Place, ...]] = field(default_factory=dict)
    lack: str = ""
    left: str = ""
    """Why an elastic role has fewer places than it wants: the first of them that has no node. Empty if none has."""

    @property
    def count(self) -> int:
        """The number of places."""
        return sum(map(len, self.places.values()))


def had_places(member: Member | None) -> frozenset[str]:
    """Names of the places that a member holds."""
    return frozenset(place.name for place in member.places) if member is not None else frozenset()


def lay_out(roles: Sequence[Role], sites: Sequence[Site]) -> Layout:
    """A place for each replica of each role on these nodes, of which the first are preferred. Those of a role with
    ``nodes`` are on different nodes. Elastic roles have fewer only where nothing has room for all."""
    fits = {role.name: _fits(role, sites) for role in roles}
    first = _Try(roles, sites, fits, sticky=True, spread=True).run()
    if not first.lack or not sites:
        return first
    had = any(site.had for site in sites)
    for spread in (True, False) if had else (False,):
        other = _Try(roles, sites, fits, sticky=False, spread=spread).run()
        if not other.lack:
            return other
    if all(role.least == role.places for role in roles):
        return first
    ways: list[tuple[bool, Mapping[str, int]]] = [(True, {}), (False, {})]
    if had:
        all_stay = {role.name: role.places for role in roles}
        ways = [(True, all_stay), (True, {role.name: role.least for role in roles}), *ways]
    fewer = [_Try(roles, sites, fits, sticky=False, spread=spread).as_many_as_fit(stay) for spread, stay in ways]
    best = max((one for one in fewer if not one.lack), key=lambda one: one.count, default=None)  # of equals the first
    return replace(best, left=first.lack) if best is not None else fewer[0]


def could_hold(roles: Sequence[Role], sites: Sequence[Site]) -> bool:
    """False if these nodes have too little for all places, however they are laid out."""
    alone = max((role.least for role in roles if role.replicas is None), default=1)
    return len(sites) >= alone and sum(len(site.devices) for site in sites) >= sum(role.least for role in roles)


class _Fit(NamedTuple):
    """What a place of a role takes at a site that allows it, and what the role's wishes say of that site."""

    gpus: int
    slots: int
    workers: int
    value: str
    """Of the label that its places are spread over, or packed by."""
    score: int


def _fits(role: Role, sites: Sequence[Site]) -> dict[int, _Fit]:
    """By the site's number. It is found once for all that is tried: somebody may ask for thousands of places."""
    asked = role.placement or Constraints()
    label = asked.spread or asked.pack
    found = {}
    for i, site in enumerate(sites):
        if not allowed(role, site.node, site.facts):
            has, labels = len(site.facts.gpus), site.facts.labels
            value = value_of(label, site.node, labels) if label else ""
            wanted = (*devices_for(role, has), workers_wanted(role, has))
            found[i] = _Fit(*wanted, value, asked.score(site.node, labels))
    return found


class _Try:
    """One pass over the roles, those whose places need most first. Sites go by their numbers."""

    def __init__(
        self, roles: Sequence[Role], sites: Sequence[Site], fits: Mapping[str, Mapping[int, _Fit]], *, sticky: bool,
        spread: bool,
    ) -> None:  # fmt: skip
        self._roles, self._sites, self._sticky, self._spread = roles, sites, sticky, spread
        self.fits = fits
        self._gpus = [[g.uuid for g in s.facts.gpus if g.uuid in s.devices] for s in sites]
        self._slots = [sorted((d for d in s.devices if d.startswith("cpu")), key=natural) for s in sites]
        self._taken: list[list[Place]] = [[] for _ in sites]
        self._used: dict[str, set[int]] = {role.name: set() for role in roles}
        """The indexes that each role's places have."""
        self.at: dict[str, Counter[int]] = {role.name: Counter() for role in roles}
        """How many places each role has at which site."""

    def run(self) -> Layout:
        """All places that are wanted, or what is in the way."""
        for role in self._by_need():
            if lack := self._place(role):
                return Layout(lack=lack)
        return self._found()

    def as_many_as_fit(self, stay: Mapping[str, int]) -> Layout:
        """So many places of each role that stay where they were (``stay``; empty: none do), then each role's fewest,
        then others that stay, then one by one those that it wants more: always of the role that has the smallest part
        of what it wants, of equals the first of the file."""
        for role in self._by_need() if stay else ():
            self._keep(role, stay[role.name])
        for role in self._by_need():
            used = self._used[role.name]
            free = [i for i in range(role.places) if i not in used][: max(0, role.least - len(used))]
            left = self._each(role, free)
            if left is not None:
                return Layout(lack=self._no_room(role, left))
        for role in self._by_need() if stay else ():
            self._keep(role, role.places)
        self._add_more()
        self._number_anew()
        return self._found()

    def _had(self, role: Role) -> dict[int, int]:
        """The places that it holds: index to site."""
        return {
            int(name.rpartition(".")[2]): i
            for i, site in enumerate(self._sites)
            for name in site.had
            if _is_of(name, role)
        }

    def _keep(self, role: Role, most: int) -> None:
        """Up to so many places of the role are where they were, those first that were first."""
        used, was = self._used[role.name], self._had(role)
        for index in sorted(was.keys() - used):
            if len(used) < most and self.has_room(role, was[index]):
                self._take(role, index, was[index])

    def _add_more(self) -> None:
        has = {role.name: len(self._used[role.name]) for role in self._roles}
        wants = {role.name: role.places for role in self._roles}
        grows = [role for role in self._roles if has[role.name] < wants[role.name]]
        open_to = {role.name: _Open(self, role) for role in grows}
        while grows:
            role = min(grows, key=lambda role: has[role.name] / wants[role.name])
            i = open_to[role.name].best()
            if i is None:
                grows.remove(role)
                continue
            self._take(role, MOST_NODES + has[role.name], i)
            has[role.name] += 1
            if has[role.name] == wants[role.name]:
                grows.remove(role)
            for one in grows:
                open_to[one.name].taken(i, own=one is role)

    def _number_anew(self) -> None:
        """Indexes without gaps: a place keeps its own if there are so many, and the others fill the holes."""
        moved: dict[tuple[str, int], int] = {}
        for role, used in self._used.items():
            holes = iter([i for i in range(len(used)) if i not in used])
            moved |= {(role, i): next(holes) for i in sorted(used) if i >= len(used)}
        self._taken = [
            [
                place.model_copy(update={"index": moved[key]}) if (key := (place.role, place.index)) in moved else place
                for place in places
            ]
            for places in self._taken
        ]

    def _by_need(self) -> list[Role]:
        most = max((len(site.facts.gpus) for site in self._sites), default=0)
        return sorted(self._roles, key=lambda role: (*devices_for(role, most), role.replicas is None), reverse=True)

    def _found(self) -> Layout:
        rank = {role.name: i for i, role in enumerate(self._roles)}
        for places in self._taken:
            places.sort(key=lambda place: (rank[place.role], place.index))
        found = zip(self._sites, self._taken, strict=True)
        return Layout({site.node: tuple(places) for site, places in found if places})

    def _place(self, role: Role) -> str:
        """Places of this role; a phrase if one has no node."""
        used = self._used[role.name]
        if self._sticky:
            for index, i in sorted(self._had(role).items(), key=lambda had: had[::-1]):
                if index < role.places and self.has_room(role, i):
                    self._take(role, index, i)
        left = self._each(role, [i for i in range(role.places) if i not in used])
        return "" if left is None else self._no_room(role, left)

    def _no_room(self, role: Role, index: int) -> str:
        one = f"{role.name}.{index}" if role.places > 1 else role.name
        such = f" {role.placement.words}" if role.placement is not None and role.placement.hard else ""
        return f"no node{such} has room for {one} ({_wants(role)})"

    def _each(self, role: Role, free: Iterable[int]) -> int | None:
        """Each of these places where it goes best; the place for which there is no room."""
        able = _Open(self, role)
        for index in free:
            i = able.best()
            if i is None:
                return index
            self._take(role, index, i)
            able.taken(i, own=True)
        return None

    def load(self, i: int) -> int:
        """Of sites that are equal otherwise, the one with the least is taken."""
        return len(self._taken[i]) if self._spread else len(self._gpus[i]) + len(self._slots[i])

    def has_room(self, role: Role, i: int) -> bool:
        """Whether one more place of the role can be there. Where there is no room there never is any again."""
        fit = self.fits[role.name].get(i)
        if fit is None or (role.replicas is None and i in self.at[role.name]):
            return False
        return len(self._gpus[i]) >= fit.gpus and len(self._slots[i]) >= fit.slots

    def _take(self, role: Role, index: int, i: int) -> None:
        fit = self.fits[role.name][i]
        if fit.gpus:
            left = self._gpus[i]
            devices = pick([gpu for gpu in self._sites[i].facts.gpus if gpu.uuid in left], fit.gpus)
            self._gpus[i] = [uuid for uuid in left if uuid not in devices]
        else:
            devices = tuple(self._slots[i][: fit.slots])
            del self._slots[i][: fit.slots]
        self._taken[i].append(Place(role=role.name, index=index, workers=fit.workers, devices=devices))
        self._used[role.name].add(index)
        self.at[role.name][i] += 1


_Key = tuple[int, int, int, int, int]
"""By what sites are compared: the score, what the label's value has of the role, how much room it has, the load, and
the number among the sites."""


class _Open:
    """The sites that have room for a role. A place that is taken changes one site, and what its value of the role's
    label counts for: not all sites are looked at for each place, since somebody may ask for thousands."""

    def __init__(self, tried: _Try, role: Role) -> None:
        self._try, self._role, self._fits = tried, role, tried.fits[role.name]
        asked = role.placement or Constraints()
        self._spread, self._pack = bool(asked.spread) and not asked.pack, bool(asked.pack)
        self._load: dict[int, int] = {}
        """Of sites with room."""
        self._alike: dict[tuple[str, int], list[tuple[int, int]]] = {}
        """Value and score to a heap of loads and sites, some of which hold no longer."""
        self._scores: dict[str, dict[int, None]] = {}
        """Of each value."""
        self._here = Counter[str]()
        for i, count in tried.at[role.name].items():
            self._here[self._fits[i].value] += count
        self._room = Counter[str]()
        for i, fit in self._fits.items():
            if tried.has_room(role, i):
                self._load[i] = load = tried.load(i)
                self._alike.setdefault((fit.value, fit.score), []).append((load, i))
                self._scores.setdefault(fit.value, {})[fit.score] = None
                self._room[fit.value] += 1
        for sites in self._alike.values():
            heapify(sites)
        self._first: list[tuple[_Key, tuple[str, int]]] = []
        """A heap of the best of each that are alike, and of what it was before."""
        for value in self._scores:
            self._rank(value)

    def best(self) -> int | None:
        """Where the next place goes, of equals the first; None if no site has room."""
        while self._first:
            key, alike = self._first[0]
            if key == self._key(alike):
                return key[-1]
            heappop(self._first)  # whatever changed was ranked anew
        return None

    def taken(self, i: int, *, own: bool) -> None:
        """A place was taken at this site. ``own``: one of this role."""
        fit = self._fits.get(i)
        if fit is None:
            return
        self._here[fit.value] += own
        if i in self._load:
            if self._try.has_room(self._role, i):
                self._load[i] = load = self._try.load(i)
                heappush(self._alike[fit.value, fit.score], (load, i))
            else:
                del self._load[i]
                self._room[fit.value] -= 1
        elif not own:
            return  # it has changed nothing that this role's sites are compared by
        self._rank(fit.value)

    def _rank(self, value: str) -> None:
        for score in self._scores.get(value, ()):
            if (key := self._key((value, score))) is not None:
                heappush(self._first, (key, (value, score)))

    def _key(self, alike: tuple[str, int]) -> _Key | None:
        """Of the best of these; None if none has room."""
        value, score = alike
        sites = self._alike[alike]
        while sites and self._load.get(sites[0][1]) != sites[0][0]:
            heappop(sites)
        if not sites:
            return None
        here = -self._here[value] if self._pack else self._here[value] if self._spread else 0
        return -score, here, -self._room[value] if self._pack else 0, *sites[0]


def _is_of(name: str, role: Role) -> bool:
    return Place.role_of(name) == role.name


def _wants(role: Role) -> str:
    """What one of its places takes, as far as it does not depend on the node."""
    workers = role.workers_per_node
    text = "a worker for each GPU" if workers == "gpu" else f"{workers} worker{'s' if workers > 1 else ''}"
    gpus = f" with {role.gpus_per_worker} GPUs each" if role.gpus_per_worker else ""
    return text + gpus
