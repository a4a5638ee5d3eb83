"""Lines as the driver and the kernel write them, and near misses that mean nothing."""

from __future__ import annotations

import pytest

from nodeagent.hardware.probes.host import GATHER, SHARE, pause
from nodeagent.hardware.probes.kernellog import MOST_KEPT, KernelLine, KernelLines, bus_id, parse, record

LINES = [
    ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", "xid", "0000:3b:00", 79),
    ("NVRM: Xid (PCI:0000:1A:00.0): 31, pid=4711, name=python, Ch 00000008", "xid", "0000:1a:00", 31),
    ("NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.", "off_bus", "0000:3b:00", 0),
    ("NVRM: The NVIDIA GPU 0000:3b:00.0 (PCI ID: 10de:2330) has fallen off the bus", "off_bus", "0000:3b:00", 0),
    ("nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 44 egress", "sxid", "0000:05:00", 12028),
    ("nvidia-nvswitch0: SXid (PCI:0000:06:00.0): 24007, Data {0x00000000}", "sxid", "0000:06:00", 24007),
    ("pcieport 0000:00:1c.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0", "aer", "", 0),
    ("nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal)", "aer", "0000:3b:00", 0),
    ("mce: [Hardware Error]: Machine check events logged", "mce_corrected", "", 0),
    ("mce: [Hardware Error]: CPU 12: Machine Check: 0 Bank 7: 8c00004000010090", "mce_corrected", "", 0),
    ("mce: [Hardware Error]: TSC 0 ADDR 3b116c400 MISC 86", "mce_corrected", "", 0),
    ("mce: [Hardware Error]: CPU 12: Machine Check: 0 Bank 7: be00000000800400", "mce", "", 0),
    ("mce: [Hardware Error]: CPU 12: Machine Check: 0 Bank 7: 9a00000000800400", "mce", "", 0),
    ("mce: [Hardware Error]: CPU 12: Machine Check Exception: 5 Bank 3: 8c00004000010090", "mce", "", 0),
    ("mce: Uncorrected hardware memory error in user-access at 3b116c400", "mce", "", 0),
    ("[Hardware Error]: Uncorrected, software restartable error.", "mce", "", 0),
    ("[Hardware Error]: System Fatal error.", "mce", "", 0),
    ("[Hardware Error]: CPU:1 (19:1:1) MC18_STATUS[Over|UE|MiscV|AddrV|PCC|-|SyndV|UECC]: 0x9", "mce", "", 0),
    ("{1}[Hardware Error]: event severity: fatal", "mce", "", 0),
    ("{4711}[Hardware Error]:    Uncorrected: true", "mce", "", 0),
    ("[Hardware Error]: event severity: fatal", "mce", "", 0),  # of the boot before, as the firmware kept it
    ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0)", "mce", "", 0),
    ("EDAC MC12: 1 UE multi-bit ECC on unknown memory (node:1 card:0 module:0)", "mce", "", 0),
    ("EDAC MC0: 3 UE on mc#0csrow#1channel#0 (csrow:1 channel:0 page:0x1)", "mce", "", 0),
    ("EDAC MC0: 2 CE memory scrubbing error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0", "mce_corrected", "", 0),
    ("Memory failure: 0x3b116c: recovery action for dirty LRU page: Recovered", "mce", "", 0),
    ("critical medium error, dev nvme0n1, sector 12 op 0x0:(READ)", "io_error", "", 0),
    ("Buffer I/O error on dev sda1, logical block 0, async page read", "io_error", "", 0),
    ("Out of memory: Killed process 4711 (python) total-vm:1kB", "oom", "", 0),
    ("Memory cgroup out of memory: Killed process 4711 (python)", "oom", "", 0),
    ("INFO: task python:4711 blocked for more than 120 seconds.", "hung_task", "", 0),
    ("blk_update_request: I/O error, dev nvme0n1, sector 42 op 0x0:(READ)", "io_error", "", 0),
    ("EXT4-fs error (device sda1): ext4_find_entry:1455", "io_error", "", 0),
    ("XFS (nvme1n1): metadata I/O error in \"xfs_trans\"", "io_error", "", 0),
    ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9).", "xid", "0000:01:00", 94),
    ("NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:00): 31, pid=7", "xid", "0000:01:00", 31),
    ("NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0xffff:2477)", "init_failed", "0000:3b:00", 0),
    ("NVRM: GPU 0000:3b:00.0: rm_init_adapter failed, device minor number 0", "init_failed", "0000:3b:00", 0),
    ("NVRM: RmInitAdapter failed! (0x30:0xffff:660)", "init_failed", "", 0),
    (r"NVRM: API mismatch: the client has the version 550.54.15, but\x0aNVRM: this kernel", "api_mismatch", "", 0),
    ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Fatal, Link 46 MC TS", "sxid_fatal", "0000:c1:00", 28006),
    ("nvidia-nvlink: 0000:3b:00.0: link training failed", "nvlink", "0000:3b:00", 0),
    ("NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x4)", "nvlink_nonfatal", "0018:01:00", 145),
    ("NVRM: Xid (PCI:0000:04:00): 146, TLW_RX/TLW_RX_PIPE0 Nonfatal XC0 i0", "nvlink_nonfatal", "0000:04:00", 146),
    ("NVRM: Xid (PCI:0019:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link -1 (0x0)", "xid", "0019:01:00", 149),
    ("NVRM: Xid (PCI:0019:01:00): 79, Nonfatal", "xid", "0019:01:00", 79),
    ("NVRM: Xid (PCI:0019:01:00): 154, GPU recovery action changed from 0x0 )None(", "xid", "0019:01:00", 154),
    (
        r"NVRM: The NVIDIA GPU 0000:b3:00.0\x0aNVRM: (PCI ID: 10de:26b5) installed in this system has\x0a"
        r"NVRM: fallen off the bus and is not responding to commands.",
        "off_bus", "0000:b3:00", 0,
    ),
    ("NVRM: fallen off the bus and is not responding to commands.", "off_bus", "", 0),
    ("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:4711]", "lockup", "", 0),
    ("NMI watchdog: Watchdog detected hard LOCKUP on cpu 3", "lockup", "", 0),
    ("rcu: INFO: rcu_sched self-detected stall on CPU", "lockup", "", 0),
]  # fmt: skip
HARMLESS = [
    "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.90.07",
    "NVRM: Xid without a code",
    "nvidia-nvlink: Nvlink Core is being initialized, major device number 240",
    "pcieport 0000:00:1c.0: AER: Corrected error received: 0000:3b:00.0",
    "XFS (nvme1n1): Mounting V5 Filesystem",
    "EXT4-fs (sda1): mounted filesystem",
    "python[4711]: segfault at 0 ip 0000",
    "user text: Xid 79",
    "[Hardware Error]: Corrected error, no action required.",
    "{1}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 1",
    "{2}[Hardware Error]: event severity: corrected",
    "{3}[Hardware Error]: event severity: recoverable",  # a network card's, for one: it has lines of its own
    "{3}[Hardware Error]:   section_type: PCIe error",
    "{4}[Hardware Error]:    Uncorrected: false",
    "[Hardware Error]:    Uncorrected: false",
    "EDAC MC0: Giving out device to module skx_edac controller Skylake Socket#0 IMC#0: DEV 0000:64:0a.0",
    "EDAC MC0: 1 UE invoked oom-killer: gfp_mask=0xcc0",
    "Memory failure: 0x3b116c: already hardware poisoned",
    "Memory failure invoked oom-killer: gfp_mask=0xcc0",
    "I/O error, dev fd0, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 0",
    "blk_update_request: I/O error, dev sr0, sector 0 op 0x0:(READ)",
    "print_req_error: I/O error, dev loop12, sector 0",
    "Buffer I/O error on dev nbd3, logical block 0, async page read",
    "EXT4-fs error (device loop0): ext4_find_entry:1455",
    "XFS (nbd0): log I/O error -5",
]


