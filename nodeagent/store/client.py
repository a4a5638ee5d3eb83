"""The Redis store: each method runs one script on the server, and every failure becomes one of the two store errors.

Must never decide or retry: the scripts decide, and the agent's loop tries again. Concurrent calls are safe. A call that
was cancelled may or may not have taken effect.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from nodeagent.model.base import Record, first_error
from nodeagent.model.job import Admission, Checkpoint, Control, JobEvent, JobRecord, Quota
from nodeagent.model.node import Cordon, Incarnation, NodeFacts, NodeRecord
from nodeagent.model.pod import PodState
from nodeagent.model.queue import Queues, QueuesRecord
from nodeagent.model.timing import Timing, millis
from nodeagent.model.usage import DAYS_KEPT, ROWS_KEPT, UsageDay
from nodeagent.model.window import Windows, WindowsRecord
from nodeagent.model.world import Ack, PodReport, Token
from nodeagent.spec.storeconfig import RedisConfig
from nodeagent.store import codec, keys, roster
from nodeagent.store.base import NO_KEY, KeyMark, StoreIdentity, StoreRefusedError, StoreUnavailableError
from nodeagent.store.calls import CALLERS_QUEUE, Calls
from nodeagent.store.decoder import COMPARED, Base, Decoder
from nodeagent.store.endpoint import HostAddresses, look_up
from nodeagent.store.errors import key_differs, strict
from nodeagent.store.link import CallersLinks, Links
from nodeagent.store.messages import (
    PAGE_BYTES,
    Answer,
    Beat,
    BeatReply,
    Ending,
    Forgotten,
    JoinReply,
    Judgement,
    NewJob,
    PastJobs,
    Proposal,
    QuotaClaims,
    Restored,
    Saves,
    Settlement,
    StoreCopy,
    Unread,
    Woken,
)
from nodeagent.store.nodetable import NodeTable
from nodeagent.store.recordroom import RecordRoom, submit_room
from nodeagent.store.scripts import (
    ActedOn,
    always,
    beat_brings_jobs,
    ended_by,
    expectation,
    facts_arguments,
    load,
    never,
    timing_arguments,
    usual_beat_words,
    who,
)
from nodeagent.store.whois import parse_info
from nodeagent.store.wire import LONGEST_ENTRIES, Reached, readable

COMMAND_LINKS = 4
WAIT_LINKS = 32
CALLERS_LINKS = 2
"""Links for what callers of the API read, and as many for what they change."""
PAST_AT_ONCE = 5
"""The most jobs of the history that a uid's beginning may match."""
MOST_UID = 64
"""Characters of a uid."""
PODS_AT_ONCE = 1000
"""Pods that one command asks for. Redis does nothing else while it runs the command."""
MOST_JOBS = 16_384
"""Jobs that an agent reads: each takes some 8 KB of its memory. Where there are more it decides nothing. A user has a
hundred live ones, unless the site says otherwise (``limits.jobs``); of those that have ended two thousand stay."""
MOST_OF_JOBS = 64 << 20
"""Characters of their records together."""
MOST_DAYS = DAYS_KEPT + 2
"""Days of which an agent reads what jobs used: those that are kept, today, and one by another node's clock."""
MOST_OF_USAGE = 32 << 20
"""Characters of these records together, with ``ROW_TAKES`` for each row: some 60,000 rows of usual length. They take
some 60 MB of its memory."""
ROW_TAKES = 400
DECODED_AT_A_TIME = 32
"""Records of a beat that are decoded before the loop has its turn: some 10 ms."""
NODES_AT_ONCE = 1000
"""Nodes of whose saves one command asks, likewise."""
JOBS_COMPARED = 8
"""The most jobs whose records are read beside a wait for their news. A node with more of them beats."""
QUEUES = "queues"
"""The record of the queues."""
WINDOWS = "windows"
"""The record of the maintenance windows."""
NEVER = 2**53
"""A revision above all others."""
USUAL_REPLY = 5
"""Parts of the reply of ``_usual_beat.lua``; that of the whole step has more."""

Raw = TypeVar("Raw")
Read = TypeVar("Read")


