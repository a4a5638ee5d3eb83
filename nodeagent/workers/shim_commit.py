"""A worker's wish to commit a checkpoint, on its way to the store: the agent sees it in the status and answers.

Standard library only. One wish at a time, of the present generation, with its token; what a worker that has ended
wished is forgotten. Must never answer by itself that something was committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nodeagent.workers.shim_link import Call, WorkerLink

MOST = 1 << 53
"""Numbers above are not exact everywhere."""


class Commits:
    """``changed`` is called when there is another wish."""

    def __init__(self, link: WorkerLink, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._call: Call | None = None
        self._wish: dict[str, Any] = {}
        link.add("commit", self._asked)

    def _asked(self, call: Call) -> None:
        name, step, order = call.message["name"], call.message["step"], call.message["order"]
        if not isinstance(name, str) or not 0 < len(name) <= 200 or "/" in name:
            raise ValueError("a checkpoint's name is a folder's")
        if not all(isinstance(n, int) and 0 <= n < MOST for n in (step, order)):
            raise ValueError("step and order are numbers")
        if self._call is not None:
            self._call.refuse("another commit was asked for meanwhile")
        self._call = call
        self._wish = {"token": call.token, "name": name, "step": int(step), "order": int(order)}
        self._changed()

    def wish(self) -> dict[str, Any] | None:
        """As base.CommitWish; None if there is none."""
        if self._call is not None and self._call.worker.ended:
            self._call = None
        return self._wish if self._call is not None else None

    def answered(self, wish: dict[str, Any], refused: str) -> None:
        """The store has taken it, or refused with this sentence."""
        if self.wish() != wish or self._call is None:
            return  # an answer to an earlier one
        call, self._call = self._call, None
        if refused:
            call.refuse(refused)
        else:
            call.answer(name=wish["name"])
