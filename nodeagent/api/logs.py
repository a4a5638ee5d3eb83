"""A job's output over HTTP: this node's files and those of other agents, merged line by line.

A ``notice`` line names each node that cannot be asked; the other nodes' lines continue. While following, new
generations and nodes join; the answer ends when the job has ended and all lines are sent. Must never wait for a node
that does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from nodeagent.agent.view import AgentView
from nodeagent.api import auth, requests
from nodeagent.api.auth import Caller
from nodeagent.api.errors import ApiError
from nodeagent.api.forward import FAILURES, PeerRefusedError, Way, peer_lines, way_to, words
from nodeagent.api.locallogs import READERS_MAX, READERS_PER_USER, Query, Readers, followed_lines, notice, stored_lines
from nodeagent.api.logcursor import LogCursor
from nodeagent.api.requests import find_any_job, send
from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.world import Generation
from nodeagent.pods.folder import log_folder
from nodeagent.pods.logs import TAIL_LINES, TAIL_MAX

Line = dict[str, Any]

POLL = 0.2
"""Seconds between two polls for new nodes, new lines and the job's end."""
REFUSED_POLL = 2.0
"""Seconds until a node that refused, or could not be asked, is asked again."""
ALIVE_PEER, ALIVE_TOOL = 1.0, 10.0
"""Seconds of silence after which a sign of life is sent, to other agents and to the tool."""
SILENCE_LIMIT = 8.0
"""Seconds that a node may send nothing while following before a notice names it (the restart of an agent, and noticing
the loss of a node, take less)."""
LINE = 512
"""Bytes that a line takes in memory besides its text."""
QUEUE = 32
"""Lines (at most 16 KiB each) that wait for a slow reader; then the files and the other agents wait too."""


def place_names(generation: Generation) -> dict[int, str]:
    """Rank to the name of its place, in a job of several roles."""
    found: dict[int, str] = {}
    for member in generation.members.values():
        rank = member.first_rank
        for place in member.places:
            for _ in range(place.workers):
                found[rank] = place.name
                rank += 1
    return found


