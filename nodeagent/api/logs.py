"""A job's output over HTTP: this node's files and those that other agents of this machine hold, merged line by line.

Nodes that cannot be asked are named in a ``notice`` line, the others go on. While following, new generations and nodes
join; it ends when the job has ended and all is sent. Must never wait for a node that does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from nodeagent.api import body
from nodeagent.api.errors import ApiError
from nodeagent.api.locallogs import Query, followed_lines, stored_lines
from nodeagent.api.lookup import find_job
from nodeagent.api.marks import Marks
from nodeagent.api.stream import send
from nodeagent.api.view import AgentView
from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.workers.pod_folder import log_folder

Line = dict[str, Any]

POLL = 0.2
"""Seconds between two looks for new nodes, new lines and the job's end."""
ALIVE_PEER, ALIVE_TOOL = 1.0, 10.0
"""Seconds of silence after which a sign of life is sent, to other agents and to the tool."""
PEER_SILENCE = 4.0
"""Seconds without a line or a sign of life after which another agent is given up (it may be frozen)."""
QUEUE = 1000


def notice(node: str, text: str) -> Line:
    """A line about the log itself."""
    return {"rank": -1, "stream": "notice", "node": node, "generation": 0, "time": "", "text": text, "partial": False}


class LogRoutes:
    """The handler, over one agent's view."""

    def __init__(self, view: AgentView) -> None:
        self.view = view

    def table(self) -> list[web.RouteDef]:
        """Every route of this noun."""
        return [web.get("/v1/jobs/{job}/logs", self.logs)]

    async def logs(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/jobs/{job}/logs?follow&tail&rank&generation&previous&first&last&local_only: JSON lines.

        Of the newest generation that ran, unless ``generation``, ``previous``, or ``first`` and ``last`` say otherwise;
        ``follow`` goes on with newer ones.
        """
        job = find_job(self.view.cluster(), request.match_info["job"])
        follow = body.flag(request, "follow")
        newest = job.active.number if job.active is not None else 1
        only = previous(job) if body.flag(request, "previous") else body.number(request, "generation")
        first, last = body.number(request, "first"), body.number(request, "last")
        if only is not None:
            first = last = only
        elif first is None:
            first, last = newest, (None if follow else newest)
        query = Query(first, last, body.number(request, "rank"), body.number(request, "tail"))
        alone = body.flag(request, "local_only")
        lines = self._follow(job, query, alone) if follow else self._all(job, query, alone)
        async with contextlib.aclosing(lines):
            return await send(request, lines)

    def _ended(self, uid: str) -> bool:
        """Nothing will be written any more."""
        cluster = self.view.cluster()
        job = cluster.jobs.get(uid)
        if job is None:
            return True
        holders = job.head.holders if job.head is not None else {}
        return job.phase in TERMINAL and all(cluster.gone(n, h.life) for n, h in holders.items())

    def _others(self, uid: str) -> tuple[list[NodeRecord], list[Line]]:
        """(nodes whose agents can be asked, notices about those that cannot and had a part in the job)."""
        cluster, me = self.view.cluster(), self.view.me()
        job = cluster.jobs.get(uid)
        part = _part(job) if job is not None else set()
        ask: list[NodeRecord] = []
        notices: list[Line] = []
        for node in cluster.nodes.values():
            if node.id == self.view.node:
                continue
            near = me is not None and node.facts.boot_id == me.facts.boot_id and bool(node.facts.api_socket)
            if near and cluster.live(node.id):
                ask.append(node)
            elif node.id in part:
                notices.append(notice(node.id, _why_not(node, near)))
        return ask, notices

    # --- all that there is ---

    async def _all(self, job: JobRecord, query: Query, alone: bool) -> AsyncGenerator[Line, None]:
        """Everything written so far, by generation and time."""
        uid = job.uid
        nodes, notices = ([], []) if alone else self._others(uid)
        failed: list[Line] = []
        kept: deque[Line] | None = None if query.tail is None else deque(maxlen=query.tail)
        async with contextlib.AsyncExitStack() as stack:
            mine = stored_lines(self._folder(job), self.view.node, query)
            sources = [mine, *(self._asked(n, uid, query, failed) for n in nodes)]
            for source in sources:
                await stack.enter_async_context(contextlib.aclosing(source))
            async for line in _in_order(sources):
                if kept is None:
                    yield line
                else:
                    kept.append(line)
        for line in [*(kept or ()), *notices, *failed]:
            yield line

    async def _asked(self, node: NodeRecord, uid: str, query: Query, failed: list[Line]) -> AsyncGenerator[Line, None]:
        try:
            async with contextlib.aclosing(_peer_lines(node, uid, query, follow=False)) as lines:
                async for line in lines:
                    yield line
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            failed.append(notice(node.id, f"node {node.id} did not give its part of the output: {_words(error)}"))

    def _folder(self, job: JobRecord) -> Path:
        return log_folder(self.view.config.dirs.logs, job.name, job.uid)

    # --- following ---

    async def _follow(self, job: JobRecord, query: Query, alone: bool) -> AsyncGenerator[Line, None]:
        """Lines as they come, from all nodes, until the job has ended."""
        queue: asyncio.Queue[Line | None] = asyncio.Queue(QUEUE)
        gathering = asyncio.create_task(self._gather(job, query, alone, queue))
        try:
            while True:
                try:
                    line = await asyncio.wait_for(queue.get(), ALIVE_PEER if alone else ALIVE_TOOL)
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

    async def _gather(self, job: JobRecord, query: Query, alone: bool, queue: asyncio.Queue[Line | None]) -> None:
        uid = job.uid
        mine = followed_lines(self._folder(job), self.view.node, query, lambda: self._ended(uid))
        async with asyncio.TaskGroup() as group:
            group.create_task(_pour(mine, queue))
            asked: set[str] = set()
            told: set[str] = set()
            while not alone:
                ended = self._ended(uid)
                nodes, notices = self._others(uid)
                for node in nodes:
                    if node.id not in asked:
                        asked.add(node.id)
                        group.create_task(self._peer(node.id, uid, query, queue))
                for line in notices:
                    if line["text"] not in told:
                        told.add(line["text"])
                        await queue.put(line)
                if ended:
                    break
                await asyncio.sleep(POLL)
        await queue.put(None)

    async def _peer(self, node_id: str, uid: str, query: Query, queue: asyncio.Queue[Line | None]) -> None:
        """One other agent's lines, over its restarts and its freezes, until the job has ended."""
        marks, tail = Marks(), query.tail is not None
        while True:
            ended = self._ended(uid)
            node = self.view.cluster().nodes.get(node_id)
            if node is None or (ended and not self.view.cluster().live(node_id)):
                return
            failed = ""
            try:
                skipper = marks.again(tail)
                async with contextlib.aclosing(_peer_lines(node, uid, query, follow=not ended)) as lines:
                    async for line in lines:
                        if not skipper.skip(line):
                            await queue.put(line)
                            marks.seen(line)
                query = replace(query, tail=None) if marks.any else query
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                failed = _words(error)
            if ended:
                if failed:
                    text = f"node {node_id} did not give the end of its part of the output: {failed}"
                    await queue.put(notice(node_id, text))
                return
            await asyncio.sleep(POLL)


def previous(job: JobRecord) -> int:
    """The generation before the newest that ran. Raises ``ApiError`` if there was none."""
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
    if job.head is not None:
        nodes |= set(job.head.holders) | set(job.head.reports)
        nodes |= set(job.head.members) if job.head.state != "forming" else set()
    return nodes


def _why_not(node: NodeRecord, near: bool) -> str:
    if not near:
        return (
            f"node {node.id} is another machine ({node.facts.hostname}): remote logs are not supported yet; "
            f"run nodeagentctl logs there"
        )
    return f"node {node.id} does not answer (its agent is gone): its part of the output is missing here"


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


async def _peer_lines(node: NodeRecord, uid: str, query: Query, follow: bool) -> AsyncGenerator[Line, None]:
    """What another agent of this machine has. Raises ``aiohttp.ClientError``, ``OSError`` or ``TimeoutError``."""
    params = query.params() | {"local_only": "1"}
    if follow:
        params["follow"] = "1"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=PEER_SILENCE, sock_read=PEER_SILENCE)
    connector = aiohttp.UnixConnector(path=node.facts.api_socket)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20) as session,
        session.get(f"http://agent/v1/jobs/{uid}/logs", params=params) as response,
    ):
        if response.status == 404:
            return  # it has not heard of the job yet, or not any more
        response.raise_for_status()
        async for raw in response.content:
            line = json.loads(raw)
            if "end" in line:
                return
            if line:
                yield line
        raise ConnectionResetError("its agent hung up")


async def _pour(lines: AsyncGenerator[Line, None], queue: asyncio.Queue[Line | None]) -> None:
    async with contextlib.aclosing(lines):
        async for line in lines:
            await queue.put(line)


async def _in_order(sources: list[AsyncGenerator[Line, None]]) -> AsyncIterator[Line]:
    """The sources' lines, by generation and time; each source is in that order already."""
    heap: list[tuple[int, str, int, Line]] = []
    for number, source in enumerate(sources):
        async for line in source:
            heapq.heappush(heap, (line["generation"], line["time"], number, line))
            break
    while heap:
        _, _, number, line = heapq.heappop(heap)
        yield line
        async for after in sources[number]:
            heapq.heappush(heap, (after["generation"], after["time"], number, after))
            break