@dataclass(slots=True)
class _Records:
    """The records that a beat brings."""

    nodes: list[NodeRecord] = field(default_factory=list)
    jobs: list[JobRecord] = field(default_factory=list)
    queues: QueuesRecord | None = None
    windows: WindowsRecord | None = None
    usage: list[UsageDay] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    """Keys of records that were removed."""
    unread: list[Unread] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Jobs (uids) of which the decoder has no record that the changes fit to."""


def _revision(text: str | int) -> int:
    """Of a score in `changes`, where somebody may have written another number by hand; the script restores it then."""
    try:
        return int(text)
    except ValueError:
        raise StoreUnavailableError(f"the store's list of changes is damaged: {text!s:.20} is no revision") from None


class RedisStore:
    """A cluster's store on a Redis or Valkey server (``connect``); see ``Store`` for the methods."""

    def __init__(self, calls: Calls, key: KeyMark = NO_KEY) -> None:
        """``key``: the one that the joins and offers of this client stand for."""
        self._calls, self._prefix, self._key = calls, calls.prefix, key
        self._decoder = Decoder()
        self._aside = asyncio.Semaphore(1)
        """Of threads that decode what callers read."""
        self._nodes = NodeTable(calls, self._decoder.node)
        self._jobs = RecordRoom(MOST_JOBS, MOST_OF_JOBS)
        """Of the jobs that were read."""
        self._days = RecordRoom(MOST_DAYS, MOST_OF_USAGE)
        """Of the days of use that were read."""
        self._anew = Base(0, "")
        """The store's revision at the first of the beats that read everything: removals since then show by marks."""

    @property
    def reached(self) -> Reached | None:
        """The server that the newest link leads to; None before the first."""
        return self._calls.reached

    async def identity(self) -> StoreIdentity:
        async with self._calls.link() as link:
            text, (era,) = await link.ask_beside(("INFO",), ("HGET", f"{self._prefix}meta", "era"))
        info, place = parse_info(str(text)), self._calls.address
        evicts = info.get("evicted_keys", "0") != "0"
        return StoreIdentity(info.get("run_id", ""), str(era or ""), place, evicts)  # None: a key of another type

    async def join(
        self, node: str, incarnation: Incarnation, facts: NodeFacts, timing: Timing, regroup: int = 0
    ) -> JoinReply:
        arguments = who(node, incarnation) | facts_arguments(facts) | timing_arguments(timing)
        arguments |= {"regroup": regroup, "uid": uuid.uuid4().hex}
        cluster_uid, served = await self._agreed("join", arguments, timing, always)
        return JoinReply(cluster_uid=cluster_uid, served=served)

    async def restore(self, offer: StoreCopy) -> Restored:
        plain = {"era", "rev", "top", "served", "by", "uids", "numbers", "regroup", "awaited", "holds"}
        arguments = timing_arguments(offer.timing) | offer.model_dump(include=plain) | {
            "uid": offer.cluster_uid,
            "nodes": [codec.encode_node(node) for node in offer.nodes],
            "cordons": {node.id: codec.encode_optional(node.cordon) or "" for node in offer.nodes},
            "jobs": [codec.encode_job(job) for job in offer.jobs],
            "usage": [codec.encode_usage(day) for day in offer.usage],
        }  # fmt: skip
        if offer.queues is not None:
            arguments["queues"] = codec.encode_queues(offer.queues)
        if offer.windows is not None:
            arguments["windows"] = codec.encode_windows(offer.windows)
        era, known, recovering = await self._agreed("restore", arguments, offer.timing)
        return Restored(era=era, known=int(known), recovering=bool(recovering))

    async def _agreed(self, name: str, arguments: dict[str, object], timing: Timing, acted_on: ActedOn = never) -> Any:
        """A step that compares what all nodes must have the same of."""
        try:
            return await self._calls.timed(name, arguments | {"key": self._key.digest}, timing, acted_on)
        except StoreRefusedError as refusal:
            if refusal.code == "key":
                raise StoreRefusedError("key", key_differs(str(refusal), self._key.file)) from None
            raise

    async def beat(self, beat: Beat) -> BeatReply:
        arguments = self._beat_arguments(beat)
        reply = await self._calls.step("beat", arguments, beat_brings_jobs, usual_beat_words(arguments))
        if len(reply) == USUAL_REPLY:
            return self._nothing_new(beat, *reply)
        (
            cluster_uid, served, lapsed, next_lapse, rev, more, event, records, era, recovering, asked, *recovery,
        ) = reply  # fmt: skip
        if not recovering:
            if beat.rev == 0:
                self._anew, self._jobs = Base(int(recovery[6]), era), RecordRoom(MOST_JOBS, MOST_OF_JOBS)
                self._days = RecordRoom(MOST_DAYS, MOST_OF_USAGE)
            self._decoder.follow(Base(beat.rev, beat.era), Base(_revision(rev), era))
        found = _Records()
        for start in range(0, len(records), DECODED_AT_A_TIME):
            if start:
                await asyncio.sleep(0)
            self._decode_records(found, records[start : start + DECODED_AT_A_TIME], era, beat.rev)
        unfinished = not await self._read_rest(found, era, all_nodes=beat.rev == 0 and not recovering)
        if unfinished:
            found, rev, more = _Records(), beat.rev, 0  # the lease is renewed nevertheless; the next beat asks again
        with strict():
            return BeatReply(
                cluster_uid=cluster_uid,
                served=served,
                lapsed=tuple(node for node in lapsed if readable(node)),
                next_lapse=None if next_lapse == "" else int(next_lapse),
                nodes=tuple(found.nodes),
                jobs=tuple(found.jobs),
                queues=found.queues,
                windows=found.windows,
                usage=tuple(found.usage),
                gone=tuple(found.gone),
                unread=tuple(found.unread),
                rev=_revision(rev),
                more=bool(more),
                unfinished=unfinished,
                event=event,
                era=era,
                recovering=bool(recovering),
                asked=int(asked),
                recovers=int(recovery[0]),
                awaited=tuple(map(_shown, recovery[1])),
                sheltered=tuple(node for node in recovery[2] if readable(node)),
                awaits=recovery[3],
                silent=recovery[4],
                same=bool(recovery[5]),
                beyond=self._beyond,
            )

    def _nothing_new(
        self, beat: Beat, cluster_uid: str, served: str, next_lapse: str, asked: str, event: str
    ) -> BeatReply:
        """Of a beat that found everything as its agent knows it."""
        self._decoder.follow(Base(beat.rev, beat.era), Base(beat.rev, beat.era))
        with strict():
            return BeatReply(
                cluster_uid=cluster_uid,
                served=int(served),
                lapsed=(),
                next_lapse=None if next_lapse == "" else int(next_lapse),
                rev=beat.rev,
                event=event,
                era=beat.era,
                asked=int(asked),
                silent=beat.silent,
                same=True,
                beyond=self._beyond,
            )

    @property
    def _beyond(self) -> tuple[str, ...]:
        rooms = {"nodes": self._nodes.room, "jobs": self._jobs, "days": self._days}
        return tuple(kind for kind, room in rooms.items() if room.beyond)

    def _beat_arguments(self, beat: Beat) -> dict[str, object]:
        arguments: dict[str, object] = who(beat.node, beat.incarnation)
        arguments |= {"seq": beat.seq, "rev": beat.rev, "top": beat.top, "era": beat.era}
        if beat.facts is not None:
            arguments |= facts_arguments(beat.facts)
        if beat.readiness is not None:
            arguments["readiness"] = codec.encode_readiness(beat.readiness)
        arguments["pods"] = [{"uid": pod.uid, "body": pod.to_json()} for pod in beat.pods or ()]
        if beat.saved is not None:
            arguments["saved"] = beat.saved.model_dump()
        arguments["looks"] = beat.looks
        arguments["runs"] = [job.model_dump() for job in beat.runs] if beat.looks else []
        if beat.looks and beat.runs:
            own = beat.runs[beat.looks % len(beat.runs)]
            if texts := self._decoder.decided_by(own.uid, own.rev, beat.era):
                arguments["seen"] = {"uid": own.uid, "rev": own.rev, "texts": texts}
        arguments |= {"damaged": beat.damaged, "silent": beat.silent}
        arguments["notes"] = [note.model_dump() for note in beat.notes]
        if beat.unanswered:
            arguments["unanswered"] = True
        if beat.room != PAGE_BYTES:
            arguments["room"] = beat.room
        if beat.ahead:
            arguments["ahead"] = beat.ahead
        if beat.rev == 0:
            arguments["nodes"] = NEVER
        elif beat.rev < self._nodes.upto.rev and beat.era == self._nodes.upto.era:
            arguments["nodes"] = self._nodes.upto.rev
        if 0 < beat.rev < self._anew.rev and beat.era == self._anew.era:
            arguments["anew"] = self._anew.rev
        return arguments

    def _decode_records(self, found: _Records, records: Sequence[list[Any]], era: str, since: int) -> None:
        """Adds what a beat brings of the records that changed after the revision ``since``."""
        for raw, flat, cordon, kind in records:
            key = _shown(raw)
            try:
                if key != raw:
                    raise ValueError("its name is not UTF-8")
                if not flat and kind != "large":
                    found.gone.append(key)
                    self._decoder.forget(key)
                    self._nodes.room.leave(key.removeprefix("node:"))
                    self._jobs.leave(key.removeprefix("job:"))
                    self._days.leave(key.removeprefix("usage:"))
                elif kind == "large":
                    raise ValueError(f"it has more than {codec.MOST_OF_RECORD} characters, or a text of it too many")
                elif key.startswith("node:"):
                    if self._nodes.room.take(key.removeprefix("node:"), sum(map(len, flat)) + len(cordon)):
                        found.nodes.append(self._decoder.node(codec.own_record(key, flat), cordon))
                elif key == QUEUES:
                    found.queues = codec.decode_queues(flat)
                elif key == WINDOWS:
                    found.windows = codec.decode_windows(flat)
                elif key.startswith("usage:"):
                    day, fields = key.removeprefix("usage:"), len(flat) // 2
                    size = sum(map(len, flat)) + ROW_TAKES * fields
                    if fields > ROWS_KEPT + 1 or self._days.take(day, size):  # with too many rows it is unread
                        found.usage.append(codec.decode_usage(day, flat))
                elif kind == "whole":
                    if self._jobs.take(key.removeprefix("job:"), sum(map(len, flat))):
                        found.jobs.append(self._decoder.job(codec.own_record(key, flat), era, followed=True))
                elif job := self._decoder.news(key.removeprefix("job:"), flat, era, since, followed=True):
                    found.jobs.append(job)
                else:
                    found.missing.append(key.removeprefix("job:"))
            except ValueError as error:  # only this record is unreadable; the others are good
                found.unread.append(Unread(key=key, why=_plain(error)))

    async def _read_rest(self, found: _Records, era: str, *, all_nodes: bool) -> bool:
        """Reads what the beat itself did not bring. False: it cannot be read now."""
        read = await self._read_whole(found.missing)
        if read is None:
            return False
        if all_nodes:
            table = await self._nodes.read(era)
            if table is None:
                return False
            found.nodes += table.nodes
            self._decoder.keep_nodes({node.id for node in table.nodes})
            found.unread += (Unread(key=_shown(key), why=_plain(error)) for key, error in table.unread.items())
        found.jobs += read[0]
        found.unread += read[1]
        return True

    async def leave(self, node: str, incarnation: Incarnation) -> None:
        await self._calls.step("leave", who(node, incarnation))

    async def propose(self, proposal: Proposal) -> JobRecord:
        arguments = ended_by(proposal) | {
            "id": proposal.id,
            "members": {node: member.to_json() for node, member in proposal.members.items()},
            "listed": roster.shorten(proposal.members, self._decoder.nodes),
            "cause": proposal.cause.to_json(),
            "reason": proposal.cause.text,
            "form_ms": proposal.form_ms,
            "outside": codec.encode(proposal.outside),
            "failsafe_members": codec.encode_texts(proposal.failsafe_members),
            "claims": proposal.claims,
            "read": proposal.read,
        }
        return await self._job("propose", arguments)

    async def ack(
        self, uid: str, token: Token, node: str, incarnation: Incarnation, ack: Ack, last: PodReport | None
    ) -> JobRecord:
        arguments = who(node, incarnation) | {"uid": uid, "token": token.model_dump(), "ack": ack.to_json()}
        if last is not None:
            arguments["last"] = codec.report_arguments(last)
        return await self._job("ack", arguments)

    async def activate(self, uid: str, token: Token) -> JobRecord:
        return await self._job("activate", {"uid": uid, "token": token.model_dump()})

    async def report(
        self, uid: str, token: Token, node: str, incarnation: Incarnation, report: PodReport, text: str = ""
    ) -> JobRecord:
        arguments = who(node, incarnation) | {"uid": uid, "token": token.model_dump(), "reason": text or report.reason}
        return await self._job("report", arguments | codec.report_arguments(report))

    async def commit(
        self,
        uid: str,
        token: Token,
        node: str,
        incarnation: Incarnation,
        name: str,
        step: int,
        order: int,
        signature: str = "",
        instead: Checkpoint | None = None,
    ) -> JobRecord:
        checkpoint = Checkpoint(name=name, step=step, number=token.number, order=order, signature=signature)
        arguments = who(node, incarnation) | {"uid": uid, "token": token.model_dump()}
        arguments |= {"checkpoint": checkpoint.to_json(), "instead": codec.encode_optional(instead)}
        return await self._job("commit", arguments)

    async def put_back(
        self,
        uid: str,
        token: Token,
        node: str,
        incarnation: Incarnation,
        checkpoint: Checkpoint,
        instead: Checkpoint | None,
    ) -> JobRecord:
        arguments = who(node, incarnation) | {"uid": uid, "token": token.model_dump(), "again": True}
        arguments |= {"checkpoint": checkpoint.to_json(), "instead": codec.encode_optional(instead)}
        return await self._job("commit", arguments)

    async def differs(self, job: JobRecord, era: str) -> bool:
        try:
            flat, _, is_of = await self._calls.step("read", {"uid": job.uid}, always)
        except StoreRefusedError:
            return False
        if is_of != era or codec.pairs(flat).get("rev") != str(job.rev) or self._decoder.has(job.uid, flat, era):
            return False
        try:
            return job != codec.decode_job(flat)
        except ValueError:
            return True

    async def end(self, ending: Ending) -> JobRecord:
        arguments = ended_by(ending) | {
            "phase": ending.phase,
            "reason": ending.reason,
            "outcome": codec.encode_optional(ending.outcome),
            "delay_ms": ending.delay_ms,
            "control": codec.encode_optional(ending.control),
            "by_policy": ending.by_policy,
            "wall": repr(ending.wall),
        }
        return await self._job("end", arguments)

    async def submit(
        self,
        jobs: Sequence[NewJob],
        owner: int,
        wall: float,
        by: str,
        request: str,
        did: str = "",
        *,
        era: str = "",
        quota: Quota | None = None,
        claims: QuotaClaims | None = None,
    ) -> tuple[str, int]:
        for job in jobs:
            _readable(f"job {job.spec.name}", job.spec)
        arguments: dict[str, object] = {
            "jobs": [codec.new_job(job, wall) for job in jobs],
            "owner": owner,
            "submitted": repr(wall),
            "by": by,
            "request": request,
            "did": did,
            "era": era,
            "quota": None if quota is None else quota.model_dump(),
            "room": submit_room(MOST_JOBS, MOST_OF_JOBS, limited=quota is not None),
            "claims": None if claims is None else claims.model_dump(),
        }
        first, rev = await self._calls.step("submit", arguments, always)
        return str(first), _revision(rev)

    async def control(
        self,
        uid: str,
        expect_rev: int,
        control: Control | None,
        request: str,
        event: str,
        text: str,
        did: str = "",
        claims: QuotaClaims | None = None,
    ) -> JobRecord:
        arguments: dict[str, object] = {
            "uid": uid,
            "expect_rev": expect_rev,
            "request": request,
            "event": event,
            "text": text,
            "did": did,
            "claims": None if claims is None else claims.model_dump(),
        }
        if control is not None:
            new = control.model_copy(update={"rev": max(expect_rev + 1, control.rev)})
            arguments |= {"control": new.to_json(), "by": control.by}
        return await self._job("control", arguments)

    async def renew(self, uid: str, expect: str, admission: Admission) -> JobRecord:
        return await self._job("renew", {"uid": uid, "expect": expect, "admission": admission.to_json()})

    async def set_failsafe_members(
        self,
        uid: str,
        token: Token,
        node: str,
        incarnation: Incarnation,
        expect: Mapping[str, str],
        failsafe_members: Mapping[str, str],
    ) -> JobRecord:
        arguments = who(node, incarnation) | {"uid": uid, "token": token.model_dump()}
        arguments |= {"expect": codec.encode_texts(expect), "failsafe_members": codec.encode_texts(failsafe_members)}
        return await self._job("set_failsafe_members", arguments)

    async def forget(self, node: str, by: str, request: str = "", did: str = "") -> Forgotten:
        arguments: dict[str, object] = {"node": node, "by": by, "request": request, "did": did}
        flat, cordon, removed, rev = await self._calls.step("forget", arguments, always)
        with strict():
            found = codec.decode_node(flat, cordon) if flat else None
            return Forgotten(node=found, removed=bool(removed), rev=int(rev))

    async def request(self, request: str) -> Answer | None:
        async with self._calls.changing() as link:
            found = await link.evaluate(load("request", bare=True), self._prefix, request)
        if found is None:
            return None
        text, rev = found
        subject, _, did = str(text).partition(" ")
        return Answer(subject=subject, did=did, rev=_revision(rev))

    async def settle(self, settlement: Settlement) -> JobRecord:
        new = settlement.control.model_copy(update={"rev": settlement.control_rev + 1})
        arguments = expectation(settlement) | {
            "control": new.to_json(),
            "event": settlement.event,
            "text": settlement.text,
        }
        return await self._job("settle", arguments)

    async def judge(self, judgement: Judgement) -> JobRecord:
        spend = judgement.spend
        arguments = expectation(judgement) | {"number": judgement.number, "spend": spend.to_json(), "text": spend.text}
        return await self._job("judge", arguments)

    async def remove(self, uid: str, by: str = "") -> None:
        await self._calls.step("remove", {"uid": uid, "by": by})

    async def shelve(self, uids: Collection[str], before: float, most: int) -> bool:
        arguments: dict[str, object] = {"uids": list(uids), "before": before, "most": most}
        (more,) = await self._calls.step("shelve", arguments)
        return bool(more)

    async def past(self, ref: str) -> PastJobs:
        found = await self._history("of", ref, PAST_AT_ONCE)
        return found.model_copy(update={"place": "", "exact": bool(found.place)})

    async def history(self, after: str, limit: int) -> PastJobs:
        return await self._history("after", after, limit)

    async def history_bytes(self, owners: Collection[int]) -> dict[int, int]:
        if not owners:
            return {}
        async with self._calls.reading() as link:
            found = await link.ask("HMGET", keys.history_bytes(self._prefix), *map(str, owners))
        # As the step that counts it, which takes what is no number for nothing.
        return {owner: int(size) if codec.is_number(size) else 0 for owner, size in zip(owners, found, strict=True)}

    async def _history(self, how: str, which: str, limit: int) -> PastJobs:
        async with self._calls.reading() as link:
            found = await link.evaluate(load("history", bare=True), self._prefix, how, which, str(limit))
        # In a thread: a page takes longer than the agent's loop may be blocked. In one at a time: the loop has its turn
        # among as many as run.
        async with self._aside:
            return await asyncio.to_thread(_past_jobs, found)

    async def cordon(
        self, node: str, cordon: Cordon | None, request: str, did: str = "", *, by: str = ""
    ) -> NodeRecord:
        arguments: dict[str, object] = {"node": node, "request": request, "did": did, "by": by}
        if cordon is not None:
            arguments |= {"cordon": cordon.to_json(), "by": cordon.by, "reason": cordon.reason}
        flat, stored = await self._calls.step("cordon", arguments, always)
        with strict():
            return codec.decode_node(flat, stored)

    async def queues(self, expect_rev: int, tree: Queues, request: str, text: str, did: str = "") -> QueuesRecord:
        flat = await self._replace(QUEUES, expect_rev, tree, request, text, did)
        with strict():
            return codec.decode_queues(flat)

    async def windows(self, expect_rev: int, windows: Windows, request: str, text: str, did: str = "") -> WindowsRecord:
        flat = await self._replace(WINDOWS, expect_rev, windows, request, text, did)
        with strict():
            return codec.decode_windows(flat)

    async def _replace(
        self, record: str, expect_rev: int, value: Queues | Windows, request: str, text: str, did: str
    ) -> list[str]:
        new = value.model_copy(update={"rev": max(expect_rev + 1, value.rev)})
        _readable(f"what was written of the {record}", new)
        arguments: dict[str, object] = {
            "record": record, "expect_rev": expect_rev, "value": new.to_json(), "request": request,
            "did": did, "by": value.by, "text": text,
        }  # fmt: skip
        flat: list[str]
        (flat,) = await self._calls.step("replace", arguments, always)
        return flat

    async def pods(self, wanted: Mapping[str, Collection[str]]) -> dict[str, tuple[PodState, ...]]:
        places = [(uid, node) for uid, nodes in wanted.items() for node in sorted(nodes)]
        bodies: list[str | None] = []
        async with self._calls.reading() as link:
            for start in range(0, len(places), PODS_AT_ONCE):
                some = places[start : start + PODS_AT_ONCE]
                bodies += await link.ask("MGET", *(keys.pod(self._prefix, uid, node) for uid, node in some))
        # In a thread: for a thousand nodes this takes longer than the agent's loop may be blocked.
        return await asyncio.to_thread(_pods, wanted, places, bodies)

    async def events(self, after: str, limit: int, before: str = "") -> tuple[JobEvent, ...]:
        if limit == 0:
            return ()
        stream, since, until = keys.events(self._prefix), f"({after}", f"({before}" if before else "+"
        command = ("XRANGE", stream, since, until) if limit > 0 else ("XREVRANGE", stream, until, since)
        async with self._calls.reading() as link:
            found = await link.ask(*command, "COUNT", abs(limit))
        decoded = list(_each(codec.decode_event, found))
        return tuple(decoded if limit > 0 else reversed(decoded))

    async def wait(self, after: str, timeout: float) -> str:
        every = keys.events(self._prefix)
        async with self._calls.waiting(timeout) as link:
            if not await link.ask(*_next_of([every], after, timeout)):
                return after
            newest = await link.ask("XREVRANGE", every, "+", "-", "COUNT", 1)
        return str(newest[0][0]) if newest else after

    async def wake(self, after: str, timeout: float, node: str, jobs: Collection[str]) -> Woken:
        # What is written right now may still be lost where there are replicas.
        compared = () if self._calls.replicated or len(jobs) > JOBS_COMPARED else tuple(jobs)
        asked = _next_of(keys.wakes(self._prefix, node, jobs), after, timeout)
        async with self._calls.waiting(timeout) as link:
            found, records = await link.ask_beside(
                asked, *(("HMGET", keys.job(self._prefix, uid), *COMPARED) for uid in compared)
            )
        entries = [(str(stream), *entry) for stream, news in found or () for entry in news]
        newest = max((str(event) for _, event, _ in entries), key=codec.event_order, default=after)
        stored = dict(zip(compared, records, strict=True))
        brought = [self._brought(stream, fields, stored) for stream, _, fields in entries]
        return Woken(newest, () if None in brought else tuple(job for job in brought if job is not None))

    def _brought(
        self, stream: str, fields: Sequence[str], stored: Mapping[str, Sequence[str | None] | None]
    ) -> JobRecord | None:
        """The job with the changes that its wake brought; None if a beat has to bring them. ``stored``: of each record
        what ``Decoder.agrees`` compares."""
        place = keys.wakes(self._prefix, "", [""])[-1]
        uid = stream.removeprefix(place)
        record = stored.get(uid) if stream.startswith(place) else None
        if record is None:
            return None
        try:
            first, era, _, since, *words = fields
            if first != "era":
                return None
            changes = [
                word for name, text in zip(words[::2], words[1::2], strict=True)
                for word in (name[1:], text if name.startswith("+") else None)
            ]  # fmt: skip
            if not self._decoder.agrees(uid, changes, record):
                return None
            return self._decoder.news(uid, changes, era, int(since))
        except ValueError:
            return None

    async def saved(self, after: str, timeout: float, nodes: Collection[str]) -> Saves:
        stream, wanted, texts = keys.saves(self._prefix), sorted(nodes), list[str | None]()
        async with self._calls.waiting(timeout) as link:
            if after:
                await link.ask("XREAD", "COUNT", 1, "BLOCK", max(1, millis(timeout)), "STREAMS", stream, after)
            newest = await link.ask("XREVRANGE", stream, "+", "-", "COUNT", 1)
            for start in range(0, len(wanted), NODES_AT_ONCE):  # never all: anybody's fields may be there, without end
                some = wanted[start : start + NODES_AT_ONCE]
                texts += await link.ask("HMGET", keys.saved(self._prefix), *some)
        found = [(node, text) for node, text in zip(wanted, texts, strict=True) if text is not None]
        reported = dict(_each(lambda entry: (entry[0], codec.decode_saved(entry[1])), found))
        return Saves(at=str(newest[0][0]) if newest else "0-0", nodes=reported)

    async def close(self) -> None:
        await self._calls.close()

    async def _job(self, name: str, arguments: dict[str, object]) -> JobRecord:
        """Run a step that replies with a job's record: the store sends only what changed since this client read the
        job."""
        uid = str(arguments["uid"])
        base = self._decoder.base(uid) if name != "read" else None
        if base is not None:
            arguments = arguments | {"base": base._asdict()}
        flat, kind, era, *upto = await self._calls.step(name, arguments, always)
        with strict():
            if kind == "whole" or base is None:
                return self._decoder.job(flat, era)
            job = self._decoder.news(uid, flat, era, base.rev, upto=int(upto[0]) if upto else None)
        return job if job is not None else await self._job("read", {"uid": uid})

    async def _read_whole(self, uids: list[str]) -> tuple[list[JobRecord], list[Unread]] | None:
        """Reads whole records of jobs. A beat brought only changes of these jobs, but the decoder has no record that
        the changes fit to. None if they cannot be read now."""
        jobs, unread = [], []
        for uid in uids:
            reached = self._decoder.reached()
            try:
                flat, _, era = await self._calls.step("read", {"uid": uid}, always)
                if self._jobs.take(uid, sum(map(len, flat))):
                    jobs.append(self._decoder.job(flat, era, followed=reached == self._decoder.reached()))
            except StoreRefusedError as refusal:
                if refusal.code != "not_found":  # a step has removed the job; the next beat reports it
                    return None
            except StoreUnavailableError:
                return None
            except ValueError as error:
                unread.append(Unread(key=f"job:{uid}", why=_plain(error)))
        return jobs, unread


