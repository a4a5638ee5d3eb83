"""Writes records under the revision that was read, and tries again if another write came in between. Also reports which
disks have a write. Must never decide what is written.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from nodeagent.agent.view import AgentView
from nodeagent.api.shapes import Json
from nodeagent.store.base import StoreRefusedError

Done = TypeVar("Done")

WRITE_TRIES = 4
"""The most attempts of one write, if others write in between."""


async def write_again(view: AgentView, attempt: Callable[[], Awaitable[Done]]) -> Done:
    """Decides by the view and writes; if the store refuses as ``stale``, reads and does both again. So of two
    simultaneous changes the second is made on top of the first. Raises ``StoreError``, and the errors of
    ``attempt``."""
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
    """Waits, within a bound, until the write with this revision is on enough disks. ``era``: era of the view before the
    write."""
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
