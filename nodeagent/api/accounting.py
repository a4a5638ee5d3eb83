"""The use of the cluster (GET /v1/usage): sums by user, queue or job, over days.

A caller sees their own use, an operator everybody's. The figures come from the snapshot; single jobs that were removed
from the view come from the store's history. Must never change anything.
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Iterable, Sequence
from typing import cast, get_args

from aiohttp import web

from nodeagent.agent.view import AgentView
from nodeagent.api import auth, requests
from nodeagent.api.auth import DATABASE, NameOf, UserDatabase
from nodeagent.api.errors import ApiError
from nodeagent.api.serializers import Json, items, unread_json
from nodeagent.model.job import JobRecord
from nodeagent.model.usage import DAYS_KEPT, OTHERS, UsedTime
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.fairshare.usage import By, Total, UsageLine, all_lines, by_key, of_job, total
from nodeagent.store.messages import Unread

HOUR_MS = 3_600_000
SINCE = "7d"
"""Default of ``since``."""
EPOCH = datetime.date(1970, 1, 1)
_AGO = re.compile(r"(\d{1,4})d")


class AccountingRoutes:
    """The handler, for one agent's view."""

    def __init__(self, view: AgentView, names: UserDatabase = DATABASE) -> None:
        self.view, self._names = view, names

    def table(self) -> list[web.RouteDef]:
        """The one route."""
        return [web.get("/v1/usage", self.usage)]

    @requests.takes("by", "since", "until")
    async def usage(self, request: web.Request) -> web.Response:
        """GET /v1/usage?by=user|queue|job&since&until: each a date (UTC) or ``7d``, both days included. The largest use
        comes first."""
        who = await auth.caller(request, self.view.config.jobs)
        by, now = request.query.get("by", "user"), time.time()
        if by not in get_args(By):
            raise ApiError("usage", f"by={by!r} is none of {', '.join(get_args(By))}", "name one of them")
        today = int(now // 86400)
        first = day_of("since", request.query.get("since", SINCE), today)
        last = day_of("until", request.query.get("until", "0d"), today)
        if first > last:
            raise ApiError("usage", f"since {date_of(first)} is after until {date_of(last)}", "change one of them")
        cluster, health = self.view.cluster(), self.view.health()
        past, unread = await self._past() if by == "job" else ([], [])

        def lines() -> list[UsageLine]:
            found = [line for line in all_lines(cluster, int(now * 1000)) if line.job is not None or by != "job"]
            found += [line for job in past if job.uid not in cluster.jobs for line in of_job(job, cluster.served, 0)]
            within = (line for line in found if first <= line.day <= last and _is_something(line))
            return [line for line in within if who.operator or line.owner == who.uid]

        # In a thread: for many days and users it takes longer than the agent's loop may be blocked.
        chosen = await requests.written(lines)
        await self._names.learn({line.owner for line in chosen} - {OTHERS})
        about = {
            "by": by, "since": date_of(first), "until": date_of(last), "of": "all" if who.operator else who.name,
            "store_away_since": health.store_away_since, "unread": unread_json(unread),
        }  # fmt: skip

        return await requests.written_answer(lambda: usage_json(chosen, cast("By", by), self._names.shown) | about)

    async def _past(self) -> tuple[list[JobRecord], list[Unread]]:
        """The whole history, which retention bounds, and which of it cannot be read; empty while the store is away,
        which the answer says. Raises StoreUnavailableError: a part of it would look like all."""
        found, unread, after = list[JobRecord](), list[Unread](), ""
        if self.view.health().store_away_since is not None:
            return found, unread
        while (page := await self.view.store.history(after, 100)).place:
            found += page.jobs
            unread += page.unread
            after = page.place
        return found, unread


def day_of(key: str, text: str, today: int) -> int:
    """The day of a date, or of ``Nd`` days ago. Raises ``ApiError``."""
    if ago := _AGO.fullmatch(text):
        return max(0, today - int(ago[1]))
    try:
        return (datetime.date.fromisoformat(text) - EPOCH).days
    except ValueError:
        raise ApiError(
            "usage", f"{key}={text!r} is neither a date nor a number of days",
            f"write {key}=2026-11-01 or {key}=7d; {DAYS_KEPT} days are kept",
        ) from None  # fmt: skip


def date_of(day: int) -> str:
    """The date in the form of ISO 8601."""
    return (EPOCH + datetime.timedelta(days=day)).isoformat()


def _is_something(line: UsageLine) -> bool:
    return line.jobs > 0 or line.use != UsedTime()


def usage_json(lines: Sequence[UsageLine], by: By, names: NameOf) -> Json:
    """The answer: a row for each key, and the total."""
    found = by_key(lines, by)
    rows = [_row(by, key, of, names) for key, of in found.items()]
    rows.sort(key=lambda row: (-row["gpu_hours"], -row["slot_hours"], row["name"]))
    everything = [line for of in found.values() for line in of]
    return items(rows, total=total_json(total(everything)) | {"days": _days(everything)})


def _row(by: By, key: str, lines: Sequence[UsageLine], names: NameOf) -> Json:
    owners, queues = {line.owner for line in lines}, {line.queue for line in lines}
    job = lines[0].job
    user = None if len(owners) > 1 else "others" if OTHERS in owners else names(min(owners))
    name = {"user": user, "queue": key, "job": job.name if job is not None else key}[by]
    about = {
        "name": name, "user": user, "queue": None if len(queues) > 1 else min(queues),
        "uid": job.uid if by == "job" and job is not None else None,
    }  # fmt: skip
    return about | total_json(total(lines)) | {"days": _days(lines)}


def total_json(found: Total) -> Json:
    """Hours of devices; ``lost`` and ``goodput`` as parts of 1, None if nothing was used."""
    use = found.use
    return {
        "gpu_hours": _hours(use.gpu_ms),
        "slot_hours": _hours(use.slot_ms),
        "lost_gpu_hours": _hours(use.lost_gpu_ms),
        "lost_slot_hours": _hours(use.lost_slot_ms),
        "overhead_gpu_hours": _hours(use.overhead_gpu_ms),
        "overhead_slot_hours": _hours(use.overhead_slot_ms),
        "lost": _part(found.lost),
        "goodput": _part(found.goodput),
        "waited_hours": _hours(use.waited_ms),
        "jobs": found.jobs,
        "restarts": use.restarts,
    }


def job_use(job: JobRecord, cluster: Cluster, now: float) -> Json:
    """The whole use of one job, up to ``now`` (Unix time)."""
    return total_json(total(of_job(job, cluster.served, int(now * 1000))))


PICTURED = 14
"""Days of use on the status page."""
QUEUES = 6
"""Queues that the status page names; the others are summed as one."""


def shares_json(cluster: Cluster, now: float) -> Json | None:
    """The queues' use on each of the last days, the largest queue first: of GPUs; of slots if no GPU was used; None if
    neither was used. ``capacity``: hours that the present cluster has in one day."""
    today = int(now // 86400)
    days = range(today - PICTURED + 1, today + 1)
    lines = [line for line in all_lines(cluster, int(now * 1000)) if line.day in days]
    gpus = any(line.use.gpu_ms for line in lines)

    def used(use: UsedTime) -> int:
        return use.gpu_ms if gpus else use.slot_ms

    found = by_key((line for line in lines if used(line.use)), "queue")
    if not found:
        return None
    sizes = {name: used(total(of).use) for name, of in found.items()}
    order = sorted(sizes, key=lambda name: (-sizes[name], name))
    rows = [(name, found[name]) for name in order[:QUEUES]]
    if rest := [line for name in order[QUEUES:] for line in found[name]]:
        rows.append(("others", rest))
    installed = sum(
        len(node.facts.gpus) if gpus else node.facts.cpu_slots
        for node in cluster.nodes.values()
        if not node.lost and not node.left
    )
    return {
        "device": "gpu" if gpus else "slot",
        "capacity": installed * 24,
        "days": [date_of(day) for day in days],
        "queues": [
            {
                "name": name,
                "hours": [round(_hours(sum(used(line.use) for line in of if line.day == day)), 2) for day in days],
                "goodput": _part(total(of).goodput),
            }
            for name, of in rows
        ],
    }


def _days(lines: Iterable[UsageLine]) -> list[Json]:
    """The lines in the form for a picture, by day."""
    days: dict[int, list[UsageLine]] = {}
    for line in lines:
        days.setdefault(line.day, []).append(line)
    uses = ((day, total(of).use) for day, of in sorted(days.items()))
    return [
        {"day": date_of(day), "gpu_hours": _hours(use.gpu_ms), "slot_hours": _hours(use.slot_ms)}
        for day, use in uses
        if use.gpu_ms or use.slot_ms
    ]


def _hours(ms: int) -> float:
    return round(ms / HOUR_MS, 6)


def _part(part: float | None) -> float | None:
    return None if part is None else round(part, 6)