def connect(at: str | RedisConfig, cluster: str, timeout: float, key: KeyMark = NO_KEY) -> RedisStore:
    """The store of this cluster, for a node with this key. Connects at the first call.

    ``at`` is a url, or the config's whole ``redis`` section. ``timeout`` (seconds) bounds each call, waiting for
    replicas included; getting a link (in turn, and connected, which may mean to ask sentinels) has the same time again.
    Raises ValueError for an invalid url or cluster name, AccessError for a password file or certificate that cannot be
    used.
    """
    config = RedisConfig(url=at) if isinstance(at, str) else at
    hosts = HostAddresses(look_up)
    commands = Links(config, COMMAND_LINKS, timeout, addresses=hosts)
    waits = Links(config, WAIT_LINKS, timeout, longest=LONGEST_ENTRIES, addresses=hosts)
    reads, changes = (CallersLinks(config, CALLERS_LINKS, timeout, CALLERS_QUEUE, hosts) for _ in range(2))
    wanted = config.replicas_wanted
    calls = Calls(commands, waits, keys.prefix(cluster), timeout, wanted, reads=reads, changes=changes)
    return RedisStore(calls, key)


def _next_of(streams: Sequence[str], after: str, timeout: float) -> tuple[str | int, ...]:
    """The command that waits for the next entry of any of these streams."""
    block = max(1, millis(timeout))  # 0 would block for ever
    return ("XREAD", "COUNT", 1, "BLOCK", block, "STREAMS", *streams, *(after for _ in streams))


