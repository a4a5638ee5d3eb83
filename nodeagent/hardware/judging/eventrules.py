"""The rules on events: what a burst of Xids and kernel lines means, judged as a set and not line by line. Pure.

One fault writes many lines, and some lines (45) only report that a process died. So events of one device are kept for a
day, and each is judged with its burst: what came within three minutes of it (NVIDIA's fleet tools group Xids by three
minutes of silence). A fatal one does not wait for the burst to end.

The table of Xids (error reports of NVIDIA's driver in the kernel's log) says what each means, how bad it is and what
repairs it. Severity and action follow the columns "Immediate Action" and "Investigatory Action" of NVIDIA's Xid catalog
(docs.nvidia.com/deploy/xid-errors): RESTART_APP is the application's, RESET_GPU is fatal until reset, RESTART_BM until
a reboot, IGNORE is only shown. Where we depart from it the row says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from nodeagent.hardware.judging.rules import Rule
from nodeagent.hardware.readings import DeviceEvent, Heals
from nodeagent.model.health import Action, Severity

BURST = 180.0
"""Seconds around an event that belong to the same burst."""
DAY = 86_400.0
SETTLE = 1.0
"""Seconds that some wait, once they were reported, for what explains them: a double-bit error for the Xid that says
whether it was contained or remapped, an error of NVLink 5 for the line that calls it nonfatal."""
REPEATS = 3
"""Contained memory or NVLink errors of one GPU in a day that are no accident any more."""
APP_REPEATS = 2
"""Bursts of application errors on one GPU in a day, the others clean, that make us look at the GPU."""
MOST_KEPT = 512
"""Events remembered; the oldest go first."""

CATALOG = "NVIDIA Xid catalog"


@dataclass(frozen=True, slots=True)
class Xid:
    """One row. ``source`` is where severity and action come from."""

    code: int
    severity: Severity
    action: Action
    text: str
    source: str


def _row(code: int, severity: Severity, action: Action, text: str, immediate: str, why: str = "") -> Xid:
    return Xid(code, severity, action, text, f"{CATALOG}: {immediate}" + (f"; {why}" if why else ""))


_ROWS = (
    _row(13, "app", "restart_app", "graphics engine exception", "RESTART_APP, WORKFLOW_XID_13"),
    _row(31, "app", "restart_app", "GPU memory page fault", "RESTART_APP, WORKFLOW_XID_31"),
    _row(32, "app", "restart_app", "invalid or corrupted push buffer", "RESTART_APP, CHECK_APP"),
    _row(38, "info", "none", "driver firmware error", "IGNORE"),
    _row(43, "app", "restart_app", "GPU stopped processing a context", "IGNORE", "its process has to start again"),
    _row(45, "info", "none", "preemptive cleanup after another error", "follow the other Xid",
         "alone it only reports that a process died: flagging it took 77 healthy nodes out (NVSentinel #1629)"),
    _row(46, "fatal", "reset_gpu", "GPU stopped processing", "RESET_GPU"),
    _row(48, "fatal", "reset_gpu", "double-bit ECC error", "WORKFLOW_XID_48",
         "with 63 or 94 in its burst the memory was remapped or the error contained: see xid.48 in rules"),
    _row(62, "fatal", "reset_gpu", "internal micro-controller halt", "RESET_GPU"),
    _row(63, "degraded", "reset_gpu", "row remapping or page retirement recorded", "IGNORE",
         "takes effect at the next reset; until then work may go on (NVIDIA GPU memory error management)"),
    _row(64, "fatal", "service", "row remapping or page retirement failed", "RESET_GPU, CONTACT_SUPPORT",
         "a failed remap is an RMA condition (NVIDIA GPU memory error management, RMA policy)"),
    _row(68, "app", "restart_app", "video decoder exception", "RESTART_APP"),
    _row(69, "app", "restart_app", "graphics engine class error", "RESTART_APP, CHECK_APP"),
    _row(74, "degraded", "reset_gpu", "NVLink error", "WORKFLOW_NVLINK_ERR", "fatal when a link is down or it repeats"),
    _row(79, "fatal", "reboot", "GPU has fallen off the bus", "RESTART_BM"),
    _row(80, "app", "restart_app", "corrupted data sent to the GPU", "RESTART_APP"),
    _row(92, "info", "none", "high rate of corrected ECC errors", "IGNORE, CONTACT_SUPPORT"),
    _row(94, "app", "restart_app", "contained ECC error", "RESTART_APP"),
    _row(95, "fatal", "reset_gpu", "uncontained ECC error", "RESET_GPU"),
    _row(109, "fatal", "reset_gpu", "context switch timeout", "RESET_GPU"),
    _row(110, "fatal", "reset_gpu", "security fault", "RESET_GPU"),
    _row(119, "fatal", "reset_gpu", "GSP did not answer", "RESET_GPU"),
    _row(120, "fatal", "reset_gpu", "GSP error", "RESET_GPU"),
    _row(121, "info", "none", "corrected error on the C2C link", "IGNORE"),
    _row(136, "fatal", "reset_gpu", "NVLink training failed", "RESET_GPU"),
    _row(140, "fatal", "reset_gpu", "unrecovered ECC error", "RESET_GPU"),
    _row(143, "fatal", "reset_gpu", "GPU initialisation error", "RESET_GPU"),
    *(_row(code, "degraded", "reset_gpu", "NVLink 5 error", "per-row table of its two status words",
           "fatal when a link is down or it repeats") for code in range(144, 151)),
    _row(154, "info", "none", "the recovery action of the GPU changed", "follow the action",
         "the action itself is read: rule nvml.recovery"),
    _row(155, "fatal", "reset_gpu", "NVLink software-defined error", "RESET_GPU"),
    _row(156, "fatal", "reset_gpu", "resource retirement event", "RESET_GPU"),
    _row(158, "fatal", "reset_gpu", "GPU fatal timeout", "RESET_GPU"),
)  # fmt: skip

XIDS: dict[int, Xid] = {row.code: row for row in _ROWS}


def xid(code: int) -> Xid:
    """The row; for a code that the table lacks one that says so: not trusted at the next pause, and no run stops."""
    return XIDS.get(code) or Xid(
        code, "degraded", "diagnose", "an Xid that this version does not know", "not in the table: look it up"
    )


OFF_BUS = Rule(
    "kernel.off_bus", "fatal", "reboot", "repair", "the GPU has fallen off the bus", "kernel log, without an Xid"
)
APP_REPEAT = Rule(
    "xid.app.repeats", "degraded", "diagnose", "repair", "application errors come back on this GPU alone",
    "NVSentinel health events analyser: twice in 24 h on one GPU",
)  # fmt: skip
APP_SPREAD = Rule(
    "xid.app.spread", "app", "restart_app", "quiet", "the application fails on several GPUs: its own error, not theirs",
    "NVSentinel health events analyser: on different GPUs",
)  # fmt: skip
CONTAINED_REPEAT = Rule(
    "xid.94.repeats",
    "fatal",
    "diagnose",
    "repair",
    "contained memory errors come back",
    f"{CATALOG}; {REPEATS} in 24 h",
)
LINK_REPEAT = Rule(
    "xid.nvlink.repeats", "fatal", "reset_gpu", "repair", "NVLink errors come back", f"{CATALOG}; {REPEATS} in 24 h"
)
DOUBLE_BIT_HANDLED = Rule(
    "xid.48.handled", "degraded", "reset_gpu", "repair", "a double-bit error that was contained or remapped",
    f"{CATALOG}: WORKFLOW_XID_48, with 63 or 94 in the burst",
)  # fmt: skip


def _kernel(kind: str, severity: Severity, action: Action, text: str) -> Rule:
    return Rule(f"kernel.{kind}", severity, action, "quiet", text, "kernel log")


_KERNEL: Mapping[str, Rule] = {
    "off_bus": OFF_BUS,
    "init_failed": Rule(
        "kernel.init_failed", "fatal", "reboot", "repair", "the driver could not initialise the GPU", "kernel log"
    ),
    "api_mismatch": _kernel(
        "api_mismatch", "info", "none", "a program's NVIDIA library is of another version than the driver"
    ),
    "sxid_fatal": Rule(
        "kernel.sxid_fatal",
        "fatal",
        "reboot",
        "repair",
        "an NVSwitch reports a fatal error",
        "kernel log; NVIDIA fabric manager: fatal SXids",
    ),
    "sxid": _kernel("sxid", "info", "none", "an NVSwitch reports an error that is not fatal"),
    "nvlink_nonfatal": _kernel("nvlink_nonfatal", "info", "none", "an NVLink error that the driver calls nonfatal"),
    "nvlink": _kernel("nvlink", "degraded", "reset_gpu", "the kernel reports an NVLink error"),
    "aer": _kernel("aer", "info", "none", "an uncorrectable PCIe error was reported"),
    "mce": _kernel("mce", "degraded", "service", "the CPU or memory reported an error that could not be corrected"),
    "mce_corrected": _kernel("mce_corrected", "info", "none", "the CPU or memory corrected an error"),
    "oom": _kernel("oom", "info", "none", "the kernel killed a process for want of memory"),
    "hung_task": _kernel("hung_task", "info", "none", "a process hangs in the kernel"),
    "lockup": _kernel("lockup", "degraded", "diagnose", "a CPU got stuck in the kernel"),
    "io_error": _kernel("io_error", "degraded", "service", "a disk reported an error"),
    "overrun": _kernel("overrun", "info", "none", "lines of the kernel's log were overwritten before they were read"),
}
_OF_THE_NODE = ("sxid_fatal", "sxid")
"""Kinds whose device is no GPU."""
_OF_A_GPU = ("off_bus", "init_failed")
"""Kinds that older drivers write without a bus id: which GPU it is the driver's readings say (lost, missing), and the
others need not go with it."""
_CONTAINED = 94
_DOUBLE_BIT = 48
_HANDLES_DOUBLE_BIT = (63, 94)
_LINKS_5 = range(144, 151)
_LINKS = (74, *_LINKS_5)
_WAIT = (_DOUBLE_BIT, *_LINKS_5)


@dataclass(frozen=True, slots=True)
class Fired:
    """A rule that an event made fire."""

    rule: Rule
    device: str
    raw: str
    count: int = 1


def xid_rule(code: int) -> Rule:
    """The rule of one Xid by itself."""
    row = xid(code)
    heals: Heals = "repair" if row.action in ("reset_gpu", "reboot", "service") else "quiet"
    return Rule(f"xid.{code}", row.severity, row.action, heals, row.text, row.source)


EVENT_RULES: tuple[Rule, ...] = (
    *_KERNEL.values(), APP_REPEAT, APP_SPREAD, CONTAINED_REPEAT, LINK_REPEAT, DOUBLE_BIT_HANDLED,
)  # fmt: skip


def remember(
    past: Sequence[DeviceEvent], new: Sequence[DeviceEvent], last: float, now: float
) -> tuple[DeviceEvent, ...]:
    """The events of the last day, equal ones of one burst folded into one. At most ``MOST_KEPT``, newest last.
    ``last`` is when they were judged last."""
    kept = [e for e in past if now - e.at < DAY]
    for event in (replace(e, line=e.logged, due=max(e.at, now) + SETTLE if _waits(e) else 0.0) for e in new):
        for i, old in enumerate(kept):
            if _same(old, event) and event.at - old.at < BURST:
                kept[i] = _again(old, event) if _waits(event) and old.due <= last else _folded(old, event)
                break
        else:
            kept.append(event)
    return tuple(sorted(kept, key=lambda e: e.at)[-MOST_KEPT:])


def judge_events(
    past: Sequence[DeviceEvent], new: Sequence[DeviceEvent], last: float, now: float, bad_links: frozenset[str],
    clean: frozenset[str] = frozenset(), declared: Mapping[str, Rule] = MappingProxyType({}),
) -> Iterable[Fired]:  # fmt: skip
    """What the new events mean, given the day before them (which includes them). ``bad_links``: GPUs with a link down.
    ``clean``: GPUs that the driver reads without a fault (empty: the node, if all are); what only the kernel's log
    reports of one of those is a suspicion, and never fatal. ``declared``: the rules that plug-ins' events make fire.

    What waits is judged once ``SETTLE`` has passed, in the first call after that; ``last`` is when the last one was
    made.
    """
    for event in new:
        if event.kind == "reported" and event.rule in declared:
            yield Fired(declared[event.rule], event.device, event.raw, event.count)
    for event, fired in _judged(past, [e for e in new if e.kind != "reported"], last, now, bad_links):
        if fired.rule.severity == "fatal" and fired.device in clean and _only_logged(event, past):
            yield replace(fired, rule=suspected(fired.rule))
        else:
            yield fired


def suspected(rule: Rule) -> Rule:
    """The rule as it is while the driver contradicts the kernel's log: no new work, and what runs goes on."""
    return replace(rule, severity="unknown", text=f"{rule.text}, says the kernel's log, and the driver does not")