XID_79 = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1"
CRASH = "{}[4711]: segfault at 0 ip 0000000000401136 sp 00007ffd12345678 error 4 in {}[400000+1000]"
FORGED = [
    *(CRASH.format(text[:15], text) for text, *_ in LINES),
    *(f"traps: {text[:15]}[7] general protection fault ip:401136 sp:7ffd error:0 in {text}" for text, *_ in LINES),
    *(f"{text[:15]}: page allocation failure: order:0, mode:0xcc0, {text}" for text, *_ in LINES),
    CRASH.format("nvidia-nvlink: ", "nvidia-nvlink: error failed"),
    CRASH.format("XFS (a): I/O er", "XFS (a): I/O Error"),
    CRASH.format(r"x\x0aNVRM: Xid (", rf"\x0a{XID_79}\x0a"),
    f"process '{XID_79}' launched '{XID_79}' with NULL argv: empty string added",
    f"audit: type=1701 audit(1:2): auid=0 comm={XID_79}",
    f"oom-kill:constraint=CONSTRAINT_NONE,task={XID_79},pid=4711",
    "NVRM: Xid (PCI:0000:3b:00): 99999999999999999999",
    f"NVRM: Xid (PCI:0000:3b:00): {'9' * 5000}",
]
"""What a program without rights makes the kernel write by its own name (15 characters), its file's name, its crash."""


@pytest.mark.parametrize("text", FORGED)
def test_a_program_cannot_forge_a_fault_by_its_name(text: str) -> None:
    assert parse(text, 0) is None
    folder = KernelLines()
    folder.read([f"6,1,1000000,-;{text}\n".encode()])
    assert folder.take() == []


