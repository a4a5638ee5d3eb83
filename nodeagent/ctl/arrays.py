"""Commands on a whole array: its line in ``get``, its jobs by its name, and its end."""

from __future__ import annotations

from collections import Counter
from typing import Any

from nodeagent.ctl.client import ENDED, Client, array_path, look_up
from nodeagent.ctl.output import count as count_of
from nodeagent.ctl.terminal import CtlError, Exit, echo
from nodeagent.ctl.waiting import wait, waits

Json = dict[str, Any]


def members(client: Client, rows: list[Json], name: str) -> list[Json]:
    """The jobs in these rows, by index, of the array that the agent means by this name; if it lists none, of the
    newest one. Raises ``CtlError``."""
    named = [row for row in rows if row["array"] is not None and row["array"]["name"] == name]
    if not named:
        return []
    meant = (look_up(client, array_path(name)) or {}).get("id")
    newest = max(named, key=lambda row: (row["array"]["id"] == meant, row["phase"] not in ENDED, row["submitted"]))
    found = newest["array"]["id"]
    return sorted((row for row in named if row["array"]["id"] == found), key=lambda row: int(row["array"]["index"]))


def folded(rows: list[Json]) -> list[Json]:
    """Rows of ``get``, with one row for each array at the place of its first job."""
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
    if len(jobs) < array["count"]:  # of the ended jobs only the newest are listed
        phases.append(f"{array['count'] - len(jobs)} ended before")
    running = [job for job in jobs if job["phase"] not in ENDED and job["pods"]]
    in_line = [line for job in jobs if (line := job.get("queue")) is not None]
    return first | {
        "name": f"{array['name']}[{array['first']}-{array['last']}]",
        "phase": ", ".join(phases),
        "age": max(job["age"] for job in jobs),
        "duration": max((job["duration"] for job in jobs if job["duration"] is not None), default=None),
        "chief": None,
        "gpus": sum(job["gpus"] for job in running),
        "pods": [pod for job in running for pod in job["pods"]],
        "queue": min(in_line, key=lambda line: int(line["place"]), default=None),
    }


def end_all(client: Client, name: str, verb: str, timeout: float, no_wait: bool, request_id: str | None) -> bool:
    """``stop`` or ``delete`` every job of the array, and wait for the end. False if there is no array of this name.
    Raises ``CtlError``."""
    what = f"array/{name}"
    try:  # by its id: where it is asked for again, the name may be that of another array
        path = array_path(client.get(array_path(name))["id"])
        if verb == "delete":
            after = client.change("DELETE", path, request_id)
        else:
            after = client.change("POST", f"{path}/{verb}", request_id)
    except CtlError as error:
        if error.code != Exit.NOT_FOUND:
            raise
        if error.retried:
            echo(f"{what} is gone")
        return error.retried
    count = len(after["jobs"])
    if not waits(client, f"{what} {verb}", after, no_wait, f"{what} {verb} asked for: {count_of(count, 'job')}"):
        return True

    def left() -> int:
        """Jobs that still exist, or have not ended."""
        if (now := look_up(client, path)) is None:
            return 0
        live = [int(number) for phase, number in now["phases"].items() if verb == "delete" or phase not in ENDED]
        return sum(live) + (0 if verb == "delete" else int(now["stopping"]))

    wait(left, lambda n: n == 0, lambda n: f"{name}: {n} of {count_of(count, 'job')} left", timeout, f"{verb} {name}")
    done = "deleted" if verb == "delete" else "stopped"
    echo(f"{what} {done}: {count_of(count, 'job')}" if count else f"{what}: all its jobs had ended already")
    return True