def _only_logged(event: DeviceEvent, past: Sequence[DeviceEvent]) -> bool:
    return all(e.logged for e in past if _same(e, event) and abs(e.at - event.at) < BURST) and event.logged


def _judged(
    past: Sequence[DeviceEvent], new: Sequence[DeviceEvent], last: float, now: float, bad_links: frozenset[str]
) -> Iterable[tuple[DeviceEvent, Fired]]:
    for event in new:
        if event.kind != "xid":
            device = "" if event.kind in _OF_THE_NODE else event.device
            rule = _KERNEL[event.kind]
            if event.kind in _OF_A_GPU and not device:
                rule = replace(rule, severity="degraded", text=f"{rule.text}; the kernel's log does not say which")
            yield event, Fired(rule, device, event.raw, event.count)
        elif not _waits(event):
            yield from ((event, fired) for fired in _xid(event, past, bad_links))
    for event in past:
        if not _waits(event) or not last < event.due <= now:
            continue
        if event.code != _DOUBLE_BIT:
            if not _nonfatal(event, past):
                yield from ((event, fired) for fired in _xid(event, past, bad_links))
            continue
        handled = any(e.code in _HANDLES_DOUBLE_BIT for e in _burst(event, past))
        rule = DOUBLE_BIT_HANDLED if handled else xid_rule(event.code)
        yield event, Fired(rule, event.device, event.raw, event.count)


