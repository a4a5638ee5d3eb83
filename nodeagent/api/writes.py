"""Writes of records under the revision that was read, tried again where somebody else wrote in between; and what an
answer says of the disks that a write is on. Must never decide what is written.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from nodeagent.api.shapes import Json
from nodeagent.api.view import AgentView
from nodeagent.store.base import StoreRefusedError

Done = TypeVar("Done")

WRITE_TRIES = 4
"""A write and its repetitions when somebody else wrote in between."""


async def write_again(view: AgentView, attempt: Callable[[], Awaitable[Done]]) -> Done:
    """Decide by the view and write, and read and do so again where the store says ``stale``: of two changes at once one
    is made on top of the other. Raises ``StoreError``, and what ``attempt`` raises."""
    for number in range(WRITE_TRIES):
        if number:
            await view.refresh()
        try:
            return await attempt()
        except StoreRefusedError as refused:
            if refused.code != "stale" or number == WRITE_TRIES - 1:
                raise
    raise AssertionError("unreachable: the last try returns or raises")


async def saved(view: AgentView, rev: int, era: str) -> Json:
    """Wait, within the bound, until what was just written with this revision is on enough disks. ``era``: of the view
    before it was written."""
    done = await view.acknowledged(rev, era)
    text = ""
    if not done.safe:
        have = f"{len(done.nodes)} of {done.wanted} nodes"
        names = f" ({', '.join(done.nodes)})" if done.nodes else ""
        text = (
            f"it is accepted and will be carried out, but only {have}{names} had it on disk after "
            f"{done.waited:.1f} s: if Redis lost its data now, it could be forgotten"
        )
    return {"saved": {"nodes": list(done.nodes), "wanted": done.wanted, "text": text}}
