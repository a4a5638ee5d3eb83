"""What is wrong with one machine, judged from what was seen of it.

Pure. ``nodeagent/doctor/machine.py`` does the looking. What could not be looked at is reported as unknown.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator

from nodeagent.model.facts import Finding, FolderFacts, HostFacts
from nodeagent.plan.cluster import some

MIB = 2**20
FULL = 256 * MIB
"""Free bytes below which a disk is as good as full."""
LOW = 2048 * MIB
LOW_SHARE = 0.05
"""A disk with less than both of these free is low."""
FEW_FILES = 1000
SHM_FULL = 16 * MIB
SHM_LOW = 256 * MIB
"""Free bytes of /dev/shm below which data loaders and NCCL may find no room."""
MEMLOCK = 64 * MIB
"""A locked-memory limit below this breaks RDMA."""
DAY = 86400.0
EXPIRES_SOON = 30 * DAY
CLOCK_RATE = 0.01
"""Of two machines each may be this much off: the timing bears 2 % between them (protocol.md, A1)."""
FEW_PORTS = 32
"""A gang takes one port for each generation, and none twice in a row."""


def judge_host(facts: HostFacts) -> tuple[Finding, ...]:
    """Everything worth saying, errors first; empty when all is well and known."""
    parts: tuple[Callable[[HostFacts], Iterator[Finding]], ...] = (
        _python, _name, _folders, _shm, _address, _interface, _ports, _certificate, _memlock, _gpus, _hardware, _clock,
        _containers, _unknown,
    )  # fmt: skip
    found = [finding for part in parts for finding in part(facts)]
    order = ("error", "warning", "info")
    return tuple(sorted(found, key=lambda finding: order.index(finding.severity)))


def _python(facts: HostFacts) -> Iterator[Finding]:
    if facts.missing:
        names = " ".join(facts.missing)
        fix = "install the .deb or the bundle that make packages builds (docs/install.md); in a clone: make setup"
        yield _error(f"the agent's Python, {facts.python}, lacks {names}", fix)
    if facts.python_closed:
        yield _warning(
            f"other users may not pass through {facts.python_closed} to the agent's Python: only root's jobs can run",
            "install the .deb or the bundle that make packages builds (docs/install.md): it is in /opt/nodeagent",
        )


def _name(facts: HostFacts) -> Iterator[Finding]:
    if facts.other_name:
        yield _warning(
            f"this machine is called {facts.other_name} now, and goes on as the node {facts.node} until its next boot, "
            "since its work was given to that node",
            f"to keep the name, set node.id: {facts.node} in the agent's config; to change it now, nodeagentctl drain "
            f"{facts.node}, then set node.id to another one and systemctl restart nodeagent",
        )


def _folders(facts: HostFacts) -> Iterator[Finding]:
    for folder in facts.folders:
        name, path = f"{folder.key} ({folder.path})", shlex.quote(folder.path)
        if folder.problem:
            yield _error(f"{name} {folder.problem}", f"make it usable, or set another {folder.key} in the config")
            continue
        if folder.others_write:
            yield _error(f"{name} may be written to by anybody: its sockets could be replaced", f"chmod go-w {path}")
        yield from _disk(folder, name, path)
    closed = {folder.closed: folder.key for folder in facts.folders if folder.closed and facts.root}
    for path, key in closed.items():
        what = f"other users may not pass through {path} to {key}: only root's jobs can run here"
        yield _warning(what, f"chmod o+x {shlex.quote(path)}")


def _disk(folder: FolderFacts, name: str, path: str) -> Iterator[Finding]:
    fix = f"see what fills it: du -xh --max-depth=2 {path} | sort -h | tail"
    if folder.free_files is not None and folder.free_files < FEW_FILES:
        yield _error(f"{name}: its file system has room for {folder.free_files} more files", fix)
    if folder.free is None or folder.total is None:
        return
    text = f"{name}: {folder.free / MIB:.0f} of {folder.total / MIB:.0f} MiB are free"
    if folder.free < min(FULL, folder.total // 4):
        yield _error(f"{text}: nothing can be started soon", fix)
    elif folder.free < LOW and folder.free < LOW_SHARE * folder.total:
        yield _warning(text, fix)


def _shm(facts: HostFacts) -> Iterator[Finding]:
    free, total = facts.shm_free, facts.shm_total
    if free is None or total is None:
        return
    text = f"/dev/shm: {free / MIB:.0f} of {total / MIB:.0f} MiB are free"
    if total < SHM_LOW:
        fix = f"mount -o remount,size=50% /dev/shm (in a container: give it more shared memory than {total // MIB} MiB)"
    else:
        fix = "see whose files are left: ls -lS /dev/shm | head; remove those of jobs that ended"
    if free < SHM_FULL:
        yield _error(f"{text}: data loaders die with a bus error", fix)
    elif free < SHM_LOW:
        yield _warning(f"{text}: data loaders and NCCL may find no room", fix)


def _address(facts: HostFacts) -> Iterator[Finding]:
    if not facts.address_problem:
        return
    what = f"workers cannot listen on this node's address, {facts.address}: {facts.address_problem}"
    fix = "set node.address in the agent's config to an address of this machine that its peers reach (ip -br addr)"
    if not facts.address_now:
        yield _error(what, fix)
    elif facts.address_now == facts.address:
        yield _error(what, f"give this machine an address that its peers reach (ip -br addr), or {fix}")
    else:
        yield _error(
            f"its address was {facts.address}; it is {facts.address_now} now: workers cannot listen on the old one",
            "nothing: the agent takes one of the same interface, or of the default route, within some 5 s; if it does "
            "not, systemctl restart nodeagent: training goes on",
        )


def _interface(facts: HostFacts) -> Iterator[Finding]:
    if not facts.interface:
        return
    if facts.interface_state == "missing":
        yield _error(f"node.data_interface {facts.interface} does not exist", "set it to one that does: ip -br link")
    elif facts.interface_state in ("down", "lowerlayerdown"):
        yield _error(f"node.data_interface {facts.interface} is down", f"ip link set {facts.interface} up")


def _ports(facts: HostFacts) -> Iterator[Finding]:
    low, high = facts.ports
    if facts.ports_problem:
        yield _error(f"ports.rendezvous: {facts.ports_problem}", facts.ports_right)
    elif facts.ports_taken is not None and high - low + 1 - facts.ports_taken < FEW_PORTS:
        yield _error(
            f"ports.rendezvous: {facts.ports_taken} of the ports {low}-{high} are taken by others",
            f"see by whom (ss -ltnp 'sport >= {low} and sport <= {high}'), or set another range",
        )


def _certificate(facts: HostFacts) -> Iterator[Finding]:
    if not facts.certificate:
        return
    text, left = f"api.tls.cert ({facts.certificate})", facts.certificate_left
    fix = "put a new one there, then: systemctl restart nodeagent"
    if left is None:
        yield _warning(f"unknown: when {text} ends: {facts.certificate_problem}", "")
    elif left <= 0:
        yield _error(f"{text} has ended: tools on other machines do not trust this agent any more", fix)
    elif left < EXPIRES_SOON:
        yield _warning(f"{text} ends in {left / DAY:.0f} days", fix)
    if facts.certificate_served and facts.certificate_digest not in ("", facts.certificate_served):
        yield _warning(f"{text} is another one than the agent serves until its restart", "systemctl restart nodeagent")


def _memlock(facts: HostFacts) -> Iterator[Finding]:
    if facts.pins_memory and facts.memlock is not None and 0 <= facts.memlock < MEMLOCK:
        yield _warning(
            f"workers may lock {facts.memlock // 1024} KiB of memory: NCCL over InfiniBand fails or is slow",
            "LimitMEMLOCK=infinity in nodeagent.service (limits: {memlock: unlimited} of a container), then restart it",
        )


def _gpus(facts: HostFacts) -> Iterator[Finding]:
    if facts.gpus_missed:
        yield _warning(
            "there is an NVIDIA driver, but the agent found no GPU when it started, so none is offered",
            "see nvidia-smi; when it answers: systemctl restart nodeagent",
        )
    if facts.undriven:
        yield _warning(
            f"NVIDIA GPUs are installed ({some(facts.undriven)}), but their driver is not loaded: none is offered",
            "install or load it, until nvidia-smi lists them; or `gpus: none` below `node`, where that is meant",
        )
    if facts.given_up:
        what = (
            f"GPUs were acknowledged as gone (`nodeagentctl health ack`), and none misses them: {some(facts.given_up)}"
        )
        yield Finding(severity="info", what=what, fix="nothing; one that nvidia-smi lists again is offered again")


def _hardware(facts: HostFacts) -> Iterator[Finding]:
    if facts.hardware_missing:
        yield _warning(
            f"the hardware is not watched, and no GPU is offered: {facts.hardware_missing}",
            "install all of nodeagent; or `gpus: none` below `node` and `health: off`, where that is meant",
        )


def _clock(facts: HostFacts) -> Iterator[Finding]:
    if facts.clock_rate is not None and abs(facts.clock_rate) > CLOCK_RATE:
        way = "fast" if facts.clock_rate > 0 else "slow"
        yield _error(
            f"its clock is made to run {abs(facts.clock_rate):.1%} too {way} (chrony slews it): leases and fences are "
            "measured with it, and bear 1 %",
            "maxslewrate 8000 in chrony's config (/etc/chrony/conf.d/nodeagent.conf), then systemctl restart chrony",
        )


_LACKS = {
    "catatonit": ("there is no catatonit, which passes signals on in podman's containers", "apt-get install catatonit"),
    "subuid": (
        "users have no ids for podman's containers: /etc/subuid is empty",
        "usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER; without overlaps, for each user",
    ),
    "cgroups": (
        "both versions of cgroups have controllers, which crun, podman's runtime, refuses",
        "boot with systemd.unified_cgroup_hierarchy=1",
    ),
}


def _containers(facts: HostFacts) -> Iterator[Finding]:
    """A machine without containers is sound; what it says is for who submits jobs that need them."""
    if facts.runtimes is None:
        return
    for name in facts.podman_lacks:
        what, fix = _LACKS[name]
        yield _warning(f"jobs with `container` cannot use podman here: {what}", fix)
    if not facts.runtimes:
        what = "neither podman nor apptainer is installed: jobs with `container` do not run here"
        yield Finding(severity="info", what=what, fix="apt-get install podman catatonit, where that is wanted")


def _unknown(facts: HostFacts) -> Iterator[Finding]:
    for what in facts.unknown:
        yield _warning(f"unknown: {what}", "")


def _error(what: str, fix: str) -> Finding:
    return Finding(severity="error", what=what, fix=fix)


def _warning(what: str, fix: str) -> Finding:
    return Finding(severity="warning", what=what, fix=fix)