def waits_until(past: Sequence[DeviceEvent], now: float) -> float | None:
    """When to judge again without new events; None: no event waits."""
    return min((e.due for e in past if _waits(e) and e.due > now), default=None)


def _waits(event: DeviceEvent) -> bool:
    return event.kind == "xid" and event.code in _WAIT


def _nonfatal(event: DeviceEvent, past: Sequence[DeviceEvent]) -> bool:
    """The driver's own event of what its line in the log calls nonfatal: the event lacks that word."""
    return not event.line and any(e.kind == "nvlink_nonfatal" and e.code == event.code for e in _burst(event, past))


def _xid(event: DeviceEvent, past: Sequence[DeviceEvent], bad_links: frozenset[str]) -> Iterable[Fired]:
    rule = xid_rule(event.code)
    alike = sum(1 for e in past if _same(e, event) and not _nonfatal(e, past))
    if event.code == _CONTAINED and alike >= REPEATS:
        yield Fired(CONTAINED_REPEAT, event.device, event.raw, event.count)
    if _is_app(event):
        spread = {e.device for e in _burst(event, past, everywhere=True) if _is_app(e)}
        if len(spread) > 1:
            yield Fired(APP_SPREAD, "", event.raw, event.count)
            return
        if _bursts_of(event.device, past) >= APP_REPEATS:
            yield Fired(APP_REPEAT, event.device, event.raw, event.count)
    if event.code in _LINKS and (event.device in bad_links or alike >= REPEATS):
        yield Fired(LINK_REPEAT, event.device, event.raw, event.count)
    yield Fired(rule, event.device, event.raw, event.count)


