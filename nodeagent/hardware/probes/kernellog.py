"""Lines of the kernel's log that say that hardware is broken: which there are, and how many alike are folded into one.

Standard library only (and no dataclasses, nor typing: importing them costs the probe 1.5 and 0.7 MB), pure. The words
are those that NVIDIA's driver and the Linux kernel write.

Anybody can have the kernel write a text of their choice: a process that crashes, or runs out of memory, is logged with
its name, 15 characters that may begin the line, and with the name of its file, which may stand anywhere after that. So
a line counts only if the kernel itself wrote it (facility 0), and each pattern holds from the line's first character on
and for longer than 15 characters before anything in it may vary.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_AT = r"([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})(?:\.[0-7])?"
"""A bus id, without or with its function."""
_XID = re.compile(rf"NVRM: Xid \(PCI:{_AT}(?: GPU-I:\d{{1,4}})?(?: GPU-CI:\d{{1,4}})?\): (\d{{1,5}})(?!\d)")
"""The error of a MIG slice names the slice; it counts as its GPU's."""
_NVLINK_5 = range(144, 151)
_NONFATAL = re.compile(r", [\w/]{1,40} Nonfatal\b")
"""Of an Xid of NVLink 5 the driver says itself that nothing broke."""
_XID_BEGINS = b";NVRM: Xid ("
_XIDS = re.compile(rb"^[0-7],[^;\n]*;(NVRM: Xid \([^,\n]*(?=[,\n])(?:, [\w/]{1,40} Nonfatal\b)?)", re.MULTILINE)
"""Device and code of each Xid among many records that the kernel itself wrote, and whether it is called nonfatal."""
_KERNEL = re.compile(rb"[0-7],")
"""How a record of the kernel itself begins: its priority is a level alone, its facility 0. What is written to /dev/kmsg
from outside never has that."""
_OF_A_PROCESS = re.compile(r"[^\[]{0,16}\[\d+\]: ")
"""``name[pid]: segfault at ...``: from the line's beginning on it is somebody's choice."""
_UNCORRECTED = "(?:[2367abef][0-9a-f]|[0-9a-f][2367abef])[0-9a-f]{14}"
"""The status of a machine check with its bit 61 (uncorrected) or 57 (processor context corrupt). The same lines are
written for errors that were corrected."""
_APEI = r"(?:\{\d{1,10}\})?"
"""Before the lines of an error that the firmware handled first. Of them ``recoverable`` says too little: a network
card's errors are called so, and memory's have a line of EDAC, or a page that is given up."""
_EDAC = r" (?:on|memory|[Mm]ulti-bit|[Ss]ingle-bit|addr/cmd|generic undef) "
"""What is said of a memory controller's error first."""
_DISK = r"(?!(?:fd|sr|loop|nbd)\d)"
"""Not a floppy or an empty drive that something asked for a disk, nor a device behind which there is a file or a
server."""
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("off_bus", re.compile(rf"NVRM: (?:The NVIDIA )?GPU (?:at )?(?:PCI:)?{_AT}.{{0,200}}fallen off the bus")),
    ("off_bus", re.compile(r"NVRM: (?:has )?fallen off the bus and is not responding")),
    ("init_failed", re.compile(rf"NVRM: (?:GPU {_AT}: )?(?:RmInitAdapter failed! |rm_init_adapter failed)")),
    ("api_mismatch", re.compile(r"NVRM: API mismatch: ")),
    ("sxid_fatal", re.compile(rf"nvidia-nvswitch\d{{1,3}}: SXid \(PCI:{_AT}\): (\d{{1,6}}), Fatal\b")),
    ("sxid", re.compile(rf"nvidia-nvswitch\d{{1,3}}: SXid \(PCI:{_AT}\): (\d{{1,6}})(?!\d)")),
    (
        "nvlink",
        re.compile(rf"nvidia-nvlink: (?=[0-9A-Za-z])(?:.{{0,80}}?{_AT})?.{{0,200}}\b(?:error|fail)", re.IGNORECASE),
    ),
    (
        "aer",
        re.compile(
            rf"\S{{1,32}} {_AT}: (?:AER: )?(?:(?:Multiple )?(?:Uncorrect|Fatal)|PCIe Bus Error: severity=Uncorrect)"
        ),
    ),
    (
        "mce",
        re.compile(
            rf"(?:mce: |{_APEI})\[Hardware Error\]: (?:event severity: fatal"
            r"|.{0,200}?(?:\bUncorrect(?!ed: false)|\bFatal\b|\bPCC\b|Processor context corrupt)"
            rf"|CPU \d{{1,5}}: Machine Check(?: Exception|: [0-9a-f]{{1,16}} Bank \d{{1,4}}: {_UNCORRECTED}))"
            r"|mce: Uncorrected hardware memory error|Memory failure: 0x[0-9a-f]{1,16}: recovery action for "
            rf"|EDAC MC\d{{1,3}}: \d{{1,10}} UE{_EDAC}"
        ),
    ),
    (
        "mce_corrected",
        re.compile(
            r"mce: \[Hardware Error\]: |(?:mce: )?Machine check events logged"
            rf"|EDAC MC\d{{1,3}}: \d{{1,10}} CE{_EDAC}"
        ),
    ),
    ("oom", re.compile(r"(?:Memory cgroup o|O)ut of memory: Killed process \d")),
    ("hung_task", re.compile(r"INFO: task .{1,32}:\d+ blocked for more than \d+ seconds")),
    ("lockup", re.compile(r"watchdog: BUG: soft lockup - CPU#\d|BUG: soft lockup - CPU#\d")),
    ("lockup", re.compile(r"(?:NMI )?watchdog: Watchdog detected hard LOCKUP")),
    ("lockup", re.compile(r"rcu: INFO: \w{1,32} (?:self-)?detected (?:expedited )?stall")),
    (
        "io_error",
        re.compile(
            rf"(?:blk_update_request: |print_req_error: )?(?:critical \w+|I/O) error, dev {_DISK}\S{{1,32}}, sector \d"
            rf"|EXT4-fs error \(device {_DISK}\S{{1,32}}\): "
            rf"|XFS \({_DISK}[^)\s]{{1,32}}\): (?:metadata |log )?I/O [Ee]rror"
            rf"|Buffer I/O error on dev(?:ice)? {_DISK}\S{{1,32}}, logical block"
        ),
    ),
)
_HINT = re.compile(
    rb";(?:NVRM|nvidia-nv|\S+ [0-9a-fA-F:]+\.\d: (?:AER|PCIe)|mce:|(?:\{\d{1,10}\})?\[Hard|EDAC MC|Machine check|Out of"
    rb"|Memory (?:cg|failure: 0x)|INFO: task"
    rb"|NMI watch|watchdog|BUG: soft|rcu: INFO|I/O |blk_|print_req|critical |Buffer I/O|EXT4-fs error|XFS)"
)
"""Most lines are none of these, and are let go after one look."""
MOST_KEPT = 256
"""Distinct events of one message; what is beyond them is counted as lost."""
_LOST = ("overrun", "", 0)
_LONGEST = 18
"""Digits of a number in a record's head."""


