"""Lines of the kernel's log that tell of broken hardware: which there are, and how many alike are folded into one.

Standard library only (and no dataclasses, nor typing: importing them costs the probe 1.5 and 0.7 MB), pure. The words
are those that NVIDIA's driver and the Linux kernel write.
"""

from __future__ import annotations

import re
from collections import Counter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f:]+)(?:\.\d)?\): (\d+)")
_XID_BEGINS = b"NVRM: Xid ("
_XIDS = re.compile(rb"NVRM: Xid \([^,\n]*[,\n]")
"""Device and code of each Xid among many records."""
_BUS = re.compile(r"\b([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})\b")
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("off_bus", re.compile(r"NVRM: .*fallen off the bus")),
    ("nvlink", re.compile(r"nvidia-nvswitch\d*: SXid |nvidia-nvlink: .*\b(error|fail)", re.IGNORECASE)),
    ("aer", re.compile(r"AER: .*(Uncorrect|Fatal)|PCIe Bus Error: severity=Uncorrect", re.IGNORECASE)),
    ("mce", re.compile(r"mce: \[Hardware Error\]|Machine check events logged")),
    ("oom", re.compile(r"[Oo]ut of memory: Killed process")),
    ("hung_task", re.compile(r"INFO: task .* blocked for more than \d+ seconds")),
    ("io_error", re.compile(r"I/O error, dev \w+|EXT4-fs error|XFS \(.*\): .*I/O [Ee]rror|Buffer I/O error on dev")),
)
_HINT = re.compile(rb"NVRM|nvidia-nv|AER|PCIe Bus|mce:|Machine check|ut of memory|INFO: task|I/O |EXT4-fs error|XFS")
"""Most lines are none of these, and are let go after one look."""
MOST_KEPT = 256
"""Distinct events of one telling; what is beyond them is counted as lost."""
_LOST = ("overrun", "", 0)


class Line:
    """One kind of event of one device: its first line, how many there were, and when the last came."""

    __slots__ = ("at", "code", "count", "device", "kind", "raw")

    def __init__(self, kind: str, device: str, code: int, raw: str, at: float, count: int = 1) -> None:
        self.kind, self.device, self.code, self.raw, self.at, self.count = kind, device, code, raw, at, count

    def told(self) -> dict[str, Any]:
        """As readings.Event takes it."""
        return {
            "kind": self.kind, "device": self.device, "code": self.code, "raw": self.raw, "at": self.at,
            "count": self.count,
        }  # fmt: skip


def bus_id(text: str) -> str:
    """``0000:3b:00`` from any spelling of it: with a long domain, upper case, or its function."""
    parts = text.lower().split(":")
    return ":".join((parts[0][-4:].rjust(4, "0"), *(part.partition(".")[0] for part in parts[1:3])))


def parse(text: str, at: float) -> Line | None:
    """What a line says; None for almost all of them."""
    if found := _XID.search(text):
        return Line("xid", bus_id(found[1]), int(found[2]), text, at)
    for kind, pattern in _KINDS:
        if pattern.search(text):
            bus = _BUS.search(text) if kind in ("off_bus", "nvlink", "aer") else None
            return Line(kind, bus_id(bus[1]) if bus else "", 0, text, at)
    return None


def record(data: bytes, boot_time: float) -> tuple[str, float] | None:
    """Text and Unix time of one record of /dev/kmsg (``prio,seq,usec,flags;text``); None for what is none."""
    head, found, rest = data.partition(b";")
    fields = head.split(b",")
    if not found or len(fields) < 3 or not fields[2].isdigit():
        return None
    text = rest.partition(b"\n")[0].decode(errors="replace")
    return text, boot_time + int(fields[2]) / 1e6


class Folder:
    """Gathers lines until they are taken; equal ones become one."""

    def __init__(self, boot_time: float = 0.0, since: float = 0.0) -> None:
        self._boot_time, self._since = boot_time, since
        self._lines: dict[tuple[str, str, int], Line] = {}
        self._told: set[tuple[str, str, int]] = set()
        """What was told since everything was told last."""
        self._number: int | None = None
        """Of the newest record."""

    def read(self, records: list[bytes]) -> None:
        """Take in records of /dev/kmsg that follow each other, as far as they are newer than ``since``. Of a storm
        almost all are Xids: they are counted without a look at each."""
        if not records:
            return
        self._count_lost(records)
        if self._since:  # the log is read from the boot on, and is in order
            records = [data for data in records if (found := record(data, self._boot_time)) and found[1] > self._since]
            self._since = 0.0 if records else self._since
        joined = b"".join(records)
        for xid, count in Counter(_XIDS.findall(joined)).items():
            first = record(_line_at(joined, joined.find(xid)), self._boot_time)
            newest = record(_line_at(joined, joined.rfind(xid)), self._boot_time)
            if first and newest and (line := parse(*first)):
                line.count, line.at = count, newest[1]
                self.add(line)
        for data in records:
            if _XID_BEGINS not in data and _HINT.search(data):
                found = record(data, self._boot_time)
                if found and (line := parse(*found)):
                    self.add(line)

    def _count_lost(self, records: list[bytes]) -> None:
        """The kernel numbers its records, and overwrites the oldest when it writes faster than they are read."""
        before, newest = self._number, _number(records[-1])
        if newest is not None:
            self._number = newest
            found = record(records[-1], self._boot_time)
            if before is not None and found and (lost := newest - before - len(records)) > 0:
                self._lose(
                    f"the kernel's log was overwritten before it was read, after record {before}", found[1], lost
                )

    def _lose(self, why: str, at: float, count: int) -> None:
        line = self._lines.setdefault(_LOST, Line(*_LOST, why, at, 0))
        line.count, line.at = line.count + count, at

    def add(self, line: Line) -> None:
        """Count it in."""
        key = (line.kind, line.device, line.code)
        if known := self._lines.get(key):
            known.count, known.at = known.count + line.count, line.at
        elif len(self._lines) < MOST_KEPT:
            self._lines[key] = line
        else:
            self._lose(f"more than {MOST_KEPT} kinds of events at a time", line.at, line.count)

    def news(self) -> list[dict[str, Any]]:
        """Those of which none was told since the last ``take``; others wait for the next one."""
        fresh = [key for key in self._lines if key not in self._told]
        self._told.update(fresh)
        return [self._lines.pop(key).told() for key in fresh]

    def take(self) -> list[dict[str, Any]]:
        """All of them, and begin anew."""
        self._told = set(self._lines)
        taken = [line.told() for line in self._lines.values()]
        self._lines.clear()
        return taken


def _number(data: bytes) -> int | None:
    number = data.partition(b";")[0].split(b",")[1:2]
    return int(number[0]) if number and number[0].isdigit() else None


def _line_at(joined: bytes, at: int) -> bytes:
    """The line of these records that holds this byte."""
    return joined[joined.rfind(b"\n", 0, at) + 1 : joined.find(b"\n", at) + 1]
