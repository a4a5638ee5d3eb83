"""Looks at the store within a bound, and has it judged."""

from __future__ import annotations

import asyncio

from nodeagent.model.finding import Finding
from nodeagent.plan.storehealth import judge
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.store.inspect import inspect

STORE_BOUND = 8.0
"""Seconds for all questions to the store together."""


OWN_LOOP_BOUND = STORE_BOUND + 2.0
"""Seconds for them in a thread: its loop ends only when a name that it asks for is answered, or given up."""
UNANSWERED = Finding(
    severity="warning",
    what=f"unknown: the store did not answer all questions within {STORE_BOUND:g} s",
    fix="redis-cli --latency (with the url of redis.url)",
)


async def store_findings(config: AgentConfig) -> tuple[Finding, ...]:
    """What is wrong with the store of this config."""
    try:
        async with asyncio.timeout(STORE_BOUND):
            facts = await inspect(config.redis, config.timing.store_timeout)
    except TimeoutError:
        return (UNANSWERED,)
    return judge(facts, config.timing)


async def store_findings_in_thread(config: AgentConfig) -> tuple[Finding, ...]:
    """The same on a loop of its own: a hundred questions, and the certificates that TLS reads, are not for the loop
    that renews the lease."""
    try:
        async with asyncio.timeout(OWN_LOOP_BOUND):
            return await asyncio.to_thread(lambda: asyncio.run(store_findings(config)))
    except TimeoutError:
        return (UNANSWERED,)