@pytest.mark.parametrize("priority", [8, 11, 30, 191])
def test_what_the_kernel_did_not_write_itself_is_not_believed(priority: int) -> None:
    """/dev/kmsg can be written to; the kernel keeps its own facility, 0, for itself."""
    folder = KernelLines()
    folder.read([f"{priority},{n},{n}000000,-;{text}\n".encode() for n, (text, *_) in enumerate(LINES)])
    assert folder.take() == []
    folder.read([f"3,{n},{n}000000,-;{text}\n".encode() for n, (text, *_) in enumerate(LINES, 1000)])
    assert {e["kind"] for e in folder.take()} >= {kind for _, kind, *_ in LINES}


def test_a_forged_line_hides_no_genuine_one() -> None:
    folder = KernelLines()
    forged = f"6,1,1000000,-;x[7]: segfault at 0 in ;{XID_79}, GPU\n".encode()
    folder.read([forged, f"3,2,2000000,-;{XID_79}, GPU\n".encode(), forged])
    assert [(e["code"], e["count"], e["at"], e["raw"]) for e in folder.take()] == [(79, 1, 2.0, f"{XID_79}, GPU")]


@pytest.mark.parametrize(("text", "kind", "device", "code"), LINES)
def test_lines_that_mean_something(text: str, kind: str, device: str, code: int) -> None:
    found = parse(text, 5.0)
    assert found is not None
    assert (found.kind, found.code, found.raw, found.at) == (kind, code, text, 5.0)
    if kind != "aer":  # the port that reports is not the device that failed
        assert found.device == device


@pytest.mark.parametrize("text", HARMLESS)
def test_lines_that_mean_nothing(text: str) -> None:
    assert parse(text, 0) is None


@pytest.mark.parametrize("text", ["0000:3B:00", "00000000:3b:00.0", "0000:3b:00.0", "0:3b:00"])
def test_one_bus_id_for_every_spelling(text: str) -> None:
    assert bus_id(text) == "0000:3b:00"


def test_a_record_of_kmsg() -> None:
    assert record(b"3,1234,5000000,-;NVRM: Xid\n SUBSYSTEM=pci\n", 100.0) == ("NVRM: Xid", 105.0)
    assert record(b"nonsense", 0) is None
    assert record(b"3,1;text", 0) is None


def test_equal_lines_are_one_with_a_count() -> None:
    folder = KernelLines()
    for at in range(1000):
        folder.add(KernelLine("xid", "0000:3b:00", 45, f"line {at}", at))
        folder.add(KernelLine("xid", "0000:3b:00", 13, f"line {at}", at))
    assert [(e["code"], e["count"], e["raw"], e["at"]) for e in folder.take()] == [
        (45, 1000, "line 0", 999), (13, 1000, "line 0", 999)
    ]  # fmt: skip
    assert folder.take() == []


def test_what_is_beyond_all_bounds_is_counted() -> None:
    folder = KernelLines()
    for code in range(MOST_KEPT + 7):
        folder.add(KernelLine("xid", "", code, "", 0))
    *kept, lost = folder.take()
    assert (len(kept), lost["kind"], lost["count"]) == (MOST_KEPT, "overrun", 7)


def xid_record(number: int, code: int = 45, bus: str = "0000:3b:00", channel: int = 0) -> bytes:
    return b"3,%d,%d,-;NVRM: Xid (PCI:%s): %d, pid=7, Ch %08x\n SUBSYSTEM=pci\n" % (
        number, number * 1_000_000, bus.encode(), code, channel
    )  # fmt: skip


def test_records_of_a_storm_are_counted_without_being_understood_anew() -> None:
    """Each kind once, with the first line, all of them counted, and the time of the newest."""
    folder = KernelLines(boot_time=1000.0)
    storm = [xid_record(number, 45 if number % 3 else 13, channel=number) for number in range(1, 301)]
    folder.read([*storm, b"6,301,301000000,-;eth0: link is up\n", xid_record(302, 45, "0000:5e:00")])
    found = {(e["code"], e["device"]): (e["count"], e["at"], e["raw"][-11:]) for e in folder.take()}
    assert found == {
        (45, "0000:3b:00"): (200, 1299.0, "Ch 00000001"),
        (13, "0000:3b:00"): (100, 1300.0, "Ch 00000003"),
        (45, "0000:5e:00"): (1, 1302.0, "Ch 00000000"),
    }
    folder.read([xid_record(303)])
    assert [(e["count"], e["raw"].startswith("NVRM: Xid")) for e in folder.take()] == [(1, True)]


