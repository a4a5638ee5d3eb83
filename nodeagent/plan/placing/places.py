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
from nodeagent.plan.nodes.candidates import free_gpus, workers_wanted
from nodeagent.plan.nodes.devices import pick
from nodeagent.plan.nodes.labels import Tree


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
    return Ground(roles, sites).lay_out()


class _Fit(NamedTuple):
    """What a place of a role takes at a site that allows it, and what the role's wishes say of that site."""

    gpus: int
    slots: int
    workers: int
    value: str
    """Of the label that its places are spread over, or packed by."""
    score: int


class _Bound(NamedTuple):
    """What a part of the sites has room for at most, by a count of what is free: the layout itself may find less."""

    places: int
    least: bool
    """Each role could have its fewest."""
    whole: bool
    """Each role could have all that it wants."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What a part of the sites holds. Its places are written out only if it is the one that is taken."""

    tried: _Try | None
    """None: not all places fit."""
    lack: str = ""
    left: str = ""

    @property
    def count(self) -> int:
        return self.tried.count if self.tried is not None else 0

    def layout(self) -> Layout:
        return Layout(self.tried.places() if self.tried is not None else {}, self.lack, self.left)


class Ground:
    """The sites, the first preferred, and what places of these roles take there. It is found once for all that is tried
    on them, and on parts of them: somebody may ask for thousands of places, and there may be a domain for each node.

    A part (``among``) is the numbers of some sites, ascending. ``known``: what is known of the nodes' labels; without
    it, the sites' own labels count.
    """

    def __init__(self, roles: Sequence[Role], sites: Sequence[Site], known: Tree | None = None) -> None:
        self.roles, self.sites = roles, sites
        self.gpus = [free_gpus(site.facts, site.devices) for site in sites]
        """How many are free at each site."""
        self.slots = [len(site.devices) - gpus for site, gpus in zip(sites, self.gpus, strict=True)]
        self.fits = self._all_fits(known or Tree((), {site.node: site.facts.labels for site in sites}))
        self._every: Sequence[int] = range(len(sites))
        self._elastic = any(role.least < role.places for role in roles)
        self._room: tuple[list[list[int]], list[int]] | None = None
        self._thrift: list[tuple[int, int]] = []
        """Of each role the fewest GPUs, and the fewest slots, that a place of it takes anywhere."""

    def lay_out(self) -> Layout:
        """On all sites."""
        return self._on(self._every).layout()

    def lay_out_in(self, domains: Sequence[Sequence[int]], within: str) -> Layout:
        """In the first of these parts that has room for all places; where none has, in the one that holds most, of
        equals the first, and then on all sites, unless the places have to be ``within`` one.

        A part is laid out only if a count of what is free there does not rule out that it is the one.
        """
        able: list[tuple[int, Sequence[int], _Bound, str]] = []
        for number, among in enumerate(domains):
            bound = self._bound(among)
            if bound.whole:
                found = self._whole(among)
                if found.tried is not None:
                    return found.layout()
                able.append((number, among, bound, found.lack))
            elif bound.least:
                able.append((number, among, bound, ""))
        best, where = None if within else self._on(self._every), self._every
        if best is not None and best.tried is not None and not best.left:
            return best.layout()
        rank = best.count if best is not None else 0, -len(domains)
        for number, among, bound, lack in (
            sorted(able, key=lambda one: (-one[2].places, one[0])) if self._elastic else ()
        ):
            if (bound.places, -number) < rank:
                break
            found = self._fewer(among, lack, bound.places)
            if found.tried is not None and (found.count, -number) > rank:
                best, where, rank = found, among, (found.count, -number)
        if best is not None:
            if best.tried is not None and not best.left:  # nobody is to know of the others
                best = replace(best, left=self._whole(where, others=False).lack)
            return best.layout()
        anywhere = self._on(self._every)
        return anywhere.layout() if anywhere.lack else Layout(lack=f"no {within} has room for all of its places")

    def holds(self, domains: Sequence[Sequence[int]], within: str) -> bool:
        """Whether ``lay_out_in`` finds room for the fewest places of each role at least; without laying out more."""
        parts = domains if within else (self._every, *domains)
        return any(self._bound(among).least and self._holds(among) for among in parts)

    def _holds(self, among: Sequence[int]) -> bool:
        if self._elastic:
            for spread, stay in self._ways(among):
                if not _Try(self, among, sticky=False, spread=spread).take_least(stay):
                    return True
        return self._bound(among).whole and self._whole(among).tried is not None

    def _on(self, among: Sequence[int]) -> _Found:
        bound = self._bound(among)
        found = self._whole(among, others=bound.whole)
        if found.tried is not None or not self._elastic or not among:
            return found
        return self._fewer(among, found.lack, bound.places)

    def _whole(self, among: Sequence[int], *, others: bool = True) -> _Found:
        """All places that are wanted; else what is in the way of the first way to place them. ``others``: there may be
        a way."""
        first = _Try(self, among, sticky=True, spread=True)
        lack = first.run()
        if not lack:
            return _Found(first)
        had = self._had(among)
        for spread in ((True, False) if had else (False,)) if among and others else ():
            other = _Try(self, among, sticky=False, spread=spread)
            if not other.run():
                return _Found(other)
        return _Found(None, lack)

    def _fewer(self, among: Sequence[int], left: str, most: int) -> _Found:
        """As many as fit, from the fewest of each role. ``left``: why not all. ``most``: there cannot be more."""
        best: _Try | None = None
        first = ""
        for spread, stay in self._ways(among):
            one = _Try(self, among, sticky=False, spread=spread)
            lack = one.as_many_as_fit(stay)
            first = first or lack
            if not lack and (best is None or one.count > best.count):  # of equals the first
                best = one
                if one.count == most:
                    break
        return _Found(best, left=left) if best is not None else _Found(None, first)

    def _had(self, among: Sequence[int]) -> bool:
        return any(self.sites[i].had for i in among)

    def _ways(self, among: Sequence[int]) -> list[tuple[bool, Mapping[str, int]]]:
        """Whether to spread the places, and how many of each role stay where they were."""
        ways: list[tuple[bool, Mapping[str, int]]] = [(True, {}), (False, {})]
        if self._had(among):
            all_stay = {role.name: role.places for role in self.roles}
            ways = [(True, all_stay), (True, {role.name: role.least for role in self.roles}), *ways]
        return ways

    def _bound(self, among: Sequence[int]) -> _Bound:
        room, at = self._room or self._all_room()
        total = sum([at[i] for i in among])
        count, least, whole = 0, True, total >= sum(role.places for role in self.roles)
        gpus = slots = 0
        for role, own, (each_gpus, each_slots) in zip(self.roles, room, self._thrift, strict=True):
            able = sum([own[i] for i in among])
            least, whole = least and able >= role.least, whole and able >= role.places
            count += min(able, role.places)
            gpus, slots = gpus + role.places * each_gpus, slots + role.places * each_slots
        least = least and total >= sum(role.least for role in self.roles)
        if whole:
            whole = gpus <= sum([self.gpus[i] for i in among]) and slots <= sum([self.slots[i] for i in among])
        return _Bound(min(count, total), least, whole)

    def _all_room(self) -> tuple[list[list[int]], list[int]]:
        """How many places of each role each site has room for, if there was no other role; and of all of them."""
        room, most, number = list[list[int]](), [0] * len(self.sites), len(self.sites)
        least_gpus, least_slots = [0] * number, [0] * number
        for role in self.roles:
            fits, own = self.fits[role.name], [0] * number
            for i, fit in fits.items():
                count = self.gpus[i] // fit.gpus if fit.gpus else self.slots[i] // fit.slots
                if role.replicas is None:
                    count = min(count, 1)
                own[i] = count
                most[i] += count
                of, each = (least_gpus, fit.gpus) if fit.gpus else (least_slots, fit.slots)
                if not 0 < of[i] < each:
                    of[i] = each
            room.append(own)
            all_of = fits.values()
            gpus, slots = min((f.gpus for f in all_of), default=0), min((f.slots for f in all_of), default=0)
            self._thrift.append((gpus, slots))
        for i, count in enumerate(most):
            gpus, slots = least_gpus[i], least_slots[i]
            most[i] = min(count, (self.gpus[i] // gpus if gpus else 0) + (self.slots[i] // slots if slots else 0))
        self._room = room, most
        return self._room

    def _all_fits(self, known: Tree) -> dict[str, dict[int, _Fit]]:
        """By role, and by the site's number. Most sites are alike."""
        found: dict[str, dict[int, _Fit]] = {}
        nodes, installed = [site.node for site in self.sites], [len(site.facts.gpus) for site in self.sites]
        values = {"": [""] * len(nodes)}
        for role in self.roles:
            asked, alike = role.placement or Constraints(), dict[tuple[int, str, int], _Fit]()
            label = asked.spread or asked.pack
            if label not in values:
                values[label] = [value_of(label, site.node, site.facts.labels) for site in self.sites]
            able = known.allowed(asked) if asked.hard else known.labels
            scores = known.scores(asked) if asked.prefer or asked.avoid else {}
            own, wanted = found.setdefault(role.name, {}), dict[int, tuple[int, int, int]]()
            for i, key in enumerate(zip(installed, values[label], [scores.get(n, 0) for n in nodes], strict=True)):
                if nodes[i] in able:
                    if (fit := alike.get(key)) is None:
                        has, value, score = key
                        if has not in wanted:
                            wanted[has] = (*devices_for(role, has), workers_wanted(role, has))
                        fit = alike[key] = _Fit(*wanted[has], value, score)
                    own[i] = fit
        return found


class _Try:
    """One pass over the roles, those whose places need most first. Sites go by their numbers. Free devices are only
    counted: which ones a place gets is found out for the pass that is taken."""

    def __init__(self, ground: Ground, among: Sequence[int], *, sticky: bool, spread: bool) -> None:
        self._ground, self.among, self._sticky, self._spread = ground, among, sticky, spread
        self._roles, self._sites, self.fits = ground.roles, ground.sites, ground.fits
        self._gpus, self._slots = ground.gpus[:], ground.slots[:]
        self._taken: dict[int, list[tuple[str, int]]] = {}
        """By site the places that were taken, one after the other: role and index."""
        self._used: dict[str, set[int]] = {role.name: set() for role in self._roles}
        """The indexes that each role's places have."""
        self.at: dict[str, Counter[int]] = {role.name: Counter() for role in self._roles}
        """How many places each role has at which site."""

    @property
    def count(self) -> int:
        """The number of places."""
        return sum(map(len, self._used.values()))

    def run(self) -> str:
        """All places that are wanted; else what is in the way."""
        for role in self._by_need():
            if lack := self._place(role):
                return lack
        return ""

    def as_many_as_fit(self, stay: Mapping[str, int]) -> str:
        """So many places of each role that stay where they were (``stay``; empty: none do), then each role's fewest,
        then others that stay, then one by one those that it wants more: always of the role that has the smallest part
        of what it wants, of equals the first of the file. Else what is in the way of the fewest."""
        if lack := self.take_least(stay):
            return lack
        for role in self._by_need() if stay else ():
            self._keep(role, role.places)
        self._add_more()
        self._number_anew()
        return ""

    def take_least(self, stay: Mapping[str, int]) -> str:
        """The first half of that."""
        for role in self._by_need() if stay else ():
            self._keep(role, stay[role.name])
        for role in self._by_need():
            used = self._used[role.name]
            free = [i for i in range(role.places) if i not in used][: max(0, role.least - len(used))]
            left = self._each(role, free)
            if left is not None:
                return self._no_room(role, left)
        return ""

    def _had(self, role: Role) -> dict[int, int]:
        """The places that it holds: index to site."""
        return {
            int(name.rpartition(".")[2]): i for i in self.among for name in self._sites[i].had if _is_of(name, role)
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
        for places in self._taken.values():
            places[:] = [(role, moved.get((role, index), index)) for role, index in places]

    def _by_need(self) -> list[Role]:
        most = max((len(self._sites[i].facts.gpus) for i in self.among), default=0)
        return sorted(self._roles, key=lambda role: (*devices_for(role, most), role.replicas is None), reverse=True)

    def places(self) -> dict[str, tuple[Place, ...]]:
        """Node to its places, in the roles' order."""
        rank = {role.name: i for i, role in enumerate(self._roles)}
        found = {}
        for i in sorted(self._taken):
            places = self._written_out(i)
            places.sort(key=lambda place: (rank[place.role], place.index))
            found[self._sites[i].node] = tuple(places)
        return found

    def _written_out(self, i: int) -> list[Place]:
        """The places of one site with their devices, in the order in which they were taken."""
        site = self._sites[i]
        gpus = [gpu for gpu in site.facts.gpus if gpu.uuid in site.devices]
        slots = sorted((d for d in site.devices if d.startswith("cpu")), key=natural)
        places, first = list[Place](), 0
        for role, index in self._taken[i]:
            fit = self.fits[role][i]
            if fit.gpus:
                devices = pick(gpus, fit.gpus)
                gpus = [gpu for gpu in gpus if gpu.uuid not in devices]
            else:
                devices = tuple(slots[first : first + fit.slots])
                first += fit.slots
            places.append(Place(role=role, index=index, workers=fit.workers, devices=devices))
        return places

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
        return len(self._taken.get(i, ())) if self._spread else self._gpus[i] + self._slots[i]

    def open_to(self, role: Role) -> list[tuple[int, int, _Fit]]:
        """The sites that have room for one more place of the role, with their loads. As ``has_room`` and ``load`` of
        each, but all sites are looked at for each role of each pass."""
        gpus, slots, taken, fits = self._gpus, self._slots, self._taken, self.fits[role.name]
        alone = self.at[role.name] if role.replicas is None else ()
        able = [
            (i, fits[i])
            for i in self.among
            if i in fits and gpus[i] >= fits[i].gpus and slots[i] >= fits[i].slots and i not in alone
        ]
        if self._spread:
            return [(i, len(taken[i]) if i in taken else 0, fit) for i, fit in able]
        return [(i, gpus[i] + slots[i], fit) for i, fit in able]

    def has_room(self, role: Role, i: int) -> bool:
        """Whether one more place of the role can be there. Where there is no room there never is any again."""
        fit = self.fits[role.name].get(i)
        if fit is None or (role.replicas is None and i in self.at[role.name]):
            return False
        return self._gpus[i] >= fit.gpus and self._slots[i] >= fit.slots

    def _take(self, role: Role, index: int, i: int) -> None:
        fit = self.fits[role.name][i]
        self._gpus[i] -= fit.gpus
        self._slots[i] -= fit.slots
        self._taken.setdefault(i, []).append((role.name, index))
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
        for i, load, fit in tried.open_to(role):
            self._load[i] = load
            of = fit.value, fit.score
            if (sites := self._alike.get(of)) is None:
                sites = self._alike[of] = []
                self._scores.setdefault(fit.value, {})[fit.score] = None
            sites.append((load, i))
            if self._pack:
                self._room[fit.value] += 1
        self._first: list[tuple[_Key, tuple[str, int]]] = []
        """A heap of the best of each that are alike, and of what it was before."""
        for of, sites in self._alike.items():
            heapify(sites)
            self._first.append((self._key_of(*of, sites[0]), of))
        heapify(self._first)

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
                if self._pack:
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
        return self._key_of(value, score, sites[0])

    def _key_of(self, value: str, score: int, first: tuple[int, int]) -> _Key:
        if self._pack:
            return -score, -self._here[value], -self._room[value], *first
        return -score, self._here[value] if self._spread else 0, 0, *first


def _is_of(name: str, role: Role) -> bool:
    return Place.role_of(name) == role.name


def _wants(role: Role) -> str:
    """What one of its places takes, as far as it does not depend on the node."""
    workers = role.workers_per_node
    text = "a worker for each GPU" if workers == "gpu" else f"{workers} worker{'s' if workers > 1 else ''}"
    gpus = f" with {role.gpus_per_worker} GPUs each" if role.gpus_per_worker else ""
    return text + gpus