class LogRoutes:
    """The handler, for one agent's view."""

    def __init__(self, view: AgentView) -> None:
        self.view = view
        self.readers = Readers(READERS_PER_USER, READERS_MAX)

    def table(self) -> list[web.RouteDef]:
        """Every route of this noun."""
        return [web.get("/v1/jobs/{job}/logs", self.logs)]

    @requests.takes("follow", "tail", "rank", "generation", "previous", "first", "last")
    async def logs(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/jobs/{job}/logs?follow&tail&rank&generation&previous&first&last&local_only: JSON lines.

        Shows the newest generation that ran, unless ``generation``, ``previous``, or ``first`` and ``last`` choose
        others; ``follow`` continues with newer ones.
        """
        job = await find_any_job(self.view, request.match_info["job"])
        who, names = await auth.caller(request, self.view.config.jobs), auth.database(request)
        if not auth.may_see(who, job):
            await names.learn([job.owner])
        auth.may_read_logs(who, job, names.shown)
        follow = requests.flag(request, "follow")
        newest = job.active.number if job.active is not None else 1
        only = previous(job) if requests.flag(request, "previous") else requests.number(request, "generation")
        first, last = requests.number(request, "first"), requests.number(request, "last")
        if only is not None:
            first = last = only
        elif first is None:
            first, last = newest, (None if follow else newest)
        tail = requests.number(request, "tail")
        tail = None if tail is None else min(tail, TAIL_LINES)
        query = Query(first, last, requests.number(request, "rank"), tail)
        _check_generation(job, only)
        _check_rank(job, query)
        alone, wide = requests.flag(request, requests.OWN_ONLY), query.first < newest
        asked = _Asked(job, query, alone, wide, lambda: auth.caller(request, self.view.config.jobs))
        who, limits = await asked.who(), self.view.config.limits
        async with contextlib.AsyncExitStack() as counted:
            counted.enter_context(self.readers.admit(who, None if who.operator else limits.followers))
            counted.enter_context(self.readers.peers(who, 0 if alone else len(self._others(asked)[0])))
            if tail is not None and not follow:
                await counted.enter_async_context(self.readers.tail(who, alone=alone))
            lines = self._follow(asked) if follow else self._all(asked)
            if job.spec.several:
                lines = self._placed(job, lines)
            async with contextlib.aclosing(lines):
                return await send(request, lines)

    async def _placed(self, job: JobRecord, lines: AsyncGenerator[Line, None]) -> AsyncGenerator[Line, None]:
        """Adds to each line the ``place`` (``trainer.0``) of its worker, if it is known: the record has the members of
        the newest generation only."""
        known: dict[int, dict[int, str]] = {}
        async with contextlib.aclosing(lines):
            async for line in lines:
                number = line.get("generation", 0)  # 0: a sign of life, or a notice
                generation = self.view.cluster().jobs.get(job.uid, job).generation
                if generation is not None and generation.number == number and number not in known:
                    known[number] = place_names(generation)
                place = known.get(number, {}).get(line.get("rank", -1))
                yield line | {"place": place} if place else line

    def _ended(self, uid: str) -> bool:
        """Returns whether no more output will be written."""
        cluster = self.view.cluster()
        job = cluster.jobs.get(uid)
        if job is None:
            return True
        holders = job.generation.holders if job.generation is not None else {}
        return job.phase in TERMINAL and all(cluster.gone(n, h.life) for n, h in holders.items())

    def _others(self, asked: _Asked) -> tuple[dict[str, Way], list[Line]]:
        """(nodes whose agents can be asked, with the way to each; notices about those that cannot be asked and had a
        part in the job). On other machines only nodes with a part are asked; for old generations all are."""
        cluster = self.view.cluster()
        part = _part(cluster.jobs.get(asked.uid, asked.job))
        ask: dict[str, Way] = {}
        notices: list[Line] = []
        for node in cluster.nodes.values():
            if node.id == self.view.node:
                continue
            if node.facts.https is not None and node.id not in part and not asked.wide:
                continue
            way = way_to(self.view, node)
            if isinstance(way, Way) and cluster.live(node.id):
                ask[node.id] = way
            elif node.id in part:
                gone = f"node {node.id} does not answer (its agent is gone): its part of the output is missing here"
                notices.append(notice(node.id, gone if isinstance(way, Way) else way))
        return ask, notices

    # --- stored output ---

    async def _all(self, asked: _Asked) -> AsyncGenerator[Line, None]:
        """All output written so far, by generation and time."""
        ways, notices = ({}, []) if asked.alone else self._others(asked)
        query, failed = asked.query, list[Line]()
        kept: deque[Line] | None = None if query.tail is None else deque(maxlen=query.tail)
        held = 0
        async with contextlib.AsyncExitStack() as stack:
            mine = stored_lines(self._folder(asked.job), self.view.node, query)
            sources = [mine, *(self._part_of(n, w, asked, failed) for n, w in ways.items())]
            for source in sources:
                await stack.enter_async_context(contextlib.aclosing(source))
            async for line in _in_order(sources):
                if line["stream"] == "notice":  # none of the last lines
                    failed.append(line)
                elif kept is None:
                    yield line
                else:
                    held += _size(line)
                    while kept and (len(kept) == query.tail or held > TAIL_MAX):
                        held -= _size(kept.popleft())
                    kept.append(line)
        while kept:  # what was read is not held any more
            yield kept.popleft()
        for line in [*notices, *failed]:
            yield line

    async def _part_of(self, node: str, way: Way, asked: _Asked, failed: list[Line]) -> AsyncGenerator[Line, None]:
        try:
            lines = peer_lines(self.view, way, asked.uid, asked.query, asked.who, follow=False)
            async with contextlib.aclosing(lines):
                async for line in lines:
                    if line:
                        yield line
        except FAILURES as error:
            failed.append(notice(node, f"node {node} did not send its part of the output: {words(error)}"))

    def _folder(self, job: JobRecord) -> Path:
        return log_folder(self.view.config.dirs.logs, job.name, job.uid)

    # --- following ---

    async def _follow(self, asked: _Asked) -> AsyncGenerator[Line, None]:
        """Lines as they come, from all nodes, until the job has ended."""
        queue: asyncio.Queue[Line | None] = asyncio.Queue(QUEUE)
        gathering = asyncio.create_task(self._gather(asked, queue))
        try:
            while True:
                try:
                    line = await asyncio.wait_for(queue.get(), ALIVE_PEER if asked.alone else ALIVE_TOOL)
                except TimeoutError:
                    if gathering.done() and queue.empty():
                        break
                    line = {}
                if line is None:
                    break
                yield line
            await gathering
        finally:
            gathering.cancel()
            await asyncio.gather(gathering, return_exceptions=True)

    async def _gather(self, asked: _Asked, queue: asyncio.Queue[Line | None]) -> None:
        uid = asked.uid
        mine = followed_lines(self._folder(asked.job), self.view.node, asked.query, lambda: self._ended(uid))
        async with asyncio.TaskGroup() as group:
            group.create_task(_pour(mine, queue))
            known: set[str] = set()
            reported: set[str] = set()
            while not asked.alone:
                ended = self._ended(uid)
                ways, notices = self._others(asked)
                for node in ways:
                    if node not in known:
                        known.add(node)
                        group.create_task(self._peer(node, asked, queue))
                for line in notices:
                    if line["text"] not in reported:
                        reported.add(line["text"])
                        await queue.put(line)
                if ended:
                    break
                await asyncio.sleep(POLL)
        await queue.put(None)

    async def _peer(self, node_id: str, asked: _Asked, queue: asyncio.Queue[Line | None]) -> None:
        """One other agent's lines, through its restarts and freezes, until the job has ended."""
        uid, query = asked.uid, asked.query
        marks, tail = LogCursor(), query.tail is not None
        reported: set[str] = set()
        loop = asyncio.get_running_loop()
        good = loop.time()
        while True:
            ended = self._ended(uid)
            node = self.view.cluster().nodes.get(node_id)
            if node is None or (ended and not self.view.cluster().live(node_id)):
                return
            way, failed, pause = way_to(self.view, node), "", POLL
            try:
                if not isinstance(way, Way):
                    raise PeerRefusedError(way)
                skipper = marks.again(tail)
                lines = peer_lines(self.view, way, uid, query, asked.who, follow=not ended)
                async with contextlib.aclosing(lines):
                    async for line in lines:
                        good = loop.time()
                        if line.get("stream") == "notice":  # it comes again each time that the node is asked
                            if line["text"] not in reported:
                                reported.add(line["text"])
                                await queue.put(line)
                        elif line and not skipper.skip(line):
                            await queue.put(line)
                            marks.seen(line)
                query = replace(query, tail=None) if marks.any else query
            except FAILURES as error:
                failed = words(error)
                pause = REFUSED_POLL if isinstance(error, PeerRefusedError) else POLL
            if ended:
                if failed:
                    text = f"node {node_id} did not send the end of its part of the output: {failed}"
                    await queue.put(notice(node_id, text))
                return
            if failed and loop.time() > good + SILENCE_LIMIT and self.view.cluster().live(node_id):
                text = f"node {node_id} does not send its part of the output, and will be asked again: {failed}"
                await queue.put(notice(node_id, text))
                good = math.inf  # reported once, until the node sends something
            await asyncio.sleep(pause)


def _size(line: Line) -> int:
    """Bytes that it takes in memory, about."""
    return LINE + sys.getsizeof(line["text"])


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request for output."""

    job: JobRecord
    query: Query
    alone: bool
    """Only this node's output."""
    wide: bool
    """Older generations too: nodes that have no part in the job any more may have had one."""
    who: Callable[[], Awaitable[Caller]]

    @property
    def uid(self) -> str:
        return self.job.uid


def _check_generation(job: JobRecord, number: int | None) -> None:
    """Raises ``ApiError`` for a generation that the job never had."""
    newest = max(
        job.last_number, job.active.number if job.active else 0, job.generation.number if job.generation else 0
    )
    if number is None or 1 <= number <= newest:
        return
    has = {0: "none yet", 1: "generation 1 only"}.get(newest, f"generations 1 to {newest}")
    raise ApiError(
        "not_found",
        f"job {job.name!r} has no generation {number}: it has had {has}",
        f"see them: nodeagentctl describe {job.name}",
    )


def _check_rank(job: JobRecord, query: Query) -> None:
    """Raises ``ApiError`` for a rank that the requested generation does not have, if its size is still known."""
    generation = job.generation
    if query.rank is None or generation is None or (query.first, query.last) != (generation.number, generation.number):
        return
    if query.rank >= generation.world_size:
        raise ApiError(
            "not_found",
            f"generation {generation.number} of job {job.name!r} has no rank {query.rank}: it has ranks 0 to "
            f"{generation.world_size - 1}",
            f"nodeagentctl describe {job.name} lists them",
        )


def previous(job: JobRecord) -> int:
    """Number of the generation before the newest that ran. Raises ``ApiError`` if there was none."""
    newest = job.active.number if job.active is not None else 0
    before = [int(n) for n in job.budget if int(n) < newest]
    if job.last_number and job.last_number < newest:
        before.append(job.last_number)
    if not before:
        raise ApiError("not_found", f"job {job.name!r} has had no generation before its newest", "leave out --previous")
    return max(before)


def _part(job: JobRecord) -> set[str]:
    """Nodes that have, or lately had, workers of the job."""
    nodes = set(job.last_reports) | {s.node for s in job.budget.values() if s.node}
    if job.generation is not None:
        nodes |= set(job.generation.holders) | set(job.generation.reports)
        nodes |= set(job.generation.members) if job.generation.state != "forming" else set()
    return nodes


async def _pour(lines: AsyncGenerator[Line, None], queue: asyncio.Queue[Line | None]) -> None:
    async with contextlib.aclosing(lines):
        async for line in lines:
            await queue.put(line)


async def _in_order(sources: list[AsyncGenerator[Line, None]]) -> AsyncIterator[Line]:
    """The sources' lines, by generation and time; each source is in that order already."""
    heap: list[tuple[int, str, int, Line]] = []
    firsts = await asyncio.gather(*(anext(source, None) for source in sources))  # one that hangs delays no other
    for number, first in enumerate(firsts):
        if first is not None:
            heapq.heappush(heap, (first["generation"], first["time"], number, first))
    while heap:
        _, _, number, line = heapq.heappop(heap)
        yield line
        async for after in sources[number]:
            heapq.heappush(heap, (after["generation"], after["time"], number, after))
            break
