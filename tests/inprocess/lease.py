"""A lease process's renewal through the product's client, which has no method for it: agents do not renew."""

from __future__ import annotations

from nodeagent.store.calls import Calls


async def renew_lease(calls: Calls, node: str, life: str, era: str, length: int, *, asks: bool = False) -> str:
    """Renew for ``length`` ms. Who waits for the node, if its agent is silent (``asks``); empty if nobody does. Raises
    what steps raise."""
    about: dict[str, object] = {"node": node, "life": life, "era": era, "length": length, "asks": asks}
    _served, waits = await calls.step("renew_lease", about)
    return str(waits)


async def era_of(calls: Calls) -> str:
    """The era that the store is in."""
    async with calls.link() as link:
        return str(await link.ask("HGET", calls.prefix + "meta", "era") or "")
