"""A wish to commit a checkpoint, on its way to the store: the agent sees it in the status and answers.

A worker's, or that of the shim's own helper (``shim_writeout.py``). Standard library only. One wish at a time, of the
present generation, with its token; what a process that has ended wished is forgotten. Must never answer by itself that
something was committed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nodeagent.workers.shim_link import Call, WorkerLink

MOST = 1 << 53
"""Numbers above are not exact everywhere."""


@dataclass(frozen=True, slots=True)
class Asker:
    """Who wishes."""

    lives: Callable[[], bool]
    answer: Callable[[str], None]
    """Told why it was refused; "" if it is committed."""


class Commits:
    """``changed`` is called when there is another wish."""

    def __init__(self, link: WorkerLink, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._asker: Asker | None = None
        self._wish: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        link.add("commit", self._asked)
        link.add("commit.last", self._asked_last)

    def _asked(self, call: Call) -> None:
        name, step, order = call.message["name"], call.message["step"], call.message["order"]
        if not isinstance(name, str) or not 0 < len(name.encode(errors="replace")) <= 200 or "/" in name:
            raise ValueError("a checkpoint's name is a folder's")
        if name in (".", "..") or not name.isprintable():
            raise ValueError("a checkpoint's name is a folder's")
        name.encode()  # a lone surrogate is no text that others could read: UnicodeEncodeError, a ValueError
        if not all(isinstance(n, int) and 0 <= n < MOST for n in (step, order)):
            raise ValueError("step and order are numbers")

        def answer(refused: str) -> None:
            if refused:
                call.refuse(refused)
            else:
                call.answer(name=name)

        self.wish_of(call.token, name, int(step), int(order), Asker(lambda: not call.worker.ended, answer))

    def wish_of(self, token: dict[str, Any], name: str, step: int, order: int, asker: Asker) -> None:
        """Another wish."""
        if self._asker is not None:
            self._asker.answer("another commit was asked for meanwhile")
        self._asker = asker
        self._wish = {"token": token, "name": name, "step": step, "order": order}
        self._changed()

    def _asked_last(self, call: Call) -> None:
        """Which one of its generation was committed last, as far as is known here; "" for none."""
        call.answer(name=self._last["name"] if self._last.get("token") == call.token else "")

    def newest(self, token: dict[str, Any]) -> tuple[int, int]:
        """(generation, step) of what this generation committed last through here; (0, 0) if nothing."""
        return (token["number"], self._last["step"]) if self._last.get("token") == token else (0, 0)

    def wish(self) -> dict[str, Any] | None:
        """As base.CommitWish; None if there is none."""
        if self._asker is not None and not self._asker.lives():
            self._asker = None
        return self._wish if self._asker is not None else None

    def answered(self, wish: dict[str, Any], refused: str) -> None:
        """The store has taken it, or refused with this sentence."""
        if not refused:
            self._last = wish
        if self.wish() != wish or self._asker is None:
            return  # an answer to an earlier one
        asker, self._asker = self._asker, None
        asker.answer(refused)
