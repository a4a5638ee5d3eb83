"""Waits for a state, with a bound: one changing line on a terminal, else one plain line for each change. Also handles
commands that are accepted, but not yet on enough disks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from nodeagent.ctl.client import Client
from nodeagent.ctl.output import span
from nodeagent.ctl.terminal import CtlError, WaitTimedOutError, echo, status_line

Json = dict[str, Any]
T = TypeVar("T")

POLL = 0.2
"""Seconds between two polls."""
PASSING = ("limit", "store_away")
"""The agent's codes for a user who has asked too often, or too much at once, and for what only the store can say."""
AGENT_AWAY_LIMIT = 30.0
"""Seconds that an agent may be unreachable during a wait (an agent's restart takes two)."""


class ProgressLine:
    """Reports changes on stderr. Use it as a context manager, which leaves a clean line."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = ""
        self._began = time.monotonic()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._terminal and self._shown:
            status_line("")

    def show(self, line: str) -> None:
        """The present state. On a terminal it replaces the previous line, and shows the time waited."""
        if self._terminal:
            self._shown = line
            waited = span(time.monotonic() - self._began)
            status_line(f"({waited}) {line}")
        elif line != self._shown:
            self._shown = line
            echo(line, err=True)


def wait(look: Callable[[], T], done: Callable[[T], bool], line: Callable[[T], str], timeout: float, what: str) -> T:
    """Poll until ``done``. ``done`` may raise to refuse. Raises ``WaitTimedOutError``, whose text has the last line."""
    until = time.monotonic() + timeout
    last = ""
    with ProgressLine() as progress:
        while True:
            try:
                seen = look()
            except CtlError as error:
                if error.kind not in PASSING:  # else this look was refused, not what is waited for
                    raise
                last = last or error.message
            else:
                if done(seen):
                    return seen
                last = line(seen)
                progress.show(last)
            if time.monotonic() >= until:
                break
            time.sleep(POLL)
    raise WaitTimedOutError(f"{what}: not so after {span(timeout)}; {last}")


def job_line(job: Json) -> str:
    """A job's state in one line."""
    return f"{job['name']}: {job['phase']}: {job['reason'] or 'no reason given'}"


def waits(client: Client, what: str, after: Json, no_wait: bool, text: str) -> bool:
    """The agent has accepted a command. Returns whether that waits for more; with ``no_wait`` it ends with this text,
    and done means saved. Raises ``WaitTimedOutError``."""
    if no_wait:
        echo(text)
        demand_saved(what, after)
        return False
    mention_unsaved(what, after)
    client.endure(AGENT_AWAY_LIMIT)
    return True


def demand_saved(what: str, after: dict[str, Any]) -> None:
    """For a command that ends here, done means saved. Raises ``WaitTimedOutError``."""
    if text := _text(after):
        raise WaitTimedOutError(
            f"{what}: {text}",
            f"ask again with --request-id {after['request_id']}: it happens once, and counts as done when it is saved",
        )


def mention_unsaved(what: str, after: dict[str, Any]) -> None:
    """A command that waits for more only warns, and continues."""
    if text := _text(after):
        echo(f"nodeagentctl: warning: {what}: {text}", err=True)


def _text(after: dict[str, Any]) -> str:
    return str(after.get("saved", {}).get("text", ""))
