"""What the lease process does next: a state machine without I/O, clock or randomness; ``main`` and the simulation drive
it.

| state | the agent speaks | it is silent | renewed | refused | a job waits for it |
|---|---|---|---|---|---|
| holding | hold on | for ``patience``: stopping | grant | lost | after a lease of silence (*): let it go |
| stopping (workers end in order) | stop on | stop on | grant | lost | let it go |
| giving up (nothing is granted) | - | - | - | lost | - |
| lost (nothing is granted) | a new life: holding | - | - | - | - |

(*) or after one in which the store answered this process in time, and not the agent, which speaks: it is cut off; or
after ``patience``, however late the store answered.

Stopping and giving up end with the lease given back, once no worker can run (the shims have reported it, or their time
and ``kill`` are over), and once what this node has promised others (``failsafe.py``) is over. So does letting go of one
job (``withdrawals.py``), whose pod alone has no time until the store knows. Every deadline counts from *before* a
renewal was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from nodeagent.lease.grants import Grant, grant_key
from nodeagent.lease.lending import Promises
from nodeagent.lease.order import LeaseOrder
from nodeagent.lease.withdrawals import NOTHING_WITHDRAWN, Withdrawals

LeaseState = Literal["idle", "holding", "stopping", "giving up", "lost", "left"]
LeaseCall = Literal["renew", "leave", "let go"]
FOREIGN = frozenset({"era", "unknown"})
"""Codes of refusals by a store that may have lost what this node knows."""
NOBODY_WAITS: Mapping[str, int] = {}
MOMENT = 0.001
"""Seconds after which something that was due is over."""
NO_PROMISES = Promises("", float("-inf"), True, {})
NEVER = float("inf")


class Departure(NamedTuple):
    """The end of a life, and why: written down before it is reported, so that no restart takes it back."""

    life: str
    start: int
    """Of the agent; one that has joined since takes the node up again."""
    era: str
    """Of the store: in another one an agent has joined since, too."""
    stop_before: float
    at_once: bool
    why: str


class Core:
    """One lease process. ``now`` is CLOCK_BOOTTIME in seconds. ``departure`` and ``withdrawn``: what an earlier one had
    decided; ``granted``: the pods' records when this one started; ``renewed``: when the node's last good renewal was
    sent, as far as an earlier one has written it."""

    def __init__(
        self,
        now: float,
        departure: Departure | None = None,
        granted: Mapping[str, float] | None = None,
        renewed: float | None = None,
        withdrawn: Withdrawals = NOTHING_WITHDRAWN,
    ) -> None:
        self.order: LeaseOrder | None = None
        self.departure = departure
        """Save it before the grants are written."""
        self.withdrawn = withdrawn
        """So this: and ask the store to let go of nothing before it is saved."""
        self._lets_go_at = now
        """When to ask the store next, after it has not answered."""
        self._lets_go_first = False
        """The last call was a renewal whose answer took so long that the next one is due: else there would be nothing
        but renewals."""
        self.away = ""
        """Why the last renewal was not answered; empty if it was."""
        self.renewed = 0.0
        """When the last good renewal of this life was sent."""
        self.last = now if renewed is None or renewed > now else renewed
        """When the last good one was, of whichever life or process; the start, if nobody knows."""
        self.unannounced = 0
        """The newest revision in the store that woke nobody, as of the last renewal."""
        self.promises = NO_PROMISES
        """What this node has promised others, as it is written down."""
        self._estranged = False
        """The store's last answer is of another era than the agent's last order."""
        self._agent_seen = self._agent_reached = now
        self.standing: Mapping[str, int] = NOBODY_WAITS
        """As the agent said last, if it is cut off: see ``agent_seen``."""
        self._answered_since = NEVER
        """When the first of the renewals was sent that have been answered in time since one was not."""
        self._served_since = NEVER
        """The same of those that have been answered at all, one within each lease."""
        self._until = 0.0
        self._own: dict[str, float] = dict(granted or {})
        """Pods whose time is not the node's alone: lent by failsafe members, or granted before this process started."""
        self._next = now
        self._owner = ("", "")
        """The last life, and the node that it is."""
        self._lost = self._left = False
        self._named: tuple[Withdrawals, Mapping[str, str]] | None = None
        self._taken_back = departure is not None and departure.at_once
        """An earlier process took the pods' time back, and nobody knows any more how long it was."""

    @property
    def state(self) -> LeaseState:
        if self.order is None:
            return "idle"
        if self._left or self._lost or self._is_anothers(self.order):
            return "left" if self._left else "lost"
        if self.departure is not None:
            return "giving up" if self.departure.at_once else "stopping"
        return "holding"

    # --- what happens

    def take(self, now: float, order: LeaseOrder | None) -> None:
        """The agent's order, whenever it is another one; None: it has given the lease back."""
        old, self.order = self.order, order
        if order is None:
            self._until, self._own = 0.0, {}
            return
        if self.withdrawn.life != order.life:
            self.withdrawn = Withdrawals(order.life, {})
        if self.departure is not None and self.departure[:3] != (order.life, order.start, order.era):
            self.departure = None
        if old is None or old.incarnation != order.incarnation:
            self._lost = self._left = self._estranged = False  # an agent has joined since, or has sent an order
        if old is None or old.life != order.life:
            self._until, self.renewed, self.away = 0.0, 0.0, ""
        if old is not None and old.life != order.life:
            self._own = {}
        if self._owner[0] != order.life:
            self._owner = order.life, order.node
        elif self._is_anothers(order):
            self.away = f"this life is the node {self._owner[1]}'s, and is not renewed for {order.node}"
        if old != order:
            self._next = now

    def agent_seen(self, now: float, cut_off: bool = False, standing: Mapping[str, int] = NOBODY_WAITS) -> None:
        """The agent speaks. ``cut_off``: the store has not answered what it asked last. ``standing``: nothing runs here
        of these jobs (uids), of generations with these numbers, and others may wait for what it cannot start or
        report."""
        self._agent_seen, self.standing = now, standing
        if not cut_off:
            self._agent_reached = now

    def woke(self, now: float, slept: float) -> None:
        """The machine was suspended for so many seconds: nobody here was silent meanwhile, or cut off."""
        self._agent_seen = min(now, self._agent_seen + slept)
        self._agent_reached = min(now, self._agent_reached + slept)

    def urge(self, now: float) -> None:
        """Something is new: a store that was away may answer again."""
        if self.away:
            self._next = now

    def lend(self, key: str, until: float) -> None:
        """The failsafe members of this pod's generation let it run on until then."""
        self._own[key] = max(until, self._own.get(key, 0.0))

    def answered(self, sent: float, now: float, waiting: Mapping[str, int] = NOBODY_WAITS) -> None:
        """The store renewed the lease. ``waiting``: the jobs (uids) that wait for this node while its agent is silent,
        each with the number of the generation that it holds."""
        order = self._require_order()
        if sent < self.renewed or self._is_anothers(order):
            return  # a later one has been answered, or one of another node
        if now > sent + order.timeout:  # an agent would not have waited for it
            self._answered_since = NEVER
        else:
            self._answered_since = min(sent, self._answered_since)
        if self._served_since == NEVER or sent > self.last + order.lease:
            self._served_since = sent
        self.away, self.renewed, self.last, self._until = "", sent, sent, sent + order.fence
        self._estranged, self._lets_go_first = False, now >= sent + order.heartbeat
        self._next = max(now, sent + order.heartbeat)
        asks_from = self._asks_from() + MOMENT
        if now < asks_from < self._next:  # somebody may wait for this node: not a heartbeat longer than must be
            self._next = asks_from
        if self.asks(now) and self.state in ("holding", "stopping"):
            for uid, number in waiting.items():
                self.withdrawn = self.withdrawn.begun(uid, number, now)

    def let_go(self, gone: Mapping[str, int]) -> None:
        """The store has answered: of these jobs (uids) it knows that nothing of this generation runs here."""
        self._lets_go_first = False
        for uid, number in gone.items():
            self.withdrawn = self.withdrawn.ended(uid, number)

    def unanswered(self, sent: float, now: float, why: str, code: str = "") -> None:
        """It did not answer, or not to the point. ``code``: of its refusal."""
        order = self._require_order()
        if sent < self.renewed:
            return  # a later renewal has been answered
        self.away = why
        self._estranged = code in FOREIGN or (self._estranged and not code)
        self._answered_since, self._lets_go_first = NEVER, False
        self._next = self._lets_go_at = max(now + order.heartbeat / 4, sent + order.heartbeat)

    def refused(self, why: str) -> None:
        """This life holds no lease any more."""
        self.away, self._lost = why, True

    def gave_back(self) -> None:
        """The store took the lease back."""
        self._left = True

    def look(self, now: float, obeyed: Callable[[], Mapping[str, float]]) -> LeaseCall | None:
        """What to ask the store now. ``obeyed``: what each pod's shim says (``main.read_obeyed``); asked for only
        where this life goes."""
        order = self.order
        if order is None or self.state in ("lost", "left"):
            return None
        if self.state == "holding" and now - self._agent_seen > order.patience:
            self._depart(now, False, f"its agent was silent for {now - self._agent_seen:.0f} s")
        gone = self.departure
        if gone is not None:
            quiet = all(at >= gone.stop_before for at in obeyed().values())
            if not gone.at_once and not quiet and now > gone.stop_before + order.grace:
                self._depart(now, True, gone.why)
            elif quiet and not gone.at_once:
                self._depart(now, True, gone.why)  # an agent that comes back starts nothing any more
            elif quiet or (gone.at_once and now > self._last_grant(gone) + order.kill):
                return "leave" if now >= max(self._next, self.promises.last(order.promise)) else None
            if self.departure is not None and self.departure.at_once:
                return None
        is_due = now >= self._next
        if (not is_due or self._lets_go_first) and now >= self._lets_go_at and self.free_of(now, obeyed):
            return "let go"
        return "renew" if is_due else None

    def free_of(self, now: float, obeyed: Callable[[], Mapping[str, float]]) -> tuple[str, int] | None:
        """A job of which nothing can run here any more, to which nothing is promised, and of which the store does not
        know that: its uid, and the number of the generation."""
        order, pending = self._require_order(), self.withdrawn.pending
        if not pending:
            return None
        answers = obeyed()
        for uid, one in sorted(pending.items()):
            has_ended = answers.get(grant_key(uid), now) >= one.at or now > one.at + order.fence + order.kill
            if has_ended and now >= self.promises.end(uid, order.promise, False):
                return uid, one.number
        return None

    @property
    def awaits_shims(self) -> bool:
        """Whether it waits for what shims report, which nobody says when."""
        return self.state == "giving up" or (self.state in ("holding", "stopping") and bool(self.withdrawn.pending))

    def due(self) -> float:
        """When to look again, if nothing else happens."""
        return self._next

    def grant(self, key: str) -> Grant:
        """What this pod's record must say now."""
        gone = self.departure if self.order is not None else None
        stop_before = gone.stop_before if gone is not None else 0.0
        uid = self._uids().get(key)
        one = self.withdrawn.jobs[uid] if uid is not None else None
        if one is not None:
            stop_before = max(stop_before, one.at)
        has_time = not (gone is not None and gone.at_once) and (one is None or one.over)
        until = max(self._until, self._own.get(key, 0.0)) if has_time else 0.0
        return Grant(until, stop_before, 0.0 if one is None else float(one.number))

    @property
    def until(self) -> float:
        """When the workers of this node stop if no renewal comes any more."""
        return self._until if self.state in ("holding", "stopping", "lost") else 0.0

    def asks(self, now: float) -> bool:
        """Whether the renewal that is about to be sent has to ask who waits for this node: its agent is silent, or cut
        off from the store."""
        return now > self._asks_from() or self._is_far(now)

    def asks_for_lateness(self, now: float) -> bool:
        """It asks for no other reason than that the store answers this process too late for an agent: perhaps it
        answers everybody so."""
        return self._is_far(now) and now <= self._asks_from()

    def may_borrow(self, now: float) -> bool:
        """Whether failsafe members may be asked for time. Not on the way out; nor where the store has lost writes and
        the node has no agent to tell it: it waits only so long for one before it forms the gang anew."""
        return self.state == "holding" and not (self._estranged and self.asks(now))

    # --- inside

    def _is_anothers(self, order: LeaseOrder) -> bool:
        """Whether it names another node than the one whose life it is."""
        return order.node != self._owner[1]

    def _asks_from(self) -> float:
        """A store that answers nobody on this node is no reason: the agent has a lease from its first answer to us."""
        reached = max(self._agent_reached, self._answered_since)
        return min(self._agent_seen, reached) + self._require_order().lease

    def _served(self, now: float) -> float:
        """Since when the store has answered this process, however late; NEVER if it has not for a lease."""
        return self._served_since if now <= self.last + self._require_order().lease else NEVER

    def _is_far(self, now: float) -> bool:
        """The store answers this process, and has not answered the agent for ``patience``."""
        return now > max(self._agent_reached, self._served(now)) + self._require_order().patience

    def _uids(self) -> Mapping[str, str]:
        """Of the pods that it has withdrawn from, by key."""
        if self._named is None or self._named[0] is not self.withdrawn:
            self._named = self.withdrawn, {grant_key(uid): uid for uid in self.withdrawn.jobs}
        return self._named[1]

    def _depart(self, now: float, at_once: bool, why: str) -> None:
        order = self._require_order()
        self.departure = Departure(order.life, order.start, order.era, now, at_once, why)
        self._next = now

    def _last_grant(self, gone: Departure) -> float:
        """No pod may run longer than this, whatever its shim has read."""
        latest = gone.stop_before + self._require_order().fence
        return latest if self._taken_back else min(max([self._until, *self._own.values()]), latest)

    def _require_order(self) -> LeaseOrder:
        assert self.order is not None
        return self.order
