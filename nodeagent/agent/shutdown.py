"""How an agent goes in order: for a moment, while the lease process looks after the node's lease; or for longer.

For longer (``systemctl stop``, a shutdown) the node is drained, so that its jobs end their step and re-form without it;
what this marked is unmarked when the agent is back. Owns the mark of such a drain. Must never touch a cordon that a
person set.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

import structlog

from nodeagent.model.node import Cordon
from nodeagent.store.base import StoreRefusedError, StoreUnavailableError

if TYPE_CHECKING:
    from nodeagent.agent.loop import Agent
    from nodeagent.osutil.clock import Clock

BY = "systemctl stop"
"""Who drained the node, in the store: no user can be called so."""


async def restart(agent: Agent, clock: Clock) -> None:
    """Returns when this agent may end and be back soon. Where nobody counts on it, its lease was given back."""
    log = structlog.get_logger("goodbye").bind(node=agent.node)
    why, limit = agent.needed_by(), agent.config.without_agent
    if not why:
        await agent.leave()
        return
    began = clock.now()
    while not await agent.reports_restart():  # what this agent alone knows, a store that comes back may have lost
        if clock.now() - began > limit:
            log.warning("the store is still away: the others cannot be told", waited=limit)
            break
        await asyncio.sleep(agent.config.timing.heartbeat / 2)
    log.info("ends, and is to be back soon", because=why, at_most=limit)


async def drain(agent: Agent, clock: Clock) -> None:
    """Returns when nobody counts on this node any more; at the latest after the config's ``drain``. The agent runs on
    meanwhile: it is the caller's to have it leave."""
    log = structlog.get_logger("goodbye").bind(node=agent.node)
    why, limit = agent.needed_by(), agent.config.drain
    if not why:
        return
    began, refused = clock.now(), ""
    log.info("drains before the end", because=why, at_most=limit)
    while agent.needed_by():
        me = agent.me()
        if me is None or me.cordon is None or not me.cordon.drain:
            mark = Cordon(reason="its agent was asked to stop", by=BY, at=clock.wall(), drain=True)
            if me is not None and me.cordon is not None:  # a person's words stay
                mark = me.cordon.model_copy(update={"drain": True})
            try:
                await agent.store.cordon(agent.node, mark, secrets.token_hex(8))
                await agent.refresh()
            except (StoreUnavailableError, StoreRefusedError) as error:
                if str(error) != refused:
                    refused = str(error)
                    log.warning("not drained yet", why=refused)
        if clock.now() - began > limit:
            log.warning("still not drained: stops the workers and leaves", because=agent.needed_by(), waited=limit)
            return
        await asyncio.sleep(agent.config.timing.heartbeat / 2)
    log.info("drained", took=round(clock.now() - began, 3))


async def come_back(agent: Agent) -> None:
    """Take new work again, if it was this that said otherwise."""
    await agent.joined.wait()
    while True:
        me = agent.me()
        if me is not None and (me.cordon is None or me.cordon.by != BY):
            return
        try:
            if me is not None:
                await agent.store.cordon(agent.node, None, secrets.token_hex(8))
            await agent.refresh()
        except (StoreUnavailableError, StoreRefusedError) as error:
            structlog.get_logger("goodbye").warning("still marked as drained", node=agent.node, why=str(error))
        await asyncio.sleep(agent.config.timing.heartbeat / 2)
