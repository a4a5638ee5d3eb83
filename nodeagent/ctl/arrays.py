"""An array as one: its line in ``get``, its jobs by its name, and its end."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from nodeagent.ctl.client import Client
from nodeagent.ctl.errors import CtlError, Exit, TimedOutError
from nodeagent.ctl.options import ENDED
from nodeagent.ctl.terminal import echo
from nodeagent.ctl.waiting import PATIENCE, Progress, demand_saved, mention_unsaved

Json = dict[str, Any]

POLL = 1.0
"""Seconds between two looks at all jobs."""


def members(rows: list[Json], name: str) -> list[Json]:
    """The jobs among these of the newest array of this name, by index."""
    named = [row for row in rows if row["array"] is not None and row["array"]["name"] == name]
    if not named:
        return []
    newest = max(named, key=lambda row: (row["phase"] not in ENDED, row["submitted"]))["array"]["id"]
    return sorted((row for row in named if row["array"]["id"] == newest), key=lambda row: int(row["array"]["index"]))


def folded(rows: list[Json]) -> list[Json]:
    """Rows of ``get`` with one for each array, where its first job stands."""
    arrays: dict[str, list[Json]] = {}
    for row in rows:
        if row["array"] is not None:
            arrays.setdefault(row["array"]["id"], []).append(row)
    found = []
    for row in rows:
        if row["array"] is None:
            found.append(row)
        elif jobs := arrays.pop(row["array"]["id"], None):
            found.append(_row(jobs))
    return found


def _row(jobs: list[Json]) -> Json:
    first, array = jobs[0], jobs[0]["array"]
    counts = Counter(job["phase"] for job in jobs)
    phases = [f"{number} {phase}" for phase, number in counts.most_common()]
    if len(jobs) < array["count"]:  # of the ended ones only the newest are listed
        phases.append(f"{array['count'] - len(jobs)} ended before")
    running = [job for job in jobs if job["phase"] not in ENDED and job["pods"]]
    return first | {
        "name": f"{array['name']}[{array['first']}-{array['last']}]",
        "phase": ", ".join(phases),
        "age": max(job["age"] for job in jobs),
        "duration": max((job["duration"] for job in jobs if job["duration"] is not None), default=None),
        "chief": None,
        "gpus": sum(job["gpus"] for job in running),
        "pods": [pod for job in running for pod in job["pods"]],
    }


def end_all(client: Client, name: str, verb: str, timeout: float, no_wait: bool, request_id: str | None) -> bool:
    """``stop`` or ``delete`` every job of the array, and wait for it. False if there is no array of this name. Raises
    ``CtlError``."""
    method, path = ("DELETE", f"/v1/arrays/{name}") if verb == "delete" else ("POST", f"/v1/arrays/{name}/{verb}")
    try:
        after = client.change(method, path, request_id)
    except CtlError as error:
        if error.code == Exit.NOT_FOUND:
            return False
        raise
    uids, what = {job["uid"] for job in after["jobs"]}, f"array/{name} {verb}"
    if no_wait:
        echo(f"{what} asked for: {len(uids)} jobs")
        demand_saved(what, after)
        return True
    mention_unsaved(what, after)
    client.endure(PATIENCE)
    until = time.monotonic() + timeout
    with Progress() as progress:
        while left := _left(client, uids, verb):
            progress.show(f"{name}: {left} of {len(uids)} jobs are left")
            if time.monotonic() >= until:
                raise TimedOutError(f"{what}: {left} of {len(uids)} jobs are left", f"nodeagentctl get {name}")
            time.sleep(POLL)
    echo(f"array/{name} {'deleted' if verb == 'delete' else 'stopped'}: {len(uids)} jobs")
    return True


def _left(client: Client, uids: set[str], verb: str) -> int:
    """How many of them are still there, or have not ended."""
    rows = [row for row in client.get("/v1/jobs")["items"] if row["uid"] in uids]
    if verb == "delete":
        return len(rows)
    stopping = ("running", "stopping")
    return sum(row["phase"] not in ENDED or any(p["phase"] in stopping for p in row["pods"]) for row in rows)
