"""What must hold after every step of a simulation. Each check raises Broken with the numbers of the invariants in
the design."""

from __future__ import annotations

from collections.abc import Mapping

from nodeagent.model.job import Checkpoint, JobRecord, Phase
from nodeagent.model.world import Head, Token
from nodeagent.plan.phases import allowed
from nodeagent.store.memory import MemoryServer
from tests.sim.machine import SimMachine


class Broken(AssertionError):  # noqa: N818 - it is a verdict, not an error of the program
    """An invariant does not hold."""


class Checker:
    """Watches machines and the store's records."""

    def __init__(self, server: MemoryServer, machines: Mapping[str, SimMachine]) -> None:
        self.server, self.machines = server, machines
        self._highest: dict[str, int] = {}
        self._phases: dict[str, Phase] = {}
        self._started: dict[tuple[str, str], int] = {}
        self._orders: dict[str, tuple[Token, tuple[str, ...]]] = {}
        self._active: dict[str, int] = {}
        """Highest generation of a job that was ever seen active."""
        self._pointers: dict[str, Checkpoint | None] = {}
        self.submitted: set[str] = set()
        """Uids of the jobs whose submission was acknowledged."""
        self.forgotten: set[str] = set()
        """Those that nobody was left to know of when the store had lost them."""
        self.checks = 0
        self.first: Broken | None = None
        """The first one broken: kept, since some checks run where an exception would go nowhere."""

    def check(self) -> None:
        """All of them, now. Raises Broken, and keeps it."""
        self.checks += 1
        try:
            self._check()
        except Broken as broken:
            self.first = self.first or broken
            raise

    def store_loses(self) -> None:
        """The store is about to go back in time, or to lose everything: what it says afterwards is no step from what it
        says now. What runs is watched on."""
        self.check()
        self._highest.clear()
        self._phases.clear()
        self._orders.clear()
        self._pointers.clear()

    def check_kept(self) -> None:
        """Invariants 6 and 7: no acknowledged job is lost. To be asked once things are quiet."""
        missing = self.submitted - self.forgotten - set(self.server.state.jobs)
        if missing:
            self.first = self.first or Broken(f"invariant 6: lost jobs: {sorted(missing)}")
            raise self.first

    def _check(self) -> None:
        for job in self.server.state.jobs.values():
            if job.active is not None:
                self._active[job.uid] = max(self._active.get(job.uid, 0), job.active.number)
        self._one_generation()
        self._devices()
        if self.server.state.recovering or self.server.state.run != self.server.run_id:
            return  # its records are not the truth yet
        for job in self.server.state.jobs.values():
            self._newest(job)
            self._pointer(job)
            self._head(job)
            self._phase(job)
            self._budget(job)

    def _one_generation(self) -> None:
        """Invariant 2: never do workers of two generations of a job execute at the same time; invariant 4: only of
        an active one."""
        uids = {uid for m in self.machines.values() for uid in m.pods}
        for uid in uids:
            running = {m.name: t for m in self.machines.values() if (t := m.running(uid)) is not None}
            if len(set(running.values())) > 1:
                raise Broken(f"invariant 2: two generations of {uid} run at once: {running}")
            for name, token in running.items():
                seen = self._started.get((uid, name), 0)
                if token.number < seen:
                    raise Broken(f"invariant 2: {name} went back from generation {seen} to {token.number} of {uid}")
                if token.number > seen:
                    self._started[uid, name] = token.number
                    if self._active.get(uid, 0) < token.number:
                        raise Broken(f"invariant 4: {name} started {token}, which was never active")

    def _devices(self) -> None:
        """No device is used by workers of two jobs at once."""
        for machine in self.machines.values():
            used: dict[str, str] = {}
            for uid in machine.pods:
                token = machine.running(uid)
                job = self.server.state.jobs.get(uid)
                if token is None or job is None or job.head is None or job.head.token != token:
                    continue
                member = job.head.members.get(machine.name)
                for device in member.devices if member is not None else ():
                    if device in used:
                        raise Broken(f"{machine.name}: {device} is used by {used[device]} and {uid}")
                    used[device] = uid

    def _newest(self, job: JobRecord) -> None:
        """Nothing runs that is newer than what the store knows: a generation that it lost came back."""
        for machine in self.machines.values():
            token = machine.running(job.uid)
            if token is not None and (job.head is None or token.number > job.head.number):
                raise Broken(f"{machine.name} runs generation {token.number} of {job.name}, the store has {job.head}")

    def _pointer(self, job: JobRecord) -> None:
        """Invariant 1: only the newest generation that was active moves the pointer."""
        moved = job.uid in self._pointers and job.checkpoint != self._pointers[job.uid]
        if moved and job.checkpoint is not None:
            active = job.active.number if job.active is not None else 0
            if job.checkpoint.number != active:
                raise Broken(f"invariant 1: {job.checkpoint} was committed when generation {active} was active")
        self._pointers[job.uid] = job.checkpoint

    def _head(self, job: JobRecord) -> None:
        """Invariant 3, and numbers only grow."""
        head = job.head
        if head is None:
            return
        if head.number < self._highest.get(job.name, 0):
            raise Broken(f"generation of {job.name} went down to {head.number}")
        self._highest[job.name] = head.number
        ordered = head.ordered()
        if [m.group_rank for m in ordered] != list(range(len(ordered))):
            raise Broken(f"invariant 3: group ranks of {job.name} are not a permutation: {ordered}")
        ranks = [r for m in ordered for r in range(m.first_rank, m.first_rank + m.workers)]
        if ranks != list(range(head.world_size)):
            raise Broken(f"invariant 3: ranks of {job.name} are {ranks}")
        size = job.spec.role.nodes
        if not size.min <= len(ordered) <= size.max:
            raise Broken(f"invariant 4: {len(ordered)} nodes, not within {size.min}..{size.max}")
        names = tuple(m.node for m in ordered)
        last = self._orders.get(job.uid)
        if last is not None and last[0].number + 1 == head.number:  # else one in between went by unseen
            stayed = [n for n in last[1] if n in names]
            if [n for n in names if n in stayed] != stayed:
                raise Broken(f"invariant 3: survivors changed their order: {last[1]} to {names}")
        if last is None or last[0] != head.token:
            self._all_or_nothing(job, head)
        self._orders[job.uid] = (head.token, names)
        if head.state == "active" and (set(head.acks) < set(names) or head.holders):
            raise Broken(f"invariant 4: active without every acknowledgement: {head}")

    def _all_or_nothing(self, job: JobRecord, head: Head) -> None:
        """A scale-out that is pending takes all its newcomers or none."""
        growing = job.control.growing
        if growing is None or head.control_rev != job.control.rev or head.state != "forming":
            return
        if growing.before < len(head.members) < growing.want:
            raise Broken(f"{job.name} forms on {len(head.members)} nodes on its way from {growing.before}: {growing}")

    def _phase(self, job: JobRecord) -> None:
        before = self._phases.get(job.uid)
        if before is not None and not allowed(before, job.phase):
            raise Broken(f"{job.name} went from {before} to {job.phase}")
        self._phases[job.uid] = job.phase

    def _budget(self, job: JobRecord) -> None:
        """Invariant 5: only faults of the job count, and never more than the budget but the last, which fails it."""
        for entry in job.budget.values():
            if entry.counts and entry.kind not in ("worker_failed", "hang", "collective", "pod_failed"):
                raise Broken(f"invariant 5: {entry.kind} was counted: {entry.text}")
        counted = sum(1 for e in job.budget.values() if e.counts)
        if counted > job.spec.restarts.max + 1:
            raise Broken(f"invariant 5: {counted} restarts spent of {job.spec.restarts.max}")
