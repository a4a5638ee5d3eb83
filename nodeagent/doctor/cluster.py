"""What ``doctor`` checks beyond this machine, each check within a bound: the store, and whether peers can be reached.

Agents listen on nothing but loopback, and on rendezvous ports only while a gang forms. So the check is a TCP connect to
a rendezvous port: a refused connection is an answer of the machine, as good as an accepted one. A firewall that drops
packets is seen as no answer.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from nodeagent.model.facts import Finding
from nodeagent.osutil.threads import in_daemon
from nodeagent.plan.findings.cluster import PeerAnswer, Placed, ranked
from nodeagent.plan.findings.store import judge
from nodeagent.spec.agentconfig import AgentConfig
from nodeagent.store.inspect import inspect, refuses

PEER_BOUND = 2.0
"""Seconds for one peer: a lost SYN is sent again after one second."""
ALL_BOUND = 10.0
"""Seconds for all peers together."""
AT_ONCE = 128


async def ask_peers(addresses: Mapping[str, str], port: int, bound: float) -> tuple[PeerAnswer, ...]:
    """``addresses``: node to address; ``bound``: seconds for one of them. Asks all in parallel; a peer that did not
    answer in time is unknown."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(node: str, address: str) -> PeerAnswer:
        async with room:
            return await ask_peer(node, address, port, bound)

    tasks = {node: asyncio.create_task(one(node, address)) for node, address in addresses.items()}
    if tasks:
        await asyncio.wait(tasks.values(), timeout=ALL_BOUND)
    found = []
    for node, task in tasks.items():
        if task.done():
            found.append(task.result())
        else:
            task.cancel()
            detail = f"not all peers could be asked within {ALL_BOUND:g} s"
            found.append(PeerAnswer(node=node, address=addresses[node], outcome="unknown", detail=detail))
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    return tuple(found)


async def ask_peer(node: str, address: str, port: int, bound: float) -> PeerAnswer:
    """Connects once; never raises."""

    def answer(outcome: str, detail: str = "") -> PeerAnswer:
        return PeerAnswer.model_validate({"node": node, "address": address, "outcome": outcome, "detail": detail})

    try:
        async with asyncio.timeout(bound):
            _, writer = await asyncio.open_connection(address, port)
    except ConnectionRefusedError:
        return answer("refused")
    except TimeoutError:
        return answer("timeout", f"{bound:g} s")
    except socket.gaierror as error:
        return answer("unresolved", error.strerror or str(error))
    except OSError as error:
        return answer("unreachable", error.strerror or str(error))
    writer.transport.abort()
    return answer("accepted")


ANSWER_BOUND = 5.0
"""Seconds for one answer of the store where only its login is asked for."""
STORE_BOUND = 8.0
"""Seconds for all questions to the store together."""


OWN_LOOP_BOUND = STORE_BOUND + 2.0
"""Seconds for these questions in a thread: its loop ends only when a name lookup is answered or times out."""
UNANSWERED = Finding(
    severity="warning",
    what=f"unknown: the store did not answer all questions within {STORE_BOUND:g} s",
    fix="redis-cli --latency (with the url of redis.url)",
)


async def store_findings(config: AgentConfig) -> tuple[Finding, ...]:
    """Problems of the store of this config."""
    try:
        async with asyncio.timeout(STORE_BOUND):
            facts = await inspect(config.redis, config.timing.store_timeout)
    except TimeoutError:
        return (UNANSWERED,)
    return judge(facts, config.timing)


async def store_problem(config: AgentConfig) -> str:
    """Why an agent with this config could not use the store now (it does not answer, a wrong password, another timing
    than the cluster's); empty if it could. A slow machine is no reason: each answer has more time than an agent gives
    it."""
    try:
        async with asyncio.timeout(STORE_BOUND):
            facts = await inspect(config.redis, ANSWER_BOUND)
            return facts.problem or await refuses(config.redis, config.cluster, config.timing, ANSWER_BOUND)
    except TimeoutError:
        return UNANSWERED.what


class StoreLooker:
    """Makes the same findings on an event loop of its own: a hundred questions, and reading TLS certificates, must not
    block the agent's. One inspection at a time: who asks meanwhile gets the same findings."""

    def __init__(self, find: Callable[[AgentConfig], Awaitable[tuple[Finding, ...]]]) -> None:
        self._find = find
        self._under_way: asyncio.Future[tuple[Finding, ...]] | None = None

    async def look(self, config: AgentConfig) -> tuple[Finding, ...]:
        """Raises OSError if there is no thread to be had."""

        async def find() -> tuple[Finding, ...]:
            return await self._find(config)

        if self._under_way is None or self._under_way.done():
            self._under_way = in_daemon(lambda: asyncio.run(find()), "doctor")
        try:
            async with asyncio.timeout(OWN_LOOP_BOUND):
                return await asyncio.shield(self._under_way)
        except TimeoutError:
            return (UNANSWERED,)


def report(found: Iterable[Placed]) -> dict[str, Any]:
    """A list, errors first; ``ok`` if none is an error."""
    rows = [{"severity": f.severity, "where": where, "what": f.what, "fix": f.fix} for where, f in ranked(found)]
    return {"apiVersion": "nodeagent/v1", "items": rows, "ok": all(row["severity"] != "error" for row in rows)}