def test_other_events_are_found_within_a_storm() -> None:
    folder = KernelLines()
    lost = b"2,3,3000000,-;NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.\n"
    folder.read([xid_record(1), xid_record(2), lost, xid_record(4, 79), xid_record(5)])
    assert [(e["kind"], e["code"], e["count"]) for e in folder.news()] == [
        ("xid", 45, 3), ("xid", 79, 1), ("off_bus", 0, 1)
    ]  # fmt: skip


def test_what_is_new_is_reported_at_once_and_its_repetitions_later() -> None:
    folder = KernelLines()

    def reported(number: int, *codes: int) -> list[tuple[int, int]]:
        folder.read([xid_record(number + i, code) for i, code in enumerate(codes)])
        return [(e["code"], e["count"]) for e in folder.news()]

    assert reported(1, 45, 45) == [(45, 2)]
    assert reported(3, 45, 79, 45) == [(79, 1)]
    assert reported(6, 45, 79) == []
    assert [(e["code"], e["count"]) for e in folder.take()] == [(45, 3), (79, 1)]
    assert reported(8, 45) == [], "it was told a moment ago"
    assert [e["code"] for e in folder.take()] == [45]
    assert folder.take() == []
    assert reported(9, 45) == [(45, 1)], "it had stopped in between"


def test_records_reported_before_are_left_out_and_code_4_is_not_code_45() -> None:
    folder = KernelLines(after=10)
    folder.read([xid_record(10)])
    assert folder.take() == []
    folder.read([xid_record(9), xid_record(11, 45), xid_record(12, 4)])
    assert [e["code"] for e in folder.take()] == [45, 4]


def test_what_is_new_is_known_by_its_number_and_dated_by_its_arrival() -> None:
    """The kernel's clock runs apart from the machine's: for a minute after an agent's start nothing was seen."""
    folder = KernelLines(boot_time=1_000.0, after=10)
    folder.read([xid_record(10), xid_record(11, 13)])
    folder.read([xid_record(12)], arrived=5_000.0)
    lost = b"2,14,14000000,-;NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.\n"
    folder.read([lost], arrived=6_000.0)
    assert [(e["kind"], e["code"], e["at"]) for e in folder.take()] == [
        ("xid", 13, 1_011.0), ("xid", 45, 5_000.0), ("overrun", 0, 6_000.0), ("off_bus", 0, 6_000.0)
    ]  # fmt: skip
    assert folder.number == 14


def test_without_a_number_only_what_arrives_from_now_on_counts() -> None:
    folder = KernelLines(after=None)
    folder.read([xid_record(1, 79)])
    assert (folder.take(), folder.number) == ([], 1)
    folder.read([xid_record(2)], arrived=9.0)
    assert [e["code"] for e in folder.take()] == [45]


def test_records_that_were_overwritten_are_reported_as_lost() -> None:
    folder = KernelLines()
    folder.read([b"6,100,1000000,-;what was before it is long gone\n"])
    folder.read([b"6,101,1000000,-;a\n", b"6,105,2000000,-;b\n"])
    folder.read([b"6,106,2000000,-;c\n"])
    folder.read([xid_record(110)])
    assert [(e["kind"], e["count"], e["at"]) for e in folder.take()] == [("overrun", 6, 110.0), ("xid", 1, 110.0)]
    folder.read([b"nonsense", b"6,111,111000000,-;d\n"])
    assert folder.take() == []


@pytest.mark.parametrize(("spent", "seconds"), [(0.0, GATHER), (SHARE * GATHER / 2, GATHER), (SHARE * 0.7, 0.7)])
def test_looking_into_the_log_takes_its_share_of_a_core_and_no_more(spent: float, seconds: float) -> None:
    assert pause(spent) == pytest.approx(seconds)


def test_every_line_of_one_batch_is_found_whatever_stands_beside_it() -> None:
    """One matcher must not take another's place: of the lines of a batch each counts for what it is alone."""
    texts = [text for text, *_ in LINES]
    lines = KernelLines()
    lines.read([f"2,{number},{number}000000,-;{text}\n".encode() for number, text in enumerate(texts, 1)])
    found = {(one["kind"], one["device"], one["code"]) for one in lines.take()}
    alone = [parse(text, 0.0) for text in texts]
    assert found == {(one.kind, one.device, one.code) for one in alone if one is not None}


def test_a_fatal_nvlink_error_does_not_hide_behind_one_that_is_not() -> None:
    lines = KernelLines()
    texts = ["145, RLW/RXPIPE Nonfatal XC0", "145, RLW_CTRL Fatal XC0", "145, RLW/RXPIPE Nonfatal XC0"]
    lines.read([f"2,{at},{at},-;NVRM: Xid (PCI:0000:3b:00): {text}\n".encode() for at, text in enumerate(texts, 1)])
    assert sorted((one["kind"], one["code"], one["count"]) for one in lines.take()) == [
        ("nvlink_nonfatal", 145, 2),
        ("xid", 145, 1),
    ]