def _bursts_of(device: str, past: Sequence[DeviceEvent]) -> int:
    """Bursts of application errors on this GPU; none when another GPU had any: then it is the application."""
    mine = [e for e in past if _is_app(e) and not _follows(e, past)]
    if any(e.device != device for e in mine):
        return 0
    times = [e.at for e in mine]
    return sum(1 for i, at in enumerate(times) if i == 0 or at - times[i - 1] >= BURST)


def _is_app(event: DeviceEvent) -> bool:
    """The application's doing. A contained memory error, too, only asks for its restart, but is the memory's fault."""
    return event.kind == "xid" and xid(event.code).severity == "app" and event.code != _CONTAINED


def _follows(event: DeviceEvent, past: Sequence[DeviceEvent]) -> bool:
    """A GPU of the node had an error of its own at about the same time: the others' workers lose a peer by it."""
    burst = _burst(event, past, everywhere=True)
    return any(e.kind == "xid" and (e.code == _CONTAINED or xid(e.code).severity == "fatal") for e in burst)


def _folded(old: DeviceEvent, new: DeviceEvent) -> DeviceEvent:
    """Due as before: a storm does not put the verdict off."""
    return replace(_joined(old, new), count=old.count + new.count)


def _again(judged: DeviceEvent, new: DeviceEvent) -> DeviceEvent:
    """One that waits comes again after it was judged: it is judged again, and counts the new ones alone."""
    return replace(_joined(judged, new), count=new.count, due=new.due)


def _joined(old: DeviceEvent, new: DeviceEvent) -> DeviceEvent:
    return replace(
        old, at=max(old.at, new.at), logged=old.logged and new.logged, line=old.line or new.line
    )  # fmt: skip


def _same(a: DeviceEvent, b: DeviceEvent) -> bool:
    return (a.kind, a.device, a.code, a.rule) == (b.kind, b.device, b.code, b.rule)


def _burst(event: DeviceEvent, past: Sequence[DeviceEvent], everywhere: bool = False) -> list[DeviceEvent]:
    return [e for e in past if abs(e.at - event.at) < BURST and (everywhere or e.device == event.device)]
