"""The Redis store: each method is one script on the server, and every failure one of the two store errors.

Must never decide or retry: the scripts decide, the agent's loop tries again. Concurrent calls are safe; a cancelled
call may or may not have happened.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from nodeagent.model.base import RECORD_VERSION
from nodeagent.model.event import Event
from nodeagent.model.job import Control, JobRecord
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.node import Cordon, Incarnation, NodeFacts, NodeRecord
from nodeagent.model.pod import PodState
from nodeagent.model.timing import Timing, millis
from nodeagent.model.world import Ack, PodReport, Token
from nodeagent.store import codec, keys
from nodeagent.store.base import (
    Beat,
    BeatReply,
    Ending,
    JoinReply,
    Offer,
    Proposal,
    Restored,
    StoreRefusedError,
    StoreUnavailableError,
)
from nodeagent.store.link import Links
from nodeagent.store.scripts import load
from nodeagent.store.words import timing_differs

COMMAND_LINKS = 4
WAIT_LINKS = 32


class RedisStore:
    """A cluster's store on a Redis or Valkey server. Connects at the first call; see ``Store`` for the methods.

    ``timeout`` (seconds) bounds each call, connecting and queueing included. Raises ValueError for a url or cluster
    name that cannot be.
    """

    def __init__(self, url: str, cluster: str, timeout: float) -> None:
        self._prefix = keys.prefix(cluster)
        self._timeout = timeout
        self._commands = Links(url, COMMAND_LINKS)
        self._waits = Links(url, WAIT_LINKS)

    async def join(self, node: str, incarnation: Incarnation, facts: NodeFacts, timing: Timing) -> JoinReply:
        arguments = _who(node, incarnation) | _facts(facts) | _timing(timing) | {"uid": uuid.uuid4().hex}
        cluster_uid, served = await self._timed("join", arguments, timing)
        return JoinReply(cluster_uid=cluster_uid, served=served)

    async def restore(self, offer: Offer) -> Restored:
        arguments = _timing(offer.timing) | {
            "uid": offer.cluster_uid,
            "era": offer.era,
            "rev": offer.rev,
            "served": offer.served,
            "by": offer.by,
            "nodes": [codec.encode_node(node) for node in offer.nodes],
            "cordons": {node.id: codec.encode_optional(node.cordon) or "" for node in offer.nodes},
            "jobs": [codec.encode_job(job) for job in offer.jobs],
            "uids": offer.uids,
        }
        era, known, recovering = await self._timed("restore", arguments, offer.timing)
        return Restored(era=era, known=int(known), recovering=bool(recovering))

    async def beat(self, beat: Beat) -> BeatReply:
        arguments: dict[str, object] = _who(beat.node, beat.incarnation)
        arguments |= {"seq": beat.seq, "length": beat.length, "rev": beat.rev, "era": beat.era}
        if beat.facts is not None:
            arguments |= _facts(beat.facts)
        if beat.readiness is not None:
            arguments["readiness"] = codec.encode_readiness(beat.readiness)
        arguments["pods"] = [{"uid": pod.uid, "body": pod.to_json()} for pod in beat.pods or ()]
        cluster_uid, served, lapsed, next_lapse, rev, more, event, records, era, recovering = await self._step(
            "beat", arguments
        )
        nodes, jobs, gone = [], [], []
        with _strict():
            for key, flat, cordon in records:
                if not flat:
                    gone.append(key)
                elif key.startswith("node:"):
                    nodes.append(codec.decode_node(flat, cordon))
                else:
                    jobs.append(codec.decode_job(flat))
            return BeatReply(
                cluster_uid=cluster_uid,
                served=served,
                lapsed=tuple(lapsed),
                next_lapse=None if next_lapse == "" else int(next_lapse),
                nodes=tuple(nodes),
                jobs=tuple(jobs),
                gone=tuple(gone),
                rev=int(rev),
                more=bool(more),
                event=event,
                era=era,
                recovering=bool(recovering),
            )

    async def leave(self, node: str, incarnation: Incarnation) -> None:
        await self._step("leave", _who(node, incarnation))

    async def propose(self, proposal: Proposal) -> JobRecord:
        arguments = _expectation(proposal) | {
            "id": proposal.id,
            "members": {node: member.to_json() for node, member in proposal.members.items()},
            "cause": proposal.cause.to_json(),
            "reason": proposal.cause.text,
            "form_ms": proposal.form_ms,
            "outside": codec.encode(proposal.outside),
        }
        return await self._job("propose", arguments)

    async def ack(
        self, uid: str, token: Token, node: str, incarnation: Incarnation, ack: Ack, last: PodReport | None
    ) -> JobRecord:
        arguments = _who(node, incarnation) | {"uid": uid, "token": token.model_dump(), "ack": ack.to_json()}
        if last is not None:
            arguments["last"] = codec.encode_report(last)
        return await self._job("ack", arguments)

    async def activate(self, uid: str, token: Token) -> JobRecord:
        return await self._job("activate", {"uid": uid, "token": token.model_dump()})

    async def report(self, uid: str, token: Token, node: str, incarnation: Incarnation, report: PodReport) -> JobRecord:
        arguments = _who(node, incarnation) | {"uid": uid, "token": token.model_dump(), "reason": report.reason}
        return await self._job("report", arguments | codec.encode_report(report))

    async def end(self, ending: Ending) -> JobRecord:
        arguments = _expectation(ending) | {
            "phase": ending.phase,
            "reason": ending.reason,
            "outcome": codec.encode_optional(ending.outcome),
            "delay_ms": ending.delay_ms,
            "wall": repr(ending.wall),
        }
        return await self._job("end", arguments)

    async def submit(self, uid: str, spec: JobSpec, owner: int, wall: float, by: str, request: str) -> JobRecord:
        size = spec.role.nodes
        arguments: dict[str, object] = {
            "uid": uid,
            "name": spec.name,
            "owner": owner,
            "spec": spec.to_json(),
            "min": size.min,
            "max": size.max,
            "control": Control(rev=1, target=size.target, by=by).to_json(),
            "submitted": repr(wall),
            "by": by,
            "request": request,
        }
        return await self._job("submit", arguments)

    async def control(
        self, uid: str, expect_rev: int, control: Control, request: str, event: str, text: str
    ) -> JobRecord:
        new = control.model_copy(update={"rev": expect_rev + 1})
        arguments: dict[str, object] = {
            "uid": uid,
            "expect_rev": expect_rev,
            "control": new.to_json(),
            "by": control.by,
            "request": request,
            "event": event,
            "text": text,
        }
        return await self._job("control", arguments)

    async def remove(self, uid: str) -> None:
        await self._step("remove", {"uid": uid})

    async def cordon(self, node: str, cordon: Cordon | None, request: str) -> NodeRecord:
        arguments: dict[str, object] = {"node": node, "request": request}
        if cordon is not None:
            arguments |= {"cordon": cordon.to_json(), "by": cordon.by, "reason": cordon.reason}
        flat, stored = await self._step("cordon", arguments)
        with _strict():
            return codec.decode_node(flat, stored)

    async def pods(self, uid: str) -> tuple[PodState, ...]:
        async with self._bounded(self._commands, self._timeout) as link:
            bodies = await link.evaluate(load("pods", bare=True), self._prefix, uid)
        with _strict():
            return tuple(PodState.from_json(body) for body in bodies)

    async def events(self, after: str, limit: int) -> tuple[Event, ...]:
        if limit == 0:
            return ()
        stream, since = keys.events(self._prefix), f"({after}"
        command = ("XRANGE", stream, since, "+") if limit > 0 else ("XREVRANGE", stream, "+", since)
        async with self._bounded(self._commands, self._timeout) as link:
            found = await link.ask(*command, "COUNT", abs(limit))
        with _strict():
            decoded = [codec.decode_event(entry) for entry in found]
        return tuple(decoded if limit > 0 else reversed(decoded))

    async def wait(self, after: str, timeout: float) -> str:
        stream = keys.events(self._prefix)
        block = max(1, millis(timeout))  # 0 would be for ever
        async with self._bounded(self._waits, timeout + self._timeout) as link:
            if not await link.ask("XREAD", "COUNT", 1, "BLOCK", block, "STREAMS", stream, after):
                return after
            newest = await link.ask("XREVRANGE", stream, "+", "-", "COUNT", 1)
        return str(newest[0][0])

    async def close(self) -> None:
        await self._commands.close()
        await self._waits.close()

    # --- how a step travels

    async def _job(self, name: str, arguments: dict[str, object]) -> JobRecord:
        (flat,) = await self._step(name, arguments)
        with _strict():
            return codec.decode_job(flat)

    async def _timed(self, name: str, arguments: dict[str, object], timing: Timing) -> Any:
        """A step that compares the timing; its refusal says what differs."""
        try:
            return await self._step(name, arguments)
        except StoreRefusedError as refusal:
            if refusal.code == "timing":
                with _strict():
                    stored = Timing.from_json(str(refusal))
                raise StoreRefusedError("timing", timing_differs(stored, timing)) from None
            raise

    async def _step(self, name: str, arguments: dict[str, object]) -> Any:
        text = codec.encode(arguments)
        async with self._bounded(self._commands, self._timeout) as link:
            done, *rest = await link.evaluate(load(name), self._prefix, link.run_id, str(RECORD_VERSION), text)
        if not done:
            raise StoreRefusedError(*rest)
        return rest

    @asynccontextmanager
    async def _bounded(self, links: Links, timeout: float) -> AsyncIterator[Any]:
        """A link within a bound; whatever goes wrong with it becomes StoreUnavailableError."""
        try:
            async with asyncio.timeout(timeout), links.one() as link:
                yield link
        except (RedisError, OSError) as error:
            await links.forget()
            raise StoreUnavailableError(_trouble(links.address, timeout, error)) from error


@contextmanager
def _strict() -> Iterator[None]:
    """What cannot be decoded was written by another version (or another program)."""
    try:
        yield
    except (ValueError, KeyError) as error:
        raise StoreRefusedError(
            "version",
            f"a record in the store cannot be read by this version of nodeagent: {error}. "
            "Install the version that the other nodes run",
        ) from error


def _trouble(address: str, timeout: float, error: Exception) -> str:
    """What happened, where, and what to do next."""
    where = f"the store at {address}"
    if isinstance(error, TimeoutError):
        return f"{where} did not answer within {timeout:g} s: check that Redis runs there and is not overloaded"
    if any(isinstance(e, AuthenticationError | NoPermissionError) for e in (error, error.__cause__)):
        return f"{where} refused this agent ({error}): check the store's user and password in the agent's config"
    if isinstance(error, ResponseError):
        return f"{where} cannot serve now ({error}): see the server's log and its INFO"
    return f"{where} cannot be reached ({error}): check that Redis runs there and that this node may connect"


def _who(node: str, incarnation: Incarnation) -> dict[str, object]:
    return {"node": node, "life": incarnation.life, "start": incarnation.start}


def _facts(facts: NodeFacts) -> dict[str, object]:
    return {"facts": codec.encode_facts(facts), "address": facts.address, "pid": facts.agent_pid}


def _timing(timing: Timing) -> dict[str, object]:
    return {
        "timing": timing.to_json(),
        "lease": millis(timing.lease),
        "credit": millis(timing.credit),
        "gap": millis(timing.gap),
    }


def _expectation(step: Proposal | Ending) -> dict[str, object]:
    return {
        "uid": step.uid,
        "expect": step.expect.model_dump() if step.expect is not None else None,
        "expect_state": step.expect_state,
        "control_rev": step.control_rev,
        "spend": codec.encode_optional(step.spend),
        "lost": sorted(set(step.lost)),
        "planned": step.planned,
        "by": step.by,
    }