class KernelLine:
    """One kind of event of one device: its first line, how many there were, and when the last came."""

    __slots__ = ("at", "code", "count", "device", "kind", "raw")

    def __init__(self, kind: str, device: str, code: int, raw: str, at: float, count: int = 1) -> None:
        self.kind, self.device, self.code, self.raw, self.at, self.count = kind, device, code, raw, at, count

    def fields(self) -> dict[str, Any]:
        """As readings.DeviceEvent takes it."""
        return {
            "kind": self.kind, "device": self.device, "code": self.code, "raw": self.raw, "at": self.at,
            "count": self.count,
        }  # fmt: skip


def bus_id(text: str) -> str:
    """``0000:3b:00`` from any spelling of it: with a long domain, upper case, or its function."""
    parts = text.lower().split(":")
    return ":".join((parts[0][-4:].rjust(4, "0"), *(part.partition(".")[0] for part in parts[1:3])))


def parse(text: str, at: float) -> KernelLine | None:
    """What a line of the kernel itself says; None for almost all of them."""
    if found := _XID.match(text):
        nonfatal = int(found[2]) in _NVLINK_5 and _NONFATAL.match(text, found.end())
        return KernelLine("nvlink_nonfatal" if nonfatal else "xid", bus_id(found[1]), int(found[2]), text, at)
    if _OF_A_PROCESS.match(text):
        return None
    for kind, pattern in _KINDS:
        if found := pattern.match(text):
            bus, code = (*found.groups(), None, None)[:2]
            return KernelLine(kind, bus_id(bus) if bus else "", int(code or 0), text, at)
    return None