def _readable(what: str, value: Record) -> None:
    """Raises StoreRefusedError for what no agent would read again."""
    try:
        codec.bounded(value.to_json())
    except ValueError as error:
        raise StoreRefusedError("unsupported", f"{what} is too large: {error}") from None


def _each(decode: Callable[[Raw], Read], found: Iterable[Raw]) -> Iterator[Read]:
    """Decodes entries and skips those that cannot be read: only people read such entries, or the next beat sends them
    again."""
    for entry in found:
        with suppress(ValueError):
            yield decode(entry)


def _past_jobs(found: Iterable[Sequence[Any]]) -> PastJobs:
    """From the reply of the script ``history``."""
    jobs, unread, place = list[JobRecord](), list[Unread](), ""
    for place, uid, record, *why in found:  # noqa: B007 (the last one's is where the next page begins)
        try:
            if why:
                raise ValueError(why[0])
            jobs.append(codec.decode_job(record))
        except ValueError as error:
            what = first_error(error) if isinstance(error, ValidationError) else _plain(error)
            unread.append(Unread(key=f"past:{_shown(uid)[:MOST_UID]}", why=what))
    return PastJobs(jobs=tuple(jobs), unread=tuple(unread), place=place)


def _pods(
    wanted: Iterable[str], places: Sequence[tuple[str, str]], bodies: Sequence[str | None]
) -> dict[str, tuple[PodState, ...]]:
    """The pods of each wanted job, from the replies for ``places``. Skips a place with no pod, or with an unreadable
    one."""
    found: dict[str, list[str]] = {uid: [] for uid in wanted}
    for (uid, _), body in zip(places, bodies, strict=True):
        if body is not None:
            found[uid].append(body)
    return {uid: tuple(_each(codec.decode_pod, reported)) for uid, reported in found.items()}


def _shown(text: str) -> str:
    """The text with every byte that was not UTF-8 written as an escape, so that it can be printed."""
    return text.encode(errors="backslashreplace").decode()


def _plain(error: ValueError) -> str:
    """The error's text in one printable line."""
    return _shown(" ".join(str(error)[:1000].split())[:300])
