"""How one worker ended, as a record: code or signal, and the lines that explain it.

Standard library only; reads the worker's error file, decides nothing.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_CHARS = 4000
_MAX_FILE = 1 << 20


@dataclass(slots=True)
class Farewell:
    """How a worker took a planned stop; fields as of model.world.WorkerExit."""

    left_at: int | None = None
    saved_in: float | None = None
    overdue: float | None = None
    missed: bool = False
    saving: bool = False
    """It has begun to save; not told to others."""


def exit_record(
    rank: int,
    local_rank: int,
    pid: int,
    status: int,
    stopped: bool,
    order: int,
    error_file: Path,
    tail: str,
    farewell: Farewell,
    why: str = "",
) -> dict[str, Any]:
    """As model.world.WorkerExit. ``tail``: the last lines of standard error, used if the worker wrote no error
    file. ``why``: what else is known of its end."""
    code = os.waitstatus_to_exitcode(status)
    error = "" if code == 0 else (_from_error_file(error_file) or tail)
    if why:
        error = f"{error.rstrip()}\n{why}".lstrip()
    return {
        "rank": rank,
        "local_rank": local_rank,
        "pid": pid,
        "code": code if code >= 0 else None,
        "signal": -code if code < 0 else None,
        "stopped": stopped,
        "order": order,
        "at": time.time(),
        "error": error[-MAX_CHARS:].encode("utf-8", "backslashreplace").decode()[-MAX_CHARS:],
        "left_at": farewell.left_at,
        "saved_in": farewell.saved_in,
        "overdue": farewell.overdue,
        "missed": farewell.missed,
    }


def record_text(record: dict[str, Any]) -> str:
    return json.dumps(record)


def _from_error_file(path: Path) -> str:
    """The message of a TORCHELASTIC_ERROR_FILE: torch's record, or plain text."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    with os.fdopen(fd, "rb") as file:
        text = file.read(_MAX_FILE).decode("utf-8", "backslashreplace")
    try:
        message = json.loads(text)["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return text.strip()
    try:
        if not isinstance(message, dict):
            return str(message)
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack") if isinstance(extra, dict) else None
        return str(stack or message.get("message", "")).strip()
    except RecursionError:  # what could be read need not be printable
        return text.strip()