def record(data: bytes, boot_time: float) -> tuple[str, float] | None:
    """Text and Unix time of one record of /dev/kmsg (``prio,seq,usec,flags;text``); None for what is none."""
    head, found, rest = data.partition(b";")
    fields = head.split(b",")
    if not found or len(fields) < 3 or not fields[2].isdigit() or len(fields[2]) > _LONGEST:
        return None
    text = rest.partition(b"\n")[0].decode(errors="replace")
    return text, boot_time + int(fields[2]) / 1e6


class KernelLines:
    """Gathers lines until they are taken; equal ones become one."""

    def __init__(self, boot_time: float = 0.0, after: int | None = -1) -> None:
        """``after``: the number of the newest record that was reported before; None: all that waits is left out."""
        self._boot_time, self._after = boot_time, after
        self._arrived: float | None = None
        self._lines: dict[tuple[str, str, int], KernelLine] = {}
        self._sent: set[tuple[str, str, int]] = set()
        """Sent since everything was sent last."""
        self.number: int | None = None
        """Of the newest record."""

    def read(self, records: list[bytes], arrived: float | None = None) -> None:
        """Take in records of /dev/kmsg that follow each other, as far as they are new. Of a storm almost all are Xids:
        they are counted without a look at each. ``arrived``: the Unix time of those that are read as they are written;
        None: they waited, and have only the kernel's own clock, which runs apart from the machine's by minutes."""
        if not records:
            return
        self._arrived = arrived
        self._count_lost(records)
        if arrived is None:  # the log is read from the boot on, and is in order
            after = self._after
            records = [data for data in records if after is not None and (_number(data) or 0) > after]
        self._count_xids(records)
        for data in records:
            if _XID_BEGINS not in data and _KERNEL.match(data) and _HINT.search(data):
                found = self._record(data)
                if found and (line := parse(*found)):
                    self.add(line)

    def _record(self, data: bytes) -> tuple[str, float] | None:
        found = record(data, self._boot_time)
        return found if found is None or self._arrived is None else (found[0], self._arrived)

    def _count_xids(self, records: Sequence[bytes]) -> None:
        joined = b"".join(records)
        spans: dict[bytes, list[int]] = {}
        for found in _XIDS.finditer(joined):
            begins = found.start()
            span = spans.setdefault(found[1], [begins, begins, 0])
            span[1] = begins
            span[2] += 1
        for first, newest, count in spans.values():
            first_one, last = (self._record(_line_at(joined, begins)) for begins in (first, newest))
            if first_one and last and (line := parse(*first_one)):
                line.count, line.at = count, last[1]
                self.add(line)

    def _count_lost(self, records: list[bytes]) -> None:
        """The kernel numbers its records, and overwrites the oldest when it writes faster than they are read."""
        before, newest = self.number, _number(records[-1])
        if newest is not None:
            self.number = newest
            found = self._record(records[-1])
            if before is not None and found and (lost := newest - before - len(records)) > 0:
                self._lose(
                    f"the kernel's log was overwritten before it was read, after record {before}", found[1], lost
                )

    def _lose(self, why: str, at: float, count: int) -> None:
        line = self._lines.setdefault(_LOST, KernelLine(*_LOST, why, at, 0))
        line.count, line.at = line.count + count, at

    def add(self, line: KernelLine) -> None:
        """Count it in."""
        key = (line.kind, line.device, line.code)
        if known := self._lines.get(key):
            known.count, known.at = known.count + line.count, line.at
        elif len(self._lines) < MOST_KEPT:
            self._lines[key] = line
        else:
            self._lose(f"more than {MOST_KEPT} kinds of events at a time", line.at, line.count)

    def news(self) -> list[dict[str, Any]]:
        """Those of which none was sent since the last ``take``; others wait for the next one."""
        fresh = [key for key in self._lines if key not in self._sent]
        self._sent.update(fresh)
        return [self._lines.pop(key).fields() for key in fresh]

    def take(self) -> list[dict[str, Any]]:
        """All of them, and begin anew."""
        self._sent = set(self._lines)
        taken = [line.fields() for line in self._lines.values()]
        self._lines.clear()
        return taken


def _number(data: bytes) -> int | None:
    number = data.partition(b";")[0].split(b",")[1:2]
    return int(number[0]) if number and number[0].isdigit() and len(number[0]) <= _LONGEST else None


def _line_at(joined: bytes, at: int) -> bytes:
    """The line of these records that begins with this byte."""
    end = joined.find(b"\n", at)
    return joined[at : end if end >= 0 else len(joined)]
