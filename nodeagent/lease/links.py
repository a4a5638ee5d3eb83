"""The lease process's links to the store's server: at most two, and what is under way on each.

What is not answered within ``timeout`` may never be: its link may lead nowhere, so a second one is opened and asked.
But a store that stalls answers late, and a renewal is good for ``fence`` from when it was sent. So the first link is
listened to until then, and the first answer counts, whichever link it is from, with the time at which *it* was asked
for. No link is asked while an answer of it is outstanding, so none is ever taken for another one's. Standard library
only. Must never wait, or know what an answer means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from nodeagent.lease.core import LeaseCall
from nodeagent.lease.order import Server, StoreScript
from nodeagent.lease.resp import Certificates, Reply, Steps, Talk, TalkError, Wanted, place

MOST_LINKS = 2


class StoreAnswer(NamedTuple):
    call: LeaseCall
    sent: float
    """From before it was asked for (CLOCK_BOOTTIME, as all times here)."""
    reply: Reply


class StoreSilence(NamedTuple):
    """What was asked for, or a link that was to be opened, has failed, or is late."""

    sent: float
    why: str


Outcome: TypeAlias = StoreAnswer | StoreSilence


class _Link:
    """One of them. ``timeout``: after so many seconds what is under way on it is late."""

    def __init__(self, talk: Talk, timeout: float) -> None:
        self.talk, self.timeout = talk, timeout
        self.call: LeaseCall | None = None
        """What is asked for; None: nothing, or it is being opened."""
        self.began, self.late = 0.0, False
        """Of what is under way."""
        self.steps: Steps[Reply] | Steps[None] | None = None
        """None: nothing is under way, it can be asked."""
        self.wanted = Wanted(-1, 0, 0.0)

    def due(self) -> float:
        return self.wanted.until if self.late else min(self.wanted.until, self.began + self.timeout)


class LeaseLinks:
    """To one server at a time: who asks another one closes these first."""

    def __init__(self) -> None:
        self._certificates = Certificates()
        self._links: list[_Link] = []
        self._outcomes: list[Outcome] = []

    # --- what can be done

    def can_ask(self) -> bool:
        """A link is open and free, and no other answer is expected in time."""
        return any(link.steps is None for link in self._links) and not any(link.call for link in self._in_time())

    def can_add(self) -> bool:
        """No link is open and free, and none may be so in time."""
        return not self._in_time() and all(link.steps is not None for link in self._links)

    def add(self, server: Server, timeout: float, now: float, until: float) -> None:
        """One more. If there are two, what is on them is late, and one of them is given up: the younger one if it is
        still being opened, else the older one. The younger one was let in after the older one had been asked."""
        if len(self._links) == MOST_LINKS:
            older, younger = sorted(self._links, key=lambda link: link.began)
            self._drop(older if younger.call else younger)
        link = _Link(Talk(server, self._certificates), timeout)
        self._links.append(link)
        self._begin(link, None, now, link.talk.greet(until))

    def ask(self, call: LeaseCall, now: float, until: float, step: StoreScript, *words: str) -> None:
        """Where ``can_ask`` says so. ``until``: from then on an answer is of no use."""
        link = next(link for link in self._links if link.steps is None)
        self._begin(link, call, now, link.talk.evaluate(until, step, *words))

    def forget(self) -> None:
        """What was asked for, and all that came of it: it was about something else."""
        self._outcomes.clear()
        for link in [link for link in self._links if link.call]:
            self._drop(link)

    def close(self) -> None:
        self._outcomes.clear()
        for link in list(self._links):
            self._drop(link)

    # --- what happens

    def files(self) -> dict[int, int]:
        """What to wait for: the ``poll`` events of each file."""
        return {link.wanted.fd: link.wanted.events for link in self._links if link.steps is not None}

    def due(self) -> float:
        """When to call ``turn``, if nothing else happens."""
        if self._outcomes:
            return 0.0
        return min((link.due() for link in self._links if link.steps is not None), default=float("inf"))

    def turn(self, ready: set[int], now: float) -> bool:
        """Goes on where something is ready, or overdue. Whether there is an outcome, or a link has become free."""
        changed = False
        for link in self._links[::-1]:  # an answer to what was asked later is good for longer
            over = now >= link.wanted.until
            if link in self._links and link.steps is not None and (over or link.wanted.fd in ready):
                self._go_on(link, not over)
                changed |= link.steps is None
        for link in self._in_time():
            if now >= link.began + link.timeout:
                link.late = True
                where = f"the store at {place(link.talk.server)}"
                self._outcomes.append(StoreSilence(link.began, f"{where} did not answer within {link.timeout:g} s"))
        return changed or bool(self._outcomes)

    def outcomes(self) -> list[Outcome]:
        """Since the last call."""
        found, self._outcomes = self._outcomes, []
        return found

    # --- inside

    def _in_time(self) -> list[_Link]:
        return [link for link in self._links if link.steps is not None and not link.late]

    def _begin(self, link: _Link, call: LeaseCall | None, now: float, steps: Steps[Reply] | Steps[None]) -> None:
        link.call, link.began, link.late, link.steps = call, now, False, steps
        self._advance(link, lambda: next(steps))

    def _go_on(self, link: _Link, came: bool) -> None:
        steps = link.steps
        assert steps is not None
        self._advance(link, lambda: steps.send(came))

    def _advance(self, link: _Link, go: Callable[[], Wanted]) -> None:
        try:
            link.wanted = go()
        except StopIteration as end:
            link.steps = None
            if link.call is not None:
                self._outcomes.append(StoreAnswer(link.call, link.began, end.value))
                for other in [other for other in self._links if other is not link]:
                    self._drop(other)
                link.call = None
        except TalkError as error:
            if not link.late:  # else that is known, and another one has been asked
                self._outcomes.append(StoreSilence(link.began, str(error)))
            self._drop(link)

    def _drop(self, link: _Link) -> None:
        self._links.remove(link)
        link.steps = None
        link.talk.close()
