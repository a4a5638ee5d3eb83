"""Looks at the store within a bound, and has it judged."""

from __future__ import annotations

import asyncio

from nodeagent.model.finding import Finding
from nodeagent.plan.storehealth import judge
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.store.inspect import inspect

STORE_BOUND = 8.0
"""Seconds for all questions to the store together."""


async def store_findings(config: AgentConfig) -> tuple[Finding, ...]:
    """What is wrong with the store of this config."""
    try:
        async with asyncio.timeout(STORE_BOUND):
            facts = await inspect(config.redis, config.timing.store_timeout)
    except TimeoutError:
        what = f"unknown: the store did not answer all questions within {STORE_BOUND:g} s"
        return (Finding(severity="warning", what=what, fix="redis-cli --latency (with the url of redis.url)"),)
    return judge(facts, config.timing)
