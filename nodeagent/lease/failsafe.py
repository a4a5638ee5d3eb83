"""Time that the failsafe members of a generation lend while the store is away: this node's questions, its answers, its
promises. A state machine without I/O, clock or randomness, beside ``core``; ``main`` and the simulation drive it.

It knows the jobs by the table that the agent has written (``statefiles.py``), whatever has become of the agent. Must
never extend anything unless every failsafe member agreed after the question was sent, nor agree before that is written
down.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple

from nodeagent.lease.core import Core
from nodeagent.lease.lending import Ask, LoanAnswer, LoanRow, Promises, Table, answer

RESEND = 0.12
"""Seconds after which a question without an answer is sent again."""
WHY_MAX = 200
"""Characters of a reason that another node gave."""


class Question(NamedTuple):
    """One that is to be asked now."""

    address: str
    """Empty: it is for this node itself."""
    nonce: str
    ask: Ask


class _Round:
    """The questions to all failsafe members of one job, at one time."""

    def __init__(self, row: LoanRow, asked: float, open_: dict[str, Question]) -> None:
        self.row, self.asked, self.sent, self.open = row, asked, asked, open_


class Failsafe:
    """One lease process's part. ``promises``: what earlier ones have written down; ``nonce``: makes one that nobody
    can guess."""

    def __init__(self, core: Core, promises: Promises, nonce: Callable[[], str]) -> None:
        self._core, self._nonce = core, nonce
        core.promises = promises
        self.table: Table | None = None
        """As it was read last."""
        self.lent: dict[str, float] = {}
        """Jobs that run on failsafe time here: uid to its end."""
        self.refusals: dict[str, str] = {}
        """Jobs that nobody lends time to, and why."""
        self._rounds: dict[str, _Round] = {}
        self._next = 0.0

    # --- as a failsafe member

    def answer(self, ask: Ask, now: float) -> Generator[Promises | None, Table | None, LoanAnswer]:
        """Yields, before it says yes, what is to be written down (None: it is); and is sent the table as it is after
        that. An agent that lets go does the same the other way round: it changes the table, then reads the promises.
        So one of the two sees the other."""
        judged = self._judged(ask, now)
        if not judged.yes:
            return judged
        promises = self._with(ask.uid, now)
        self.table = yield promises
        if promises is not None:
            self._core.promises = promises
        return self._judged(ask, now)

    def _judged(self, ask: Ask, now: float) -> LoanAnswer:
        core, table = self._core, self.table
        order = core.order
        if order is None or table is None or (table.node, table.life) != (order.node, order.life):
            return LoanAnswer(False, "the node that was asked knows no jobs yet")
        if core.state not in ("holding", "stopping"):
            return LoanAnswer(False, f"{order.node} is leaving", order.node, order.life)
        if core.withdrawn.barred(ask.uid, ask.token[0]):
            return LoanAnswer(False, f"{order.node} has let go of generation {ask.token[0]}", order.node, order.life)
        return answer(table, ask, now - core.last, order.heartbeat + order.timeout / 2)

    def _with(self, uid: str, now: float) -> Promises | None:
        """A little longer than it must be: with many members that ask, not each yes is written down anew."""
        order = self._core.order
        assert order is not None
        old = self._core.promises
        if old.until.get(uid, 0.0) >= now + order.promise:
            return None
        until = {u: end for u, end in old.until.items() if end > now}
        return old._replace(until=until | {uid: now + order.promise + order.heartbeat / 2})

    # --- as a member

    def questions(self, now: float) -> list[Question]:
        """What to ask now, of whom: at each heartbeat while the store is away, and again what nobody has answered."""
        order, rows, away = self._core.order, self._running(), now - self._core.last
        if order is None or self.table is None or away < order.failsafe:
            self._rounds, self.lent, self.refusals, self._next = {}, {}, {}, now
            return []
        self.lent = {uid: end for uid, end in self.lent.items() if uid in rows}
        self.refusals = {uid: why for uid, why in self.refusals.items() if uid in self.table.jobs}  # the last one stays
        why = ""
        if away > order.failsafe_limit:
            why = f"the store has been away for longer than failsafe_limit ({order.failsafe_limit:g} s)"
        elif not self._core.may_borrow(now):
            why = f"{order.node} has no agent to tell a store that has lost writes what runs there"
        if why or not rows:  # the fence ends it
            self._rounds, self._next = {}, now + order.heartbeat
            self.refusals |= dict.fromkeys(rows, why)
            return []
        if now >= self._next:
            self._next = now + order.heartbeat
            for uid, old in self._rounds.items():
                if uid in rows and old.open:
                    self.refusals[uid] = f"{min(q.ask.to for q in old.open.values())} does not answer"
            self._rounds = {}
            return [question for uid, row in rows.items() for question in self._begun(uid, row, now)]
        late = [r for r in self._rounds.values() if r.open and now >= r.sent + RESEND]
        for round_ in late:
            round_.sent = now
        return [question for round_ in late for question in round_.open.values()]

    def due(self) -> float:
        """When to look again, if nothing else happens."""
        order = self._core.order
        if order is None or not (self._running() or self.refusals):
            return float("inf")
        waiting = [r.sent + RESEND for r in self._rounds.values() if r.open]
        return max(min([self._next, *waiting]), self._core.last + order.failsafe)

    def answered(self, nonce: str, judged: LoanAnswer) -> None:
        """An answer has come, perhaps to no question of this process."""
        uid, round_ = next(((u, r) for u, r in self._rounds.items() if nonce in r.open), ("", None))
        order, row = self._core.order, self._running().get(uid)
        if round_ is None or order is None:
            return
        ask = round_.open.pop(nonce).ask
        if row is None or (row.token, row.failsafe_members) != (round_.row.token, round_.row.failsafe_members):
            del self._rounds[uid]  # it was about what does not run here any more
            return
        if not judged.yes or not judged.of(ask.to, ask.to_life):
            del self._rounds[uid]
            foreign = f"{judged.node or 'somebody else'} answers at the address of {ask.to}"
            self.refusals[uid] = (judged.why if not judged.yes else foreign)[:WHY_MAX]
        elif not round_.open:
            del self._rounds[uid]
            self.refusals.pop(uid, None)
            self.lent[uid] = round_.asked + order.fence
            self._core.lend(row.pod, round_.asked + order.fence)

    def _begun(self, uid: str, row: LoanRow, now: float) -> list[Question]:
        order = self._core.order
        assert order is not None
        places = {n: p for n, p in row.places.items() if n != order.node and n in row.failsafe_members}
        missing = sorted(row.failsafe_members.keys() - places.keys() - {order.node})
        if missing or not row.failsafe_members:
            self.refusals[uid] = (
                f"{missing[0]} does not answer" if missing else "this generation has no failsafe members"
            )
            return []
        out = []
        for node in sorted(row.failsafe_members):
            address, life = places.get(node, ("", order.life))
            ask = Ask(uid, row.token, row.failsafe_members, order.node, order.life, node, life)
            out.append(Question(address, self._nonce(), ask))
        self._rounds[uid] = _Round(row, now, {question.nonce: question for question in out})
        return out

    def _running(self) -> dict[str, LoanRow]:
        """Of this life, while its pods may be granted anything."""
        order, table = self._core.order, self.table
        if order is None or table is None or (table.node, table.life) != (order.node, order.life):
            return {}
        if self._core.state != "holding":
            return {}
        barred = self._core.withdrawn.barred
        return {uid: row for uid, row in table.jobs.items() if row.pod and not barred(uid, row.token[0])}
