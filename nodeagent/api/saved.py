"""What an answer to a command says of the disks that it is on (docs/protocol.md)."""

from __future__ import annotations

from nodeagent.api.shapes import Json
from nodeagent.api.view import AgentView


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
