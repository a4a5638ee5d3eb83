"""Lines of the kernel's log that tell of broken hardware: which there are, and how many alike are folded into one.

Standard library only (and no dataclasses, nor typing: importing them costs the probe 1.5 and 0.7 MB), pure. The words
are those that NVIDIA's driver and the Linux kernel write.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f:]+)(?:\.\d)?\): (\d+)")
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
_HINT = re.compile(r"NVRM|nvidia-nv|AER|PCIe Bus|mce:|Machine check|ut of memory|INFO: task|I/O |EXT4-fs error|XFS")
"""Most lines are none of these, and are let go after one look."""
MOST_KEPT = 256
"""Distinct events of one moment; what is beyond them is counted, not kept."""


class Line:
    """One kind of event of one device: its first line, how many there were, and when the last came."""

    __slots__ = ("at", "code", "count", "device", "kind", "raw")

    def __init__(self, kind: str, device: str, code: int, raw: str, at: float) -> None:
        self.kind, self.device, self.code, self.raw, self.at = kind, device, code, raw, at
        self.count = 1

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
    if not _HINT.search(text):
        return None
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

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str, int], Line] = {}
        self.beyond = 0
        """Lines of which not even the kind was kept."""

    def add(self, line: Line) -> None:
        """Count it in."""
        key = (line.kind, line.device, line.code)
        if known := self._lines.get(key):
            known.count += 1
            known.at = line.at
        elif len(self._lines) < MOST_KEPT:
            self._lines[key] = line
        else:
            self.beyond += 1

    def take(self) -> list[dict[str, Any]]:
        """All of them, and begin anew."""
        taken = [line.told() for line in self._lines.values()]
        self._lines.clear()
        return taken
