"""The table of Xids: what each means, how bad it is, what repairs it. Data only.

An Xid is an error report of NVIDIA's driver in the kernel log. Severity and action follow the columns "Immediate
Action" and "Investigatory Action" of NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors): RESTART_APP is the
application's, RESET_GPU is fatal until reset, RESTART_BM until a reboot, IGNORE is told only. Where we depart from it
the row says why.
"""

from __future__ import annotations

from dataclasses import dataclass

from nodeagent.model.health import Action, Severity

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
         "alone it only tells that a process died: flagging it took 77 healthy nodes out (NVSentinel #1629)"),
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
