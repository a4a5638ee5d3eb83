"""The program that runs one accelerator's plug-in: reads its devices, waits for its events, and writes JSON lines.

The driver may hang in any call, so nobody waits for this process: the agent counts deadlines (``process.py``) and
starts another. Standard library only, besides what the plug-in imports. Must never judge beyond the plug-in's own
rules, and never write a value that was not read: what is not known is left out.

    {"gpus": [...]}         every ``pace`` seconds; fields of readings.GpuReading, and ``looks``: [rule, fires, raw]
    {"events": [[device, Xid or rule, unix time, count, raw], ...]}      at once what is new; its repetitions along with
                            the next "gpus"
    {"problem": "...", "absent": bool}      nothing can be read: no library, no driver (``absent``: none is installed)
    {"progress": true}      it has connected to the driver, or brought up one device; what it read comes later
    {"accelerator": {"name", "variable", "rules"}}     on the first line

Arguments: ``module:class``, and the pace in seconds or ``list``, which writes one line with the devices and ends.
"""

from __future__ import annotations

import json
import os
import sys
import time

from nodeagent.hardware.accelerator import AbsentError, Accelerator, Event, ProblemError

TYPE_CHECKING = False  # without typing: it costs 0.7 MB
if TYPE_CHECKING:
    from typing import Any, NoReturn, TextIO

MOST_EVENTS = 100
"""Between two looks; what a plug-in reports beyond them is dropped, or a storm would cost what it likes. The next look
sees what it led to."""
RAW = 200
"""Characters of a line or value that made a rule fire."""


class Repetitions:
    """Events that were sent since the last look: what repeats them waits for the next, or a storm would have the agent
    judge twenty times a second."""

    def __init__(self) -> None:
        self._sent: set[tuple[str, str | int]] = set()
        self._held: dict[tuple[str, str | int], Event] = {}
        self._left = MOST_EVENTS

    def news(self, events: list[Event]) -> list[Event]:
        """Those that repeat nothing; the others are kept."""
        fresh = []
        for event in events:
            key = (event.device, event.what)
            if known := self._held.get(key):
                known.at, known.count = event.at, known.count + event.count
            elif self._left <= 0:
                continue
            elif key in self._sent:
                self._held[key] = event
            else:
                self._left -= 1
                self._sent.add(key)
                fresh.append(event)
        return fresh

    def take(self) -> list[Event]:
        """What was kept, and begin anew."""
        taken = list(self._held.values())
        self._sent, self._held, self._left = set(self._held), {}, MOST_EVENTS
        return taken


class LineWriter:
    """Lines for the agent. Whatever else the process prints goes nowhere: a library's own words are no readings."""

    def __init__(self) -> None:
        self._file: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        self._first: dict[str, Any] = {}

    def introduce(self, accelerator: Accelerator) -> None:
        """The next line says what is read."""
        rules = [rule.row for rule in accelerator.rules]
        self._first = {"accelerator": {"name": accelerator.name, "variable": accelerator.variable, "rules": rules}}

    def write(self, what: dict[str, Any]) -> None:
        """One line; the pipe's end is the end of this process."""
        self._file.write(json.dumps(self._first | what) + "\n")
        self._file.flush()
        self._first = {}

    def end(self, error: ProblemError) -> NoReturn:
        """Say why, and end."""
        self.write({"problem": str(error), "absent": isinstance(error, AbsentError)})
        sys.exit(1)


def load(target: str) -> Accelerator:
    """The plug-in of that ``module:class``. Raises ProblemError where something that it needs is not installed."""
    module, _, name = target.partition(":")
    try:
        __import__(module)
    except ImportError as error:
        raise ProblemError(f"{target} cannot be imported: {error}") from error
    made: Accelerator = getattr(sys.modules[module], name)()
    return made


def judged(accelerator: Accelerator, device: dict[str, Any]) -> dict[str, Any]:
    """The device as the agent takes it: with what the plug-in's rules see of it, without what is for them alone."""
    looks = []
    for rule in accelerator.rules:
        fires = rule.check(device) if rule.check is not None else None
        if fires is not None:
            looks.append([rule.row["id"], bool(fires), fires[:RAW] if isinstance(fires, str) else ""])
    shown = {key: value for key, value in device.items() if not key.startswith("_")}
    return shown | ({"looks": looks} if looks else {})


def wire(events: list[Event]) -> list[list[Any]]:
    """Events as they are written."""
    return [[event.device, event.what, event.at, event.count, event.raw[:RAW]] for event in events]


def follow(accelerator: Accelerator, writer: LineWriter, pace: float) -> None:
    """Look and wait, for as long as somebody reads. Raises ProblemError."""
    accelerator.progress = lambda: writer.write({"progress": True})
    accelerator.progress()
    repetitions = Repetitions()
    while True:
        again = repetitions.take()
        until = time.monotonic() + pace
        try:
            found = accelerator.look()
        except ProblemError as error:
            if not error.again:
                raise
            writer.write({"problem": str(error)})
            time.sleep(max(0.0, until - time.monotonic()))
            continue
        writer.write(
            {"gpus": [judged(accelerator, device) for device in found]} | ({"events": wire(again)} if again else {})
        )
        until = time.monotonic() + pace
        while (left := until - time.monotonic()) > 0:
            if fresh := repetitions.news(accelerator.events(left)):
                writer.write({"events": wire(fresh)})
            if accelerator.due:
                break


def main() -> None:
    """Read until nobody listens."""
    target, pace = sys.argv[1:3]
    writer = LineWriter()
    try:
        accelerator = load(target)
        writer.introduce(accelerator)
        accelerator.open()
        if pace == "list":
            writer.write({"gpus": accelerator.devices()})
        else:
            follow(accelerator, writer, float(pace))
    except ProblemError as error:
        writer.end(error)
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 (a plug-in may raise anything, and the agent is to say what)
        writer.end(ProblemError(f"the plug-in failed: {type(error).__name__}: {error}"))


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        sys.exit(0)
