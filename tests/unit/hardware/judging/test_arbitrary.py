"""Whatever stands in the kernel's log, and whatever the driver answers: nothing raises, and nothing is fatal but what
is written as the driver itself writes it."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from nodeagent.hardware.judging.judge import JudgeMemory, judge
from nodeagent.hardware.monitor import _gpu
from nodeagent.hardware.probes.kernellog import KernelLines, parse, record
from nodeagent.hardware.readings import DeviceEvent, GpuReading, Readings

GENUINE = re.compile(
    r"NVRM: Xid \(PCI:[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}[^)]*\): \d+"
    r"|NVRM: (The NVIDIA )?GPU (at )?(PCI:)?[0-9A-Fa-f]{4,8}:|NVRM: (has )?fallen off the bus|NVRM: RmInitAdapter"
    r"|NVRM: rm_init_adapter|nvidia-nvswitch\d+: SXid "
)
"""How a line begins that may be fatal."""
FATAL_WORDS = (
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=1", "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
    "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Fatal, Link 46",
    "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (",
)  # fmt: skip
NAMES = st.text(st.characters(codec="utf-8"), max_size=15) | st.sampled_from(FATAL_WORDS).map(lambda word: word[:15])
"""Of processes: the kernel keeps 15 bytes."""
FILES = st.text(max_size=60) | st.sampled_from(FATAL_WORDS)
FORMS = (
    "{name}[{pid}]: segfault at 0 ip 0000000000401136 sp 00007ffd12345678 error 4 in {file}[400000+1000]",
    "traps: {name}[{pid}] general protection fault ip:401136 sp:7ffd error:0 in {file}[400000+1000]",
    "{name}: page allocation failure: order:0, mode:0xcc0(GFP_KERNEL), nodemask=(null),cpuset={file}",
    "{name}: potentially unexpected fatal signal 11.",
    "{name} invoked oom-killer: gfp_mask=0xcc0, order=0",
    "Out of memory: Killed process {pid} ({name}) total-vm:1kB",
    "process '{file}' launched '{file}' with NULL argv: empty string added",
    'audit: type=1701 audit(1.1:2): auid=0 uid=0 comm="{name}" exe="{file}" sig=11',
    "{name}({pid}): Attempt to set a LOCK_MAND lock via flock(2).",
    "INFO: task {name}:{pid} blocked for more than 120 seconds.",
)
"""Lines into which a program without rights puts its names."""
NEAR = st.sampled_from(
    ("NVRM: ", "Xid (PCI:", "0000:3b:00", "): ", "79", ", ", "\\x0a", ";", "mce: [Hardware Error]: ")
)
RUBBISH = st.lists(st.text(max_size=20) | NEAR, max_size=12).map("".join)


def worst(kinds: list[dict[str, Any]]) -> set[str]:
    """Severities of what follows from these events."""
    events = tuple(DeviceEvent(**one) for one in kinds)
    memory = judge(JudgeMemory(), Readings(boot="b", events=events), None, 1_000.0, 0.0)
    return {verdict.severity for verdict in judge(memory, Readings(boot="b"), None, 1_002.0, 0.0).verdicts}


def reported(line: str, priority: int = 3) -> list[dict[str, Any]]:
    """As /dev/kmsg has it: what is not printable is escaped."""
    escaped = "".join(chr(b) if 32 <= b < 127 and b != ord("\\") else f"\\x{b:02x}" for b in line.encode())
    folder = KernelLines()
    folder.read([f"{priority},1,1000000,-;{escaped}\n SUBSYSTEM=pci\n".encode()])
    return folder.take()


@given(st.sampled_from(FORMS), NAMES, FILES, st.integers(1, 4_194_304))
def test_no_program_makes_a_fatal_line_by_its_names(form: str, name: str, file: str, pid: int) -> None:
    assert "fatal" not in worst(
        reported(form.format(name=name.encode()[:15].decode(errors="ignore"), file=file, pid=pid))
    )


@given(RUBBISH, st.integers(0, 255))
@example(FATAL_WORDS[0], 3)
def test_only_genuine_lines_of_the_kernel_are_fatal(line: str, priority: int) -> None:
    found = worst(reported(line, priority))
    if "fatal" in found:
        assert GENUINE.match(line)
        assert priority < 8
    parse(line, 0.0)


@given(st.lists(st.binary(max_size=200), max_size=20))
@example([b"3," + b"9" * 5000 + b"," + b"9" * 5000 + b",-;NVRM: Xid (PCI:0000:3b:00): " + b"9" * 5000 + b"\n"])
def test_no_record_raises(records: list[bytes]) -> None:
    folder = KernelLines(after=1)
    for data in records:
        record(data, 0.0)
    folder.read(records)
    folder.news()
    assert worst(folder.take()) <= {"info", "degraded", "app"} or any(b";NVRM: " in data for data in records)


_SMALL = st.none() | st.integers(-5, 2**40)
_ANY: dict[str, st.SearchStrategy[Any]] = {
    "error": st.sampled_from(["", "UNKNOWN", "NVML error 999: Unknown Error", "NVML error 4: No Permission"]),
    "recovery": st.sampled_from([None, "none"]), "slowdown": st.none() | st.just([]) | st.just(["hw_thermal"]),
    "processes": st.none() | st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 2**40)), max_size=3),
    "owners": st.just([]), "fabric": st.sampled_from([None, "completed"]),
    "remap_failed": st.sampled_from([None, False]), "sram_exceeded": st.sampled_from([None, False]),
    "remapped_uncorrectable": st.none() | st.integers(0, 511), "mig": st.none() | st.booleans(),
    "ecc": st.none() | st.booleans(), "remap_pending": st.none() | st.booleans(), "links_once": st.none(),
    "pcie_generation": st.none() | st.integers(-1, 99), "pcie_width": st.none() | st.integers(-1, 99),
}  # fmt: skip
_WORDS = {"uuid", "index", "pci", "name", "driver", "variable", "visible"}
READING = st.fixed_dictionaries(
    {"uuid": st.just("GPU-a"), "index": st.just(0)},
    optional={f.name: _ANY.get(f.name, _SMALL) for f in fields(GpuReading) if f.name not in _WORDS},
)
"""What a driver may answer that says of no GPU that it is broken: unknown states, absurd numbers, nothing."""


@given(READING, READING, st.floats(0.0, 1e6))
def test_no_reading_raises_and_none_is_fatal_but_by_the_drivers_own_word(
    before: dict[str, Any], now: dict[str, Any], elapsed: float
) -> None:
    first, second = _gpu(dict(before)), _gpu(dict(now))
    memory, past = JudgeMemory(), Readings(boot="b", gpus=(first,), expected=("GPU-a",))
    for n in range(3):
        seen = replace(past, gpus=(second if n else first,))
        memory = judge(memory, seen, past, 1_000.0 + n * elapsed, elapsed)
        past = seen
    assert "fatal" not in {verdict.severity for verdict in memory.verdicts}
