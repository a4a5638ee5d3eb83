"""What must hold after every step of a simulation. Each check raises Broken with the numbers of the invariants in
the design."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nodeagent.model.job import TERMINAL, Checkpoint, JobRecord, Phase
from nodeagent.model.jobspec import Role
from nodeagent.model.world import Generation, GenerationState, Member, Token
from nodeagent.plan.failure.faults import all_succeeded
from nodeagent.plan.failure.policies import BY
from nodeagent.plan.job.running import scaled_size
from nodeagent.plan.steps import GENERATION, POD, PodStage, may_become, phase_may_become, pod_state
from tests.inprocess.server import Server
from tests.sim.machine import SimMachine, SimPod

SWEEP = 1.0
"""Seconds between two looks at everything."""


class Broken(AssertionError):  # noqa: N818 - it is a verdict, not an error of the program
    """An invariant does not hold."""


class Checker:
    """Watches machines and the store's records: told of each change, it looks at what changed, at once.

    This is as strong as looking at everything after every step. What workers execute changes only on one machine, which
    tells (``machine``); what the store knows changes only in a step of the store, which tells too (``records``), and a
    record that is the very same object has not changed. Every rule is about one machine, one record, or one job's
    workers on all machines; the last are counted by generation as machines tell. So that a change of which nobody told
    cannot hide, everything is looked at anew each second and at the end (``sweep``): what was told must be what is
    there. The mutants show that nothing slips through (``make mutants``).
    """

    def __init__(self, server: Server, machines: Mapping[str, SimMachine]) -> None:
        self.server, self.machines = server, machines
        self._on: dict[str, dict[str, Token]] = {}
        """Machine to what it executes: job (uid) to generation."""
        self._running: dict[str, dict[str, Token]] = {}
        """The same by job: uid to machine to generation."""
        self._generations: dict[str, dict[Token, int]] = {}
        """Job to the generations that execute, each with the number of machines."""
        self._seen: dict[str, JobRecord] = {}
        """Records as they were looked at last."""
        self._swept = 0.0
        self._highest: dict[str, int] = {}
        self._phases: dict[str, Phase] = {}
        self._ended: dict[str, Phase] = {}
        """Jobs that were seen to have ended."""
        self._generation_states: dict[str, tuple[Token, GenerationState]] = {}
        """Job to its newest generation, and the state that this was seen in."""
        self._pods: dict[str, dict[str, PodStage]] = {}
        """Machine to the state of its pod of each job."""
        self._started: dict[tuple[str, str], int] = {}
        self._orders: dict[str, tuple[Token, Mapping[str, Member]]] = {}
        self._sizes: dict[tuple[str, str], set[int]] = {}
        """Of a job of several roles: how many places of a role were wanted at some time."""
        """Job to its newest generation and that one's members."""
        self._tokens: dict[str, dict[int, Token]] = {}
        """Job to each number of a generation that was seen active, and that one."""
        self._active: dict[str, int] = {}
        """Highest generation of a job that was ever seen active."""
        self._pointers: dict[str, Checkpoint | None] = {}
        self._committed: dict[str, list[Checkpoint]] = {}
        """All that have been the job's pointer, in their order."""
        self._uses: dict[str, JobRecord] = {}
        """Each job as it was when its use was looked at last."""
        self._complete: dict[str, Token] = {}
        """Job to the generation of which the store knows that it has done all its work."""
        self.calm = False
        """Nothing fails any more: who has done its work must be seen to have."""
        self.submitted: set[str] = set()
        """Uids of the jobs whose submission was acknowledged."""
        self.forgotten: set[str] = set()
        """Those that nobody was left to know of when the store had lost them."""
        self.disbelieved: set[str] = set()
        """Jobs whose record somebody has written over by hand, and nobody has noticed yet: what it says is no rule
        broken. What the machines run is looked at all the same."""
        self.checks = 0
        self.first: Broken | None = None
        """The first one broken: kept, since some checks run where an exception would go nowhere."""

    # --- who tells

    def machine(self, name: str) -> None:
        """What this machine executes may have changed. Raises Broken, and keeps it, as all of these do."""
        self._keeping(self._records)
        self._keeping(lambda: self._machine(self.machines[name]))

    def records(self) -> None:
        """The store has done a step."""
        self._keeping(self._records)

    def check(self, now: float) -> None:
        """Time has passed."""
        if now - self._swept >= SWEEP:
            self._swept = now
            self.sweep()
        else:
            self.records()

    def sweep(self) -> None:
        """Everything, whoever told."""
        self._keeping(self._sweep)

    def store_loses(self) -> None:
        """The store is about to go back in time, or to lose everything: what it says afterwards is no step from what it
        says now. What runs is watched on."""
        self.sweep()
        self._seen.clear()
        self._highest.clear()
        self._phases.clear()
        self._generation_states.clear()
        self._orders.clear()
        self._pointers.clear()
        self._uses.clear()
        self._tokens.clear()
        self._complete.clear()

    def check_blame(self) -> None:
        """Invariant 11. To be asked once things are quiet: by then every fault is judged. What was counted was a fault
        of the job in that generation, no node's loss; and where it was one that nobody can take for a peer's, it is
        the one that is named."""
        guilty = [g for machine in self.machines.values() for g in machine.guilty]
        for job in self.server.state.jobs.values():
            for number, entry in job.budget.items():
                token = self._tokens.get(job.uid, {}).get(int(number))
                refused = "could not start" in entry.text
                if not entry.counts or entry.kind == "hang" or refused or token is None:
                    continue
                died = entry.kind == "pod_failed"  # maybe before it had started anything of this generation
                whose = [
                    g for g in guilty
                    if g.uid == job.uid and (g.token == token or (died and (g.node, g.rank) == (entry.node, None)))
                ]  # fmt: skip
                named = any(g.node == entry.node and g.rank in (None, entry.rank) for g in whose)
                if not whose or (all(g.sudden for g in whose) and not named):
                    self.first = self.first or Broken(f"invariant 11: {job.name} paid for {entry.text}: {whose}")
                    raise self.first

    def check_kept(self) -> None:
        """Invariants 6 and 7: no acknowledged job is lost. To be asked once things are quiet. A field that somebody has
        written over, and that no agent has to read again, may still be so."""
        missing = self.submitted - self.forgotten - self.server.state.uids
        if missing:
            self.first = self.first or Broken(f"invariant 6: lost jobs: {sorted(missing)}")
            raise self.first

    def has_ended(self, name: str) -> Phase | None:
        """The phase in which a job of this name ended, if it was seen to: the store does not keep its record for
        ever."""
        return self._ended.get(f"uid-{name}")

    def running(self, uid: str) -> Mapping[str, Token]:
        """Which generation of a job each machine executes that executes any."""
        return self._running.get(uid, {})

    def _keeping(self, look: Callable[[], None]) -> None:
        self.checks += 1
        try:
            look()
        except Broken as broken:
            self.first = self.first or broken
            raise

    # --- what is looked at

    def _sweep(self) -> None:
        self._seen.clear()
        self._records()
        for machine in self.machines.values():
            if self._on.get(machine.name, {}) != _executes(machine):
                raise Broken(f"{machine.name} changed what it executes, and nobody told: the simulation is wrong")
            self._devices(machine)
        for uid in self._running:
            self._one_generation(uid)

    def _records(self) -> None:
        state = self.server.state
        settled = not state.recovering and state.run == self.server.run_id  # else its records are not the truth yet
        jobs = state.jobs
        for uid, number in state.activated(jobs).items():
            self._active[uid] = max(self._active.get(uid, 0), number)
        for uid, job in jobs.items():
            if self._seen.get(uid) is job:
                continue
            if job.active is not None:
                self._tokens.setdefault(uid, {})[job.active.number] = job.active
                self._active[uid] = max(self._active.get(uid, 0), job.active.number)
            if settled and uid not in self.disbelieved:
                self._record(job)
                self._seen[uid] = job
        if not settled:
            self._seen.clear()
            self._uses.clear()
        elif len(self._seen) > len(jobs):
            self._seen = {uid: job for uid, job in self._seen.items() if uid in jobs}

    def _record(self, job: JobRecord) -> None:
        self._newest(job)
        self._pointer(job)
        self._generation(job)
        self._phase(job)
        self._budget(job)
        self._use(job)
        self._completion(job)

    def _completion(self, job: JobRecord) -> None:
        """A job succeeds when all workers of the role that completes it (of all roles without one) have exited 0, and
        only then: no other generation is formed once the store knows it, or once it is so and nothing fails. But where
        a policy says otherwise."""
        generation, before = job.generation, self._complete.pop(job.uid, None)
        if generation is None or job.reason.startswith(BY):
            return
        done = not self.unfinished(job)
        if job.phase == "succeeded" and not done:
            raise Broken(
                f"{job.name} succeeded, and ranks {self.unfinished(job)} of {generation.token} have not exited 0"
            )
        by_itself = job.control.desired == "run" and job.restart_done >= job.control.restart
        if (
            before is not None
            and by_itself
            and job.phase != "succeeded"
            and (generation.token, generation.state) != (before, "active")
        ):
            raise Broken(
                f"{job.name} had completed in {before}, and is {job.phase} with {generation.token}: {job.reason}"
            )
        if generation.state == "active" and (all_succeeded(job) or (self.calm and done)):
            self._complete[job.uid] = generation.token

    def unfinished(self, job: JobRecord) -> list[int]:
        """The ranks of the newest generation that have yet to exit 0 for the job to succeed."""
        assert job.generation is not None
        role, token = job.spec.completes, job.generation.token
        wanted = {
            (member.node, rank)
            for member in job.generation.members.values()
            for rank in (
                member.ranks_of(role) if role else range(member.first_rank, member.first_rank + member.workers)
            )
        }
        return sorted(rank for node, rank in wanted if (job.uid, token, rank) not in self.machines[node].well)

    def _in_order(self, machine: SimMachine) -> None:
        """A worker of a role that comes after others runs only once all their places were ready in its generation."""
        for uid, pod in machine.pods.items():
            job = self.server.state.jobs.get(uid)
            if not pod.after or job is None or job.generation is None or job.generation.token != pod.generation:
                continue
            before = {other for local in pod.alive for other in pod.after[pod.role_of(local)]}
            for name in (f"{other}.{i}" for other in before for i in range(job.generation.sizes[other])):
                if not self._was_ready(job, job.generation, name):
                    raise Broken(f"{machine.name} runs {pod.places} of {pod.generation}, and {name} was not ready")

    def _one_round(self, machine: SimMachine) -> None:
        """Never do workers of two rounds of a role live at the same time: not on a frozen machine either, which may
        thaw."""
        for uid, pod in machine.pods.items():
            for role, number in _rounds(pod).items():
                for other in self.machines.values():
                    theirs = other.pods.get(uid)
                    if theirs is None or theirs.generation != pod.generation:
                        continue
                    if _rounds(theirs).get(role, number) != number:
                        raise Broken(
                            f"{machine.name} runs round {number} of {role} of {pod.generation}, and {other.name} "
                            f"round {_rounds(theirs)[role]}"
                        )

    def _was_ready(self, job: JobRecord, generation: Generation, name: str) -> bool:
        """A place was ready in this generation, or its workers have all ended well."""
        if any((job.uid, generation.token, name) in machine.were_ready for machine in self.machines.values()):
            return True
        ranks = [
            (member.node, rank)
            for member in generation.members.values()
            for rank in range(member.first_rank, member.first_rank + member.workers)
            if (place := member.place_of(rank)) is not None and place.name == name
        ]
        return all((job.uid, generation.token, rank) in self.machines[node].well for node, rank in ranks)

    def _machine(self, machine: SimMachine) -> None:
        self._pod_states(machine)
        self._in_order(machine)
        self._one_round(machine)
        name, now = machine.name, _executes(machine)
        before = self._on.get(name, {})
        if now == before:
            return
        self._on[name] = now
        for uid in before.keys() | now.keys():
            old, new = before.get(uid), now.get(uid)
            if old == new:
                continue
            generations = self._generations.setdefault(uid, {})
            if old is not None:
                del self._running[uid][name]
                generations[old] -= 1
                if not generations[old]:
                    del generations[old]
            if new is not None:
                self._running.setdefault(uid, {})[name] = new
                generations[new] = generations.get(new, 0) + 1
                self._one_generation(uid)
                self._may_run(name, uid, new)
        self._devices(machine)

    def _pod_states(self, machine: SimMachine) -> None:
        """Each pod goes the ways of its table (``plan/steps.py``)."""
        before = self._pods.get(machine.name, {})
        now = {uid: pod_state(pod.status()) for uid, pod in machine.pods.items()}
        for uid in before.keys() | now.keys():
            old, new = before.get(uid, "empty"), now.get(uid, "empty")
            if not may_become(POD, old, new):
                raise Broken(f"the pod of {uid} on {machine.name} went from {old} to {new}")
        self._pods[machine.name] = now

    def _one_generation(self, uid: str) -> None:
        """Invariant 2: never do workers of two generations of a job execute at the same time."""
        if len(self._generations.get(uid, ())) > 1:
            raise Broken(f"invariant 2: two generations of {uid} run at once: {self._running[uid]}")

    def _may_run(self, name: str, uid: str, token: Token) -> None:
        """Invariant 4: workers only of a generation that was active; and a node never goes back."""
        seen = self._started.get((uid, name), 0)
        if token.number < seen:
            raise Broken(f"invariant 2: {name} went back from generation {seen} to {token.number} of {uid}")
        if token.number > seen:
            self._started[uid, name] = token.number
            if self._active.get(uid, 0) < token.number:
                raise Broken(f"invariant 4: {name} started {token}, which was never active")
        if (job := self._seen.get(uid)) is not None:
            self._newest(job)

    def _devices(self, machine: SimMachine) -> None:
        """No device is used by workers of two jobs at once."""
        used: dict[str, str] = {}
        for uid, token in self._on.get(machine.name, {}).items():
            job = self.server.state.jobs.get(uid)
            if job is None or job.generation is None or job.generation.token != token:
                continue
            member = job.generation.members.get(machine.name)
            for device in member.devices if member is not None else ():
                if device in used:
                    raise Broken(f"{machine.name}: {device} is used by {used[device]} and {uid}")
                used[device] = uid

    def _newest(self, job: JobRecord) -> None:
        """Nothing runs that is newer than what the store knows: a generation that it lost came back. Only where no
        other can become active before this node has answered may it still do so."""
        for token in self._generations.get(job.uid, ()):
            if job.generation is None or token.number > job.generation.number:
                names = {n for n, t in self._running[job.uid].items() if t == token}
                if (
                    job.generation is not None
                    and names <= job.generation.missing.keys() | job.generation.holders.keys()
                ):
                    continue
                raise Broken(f"{names} run generation {token.number} of {job.name}, the store has {job.generation}")

    def _pointer(self, job: JobRecord) -> None:
        """Invariant 1: only the newest generation that was active moves the pointer. The newest may be put back."""
        moved = job.uid in self._pointers and job.checkpoint != self._pointers[job.uid]
        committed = self._committed.setdefault(job.uid, [])
        if moved and job.checkpoint is not None:
            active = job.active.number if job.active is not None else 0
            if job.checkpoint.number != active and job.checkpoint not in committed[-1:]:
                raise Broken(f"invariant 1: {job.checkpoint} was committed when generation {active} was active")
        self._pointers[job.uid] = job.checkpoint
        if job.checkpoint is not None and job.checkpoint not in committed:
            committed.append(job.checkpoint)

    def _was_asked(self, job: JobRecord, role: Role, places: int) -> bool:
        sizes = self._sizes[job.name, role.name]
        elastic = role.size.min < role.size.max
        return places in sizes or (elastic and min(role.least, *sizes) <= places < max(sizes))

    def _generation(self, job: JobRecord) -> None:
        """Invariant 3, and numbers only grow; of several roles all places, each once, as many as ever were wanted; of
        an elastic role perhaps fewer, but enough to go on with."""
        generation = job.generation
        if job.spec.several:
            for role in job.sized.roles:
                self._sizes.setdefault((job.name, role.name), set()).add(role.places)
        if generation is not None and job.spec.several:
            placed = [place for m in generation.members.values() for place in m.places]
            has = generation.sizes
            wanted = [f"{role.name}.{i}" for role in job.spec.roles for i in range(has[role.name])]
            asked = all(self._was_asked(job, role, has[role.name]) for role in job.spec.roles)
            if not asked or sorted(place.name for place in placed) != sorted(wanted):
                raise Broken(f"generation {generation.number} of {job.name} has places {placed}, not {wanted}")
            for m in generation.members.values():
                if m.devices != tuple(d for p in m.places for d in p.devices) or len(set(m.devices)) < len(m.devices):
                    raise Broken(f"{m.node}'s devices are not its places': {m}")
        if generation is None:
            return
        if generation.number < self._highest.get(job.name, 0):
            raise Broken(f"generation of {job.name} went down to {generation.number}")
        self._highest[job.name] = generation.number
        token, state = self._generation_states.get(job.uid, (generation.token, generation.state))
        if token == generation.token and not may_become(GENERATION, state, generation.state):
            raise Broken(f"generation {generation.number} of {job.name} went from {state} to {generation.state}")
        self._generation_states[job.uid] = (generation.token, generation.state)
        if generation.state == "active" and (generation.missing or generation.holders):
            raise Broken(f"invariant 4: active without every acknowledgement: {generation}")
        last = self._orders.get(job.uid)
        if last is not None and last[0] == generation.token:  # its world is frozen
            if last[1] != generation.members:
                raise Broken(
                    f"invariant 3: the members of {generation.token} changed from {last[1]} to {generation.members}"
                )
            return
        self._orders[job.uid] = (generation.token, generation.members)
        for name in self._running.get(job.uid, ()):
            self._devices(self.machines[name])
        ordered = generation.ordered()
        if [m.group_rank for m in ordered] != list(range(len(ordered))):
            raise Broken(f"invariant 3: group ranks of {job.name} are not a permutation: {ordered}")
        ranks = [r for m in ordered for r in range(m.first_rank, m.first_rank + m.workers)]
        if ranks != list(range(generation.world_size)):
            raise Broken(f"invariant 3: ranks of {job.name} are {ranks}")
        size = job.spec.nodes
        if not job.spec.several and not size.min <= len(ordered) <= size.max:
            raise Broken(f"invariant 4: {len(ordered)} nodes, not within {size.min}..{size.max}")
        names = [m.node for m in ordered]
        self._placed(job, names)
        if last is not None and last[0].number + 1 == generation.number:  # else one in between went by unseen
            stayed = [
                m.node for m in sorted(last[1].values(), key=lambda m: m.group_rank) if m.node in generation.members
            ]
            swapped = {names[0], *stayed[:1]} if any(m.squatted for m in self.machines.values()) else set[str]()
            kept = [n for n in names if n in stayed and n not in swapped]
            if kept != [n for n in stayed if n not in swapped] and not job.spec.segments:  # those go before
                raise Broken(f"invariant 3: survivors changed their order: {last[1]} to {names}")
        self._all_or_nothing(job, generation)

    def _placed(self, job: JobRecord, names: list[str]) -> None:
        """The hard part of a placement: what nodes must have, and how they must lie."""
        spec, facts = job.spec, {n: record.facts for n, record in self.server.state.nodes.items()}
        if not facts.keys() >= set(names):
            return  # somebody has deleted the record of one of them
        if not spec.several and spec.role.placement is not None:
            for node in names:
                if why := spec.role.placement.unmet(node, facts[node].labels):
                    raise Broken(f"{job.name} is placed on {node}, which {why}")
        if spec.within and len({facts[n].labels.get(spec.within) for n in names}) != 1:
            raise Broken(f"{job.name} is placed on {names}, not within one {spec.within}")
        for at in range(0, len(names), spec.segments) if spec.segments else ():
            if len({facts[n].labels.get(facts[n].topology[-1]) for n in names[at : at + spec.segments]}) != 1:
                raise Broken(f"{job.name} has ranks {names}, which are not in segments of {spec.segments}")

    def _all_or_nothing(self, job: JobRecord, generation: Generation) -> None:
        """A scale-out that is pending takes all its newcomers or none."""
        growing = job.control.growing
        if growing is None or generation.control_rev != job.control.rev or generation.state != "forming":
            return
        if growing.before < (size := scaled_size(growing, generation)) < growing.want:
            raise Broken(f"{job.name} forms with {size} on its way from {growing.before}: {growing}")

    def _phase(self, job: JobRecord) -> None:
        before = self._phases.get(job.uid)
        if before is not None and not phase_may_become(before, job.phase):
            raise Broken(f"{job.name} went from {before} to {job.phase}")
        self._phases[job.uid] = job.phase
        if job.phase in TERMINAL:
            self._ended[job.uid] = job.phase

    def _use(self, job: JobRecord) -> None:
        """A job holds what its members and holders have, and used what it held for as long: less only of lost nodes."""
        devices, at = _devices_of(job), job.held.at if job.held is not None else 0
        counted = (job.held.gpus, job.held.slots) if job.held is not None else (0, 0)
        if counted != (len(devices) - (slots := sum(d.startswith("cpu") for _, d in devices)), slots):
            raise Broken(f"{job.name} is said to hold {counted} devices, and holds {sorted(devices)}")
        before, self._uses[job.uid] = self._uses.get(job.uid), job
        if before is None or before.held is None:
            return
        used = sum(u.gpu_ms + u.slot_ms for u in job.used.values()) - sum(
            u.gpu_ms + u.slot_ms for u in before.used.values()
        )
        held = len(_devices_of(before)) * (at - before.held.at)
        nodes = self.server.state.nodes
        lost = any(node not in nodes or nodes[node].lost or nodes[node].left for node, _ in _devices_of(before))
        if used > held or (used < held and not lost):
            raise Broken(f"{job.name} used {used} ms, and held devices for {held} ms")
        wasted = 0
        for u in job.used.values():
            kinds = (u.lost_gpu_ms + u.lost_slot_ms, u.overhead_gpu_ms + u.overhead_slot_ms)
            wasted += sum(kinds)
            if min(kinds) < 0:
                raise Broken(f"{job.name} lost less than nothing: {job.used}")
        if wasted > sum(u.gpu_ms + u.slot_ms for u in job.used.values()):
            raise Broken(f"{job.name} lost more than it used: {job.used}")

    def _budget(self, job: JobRecord) -> None:
        """Invariant 5: only faults of the job count, and never more than the budget but the last, which fails it."""
        for entry in job.budget.values():
            if entry.counts and entry.kind not in ("worker_failed", "hang", "collective", "pod_failed"):
                raise Broken(f"invariant 5: {entry.kind} was counted: {entry.text}")
        counted = sum(1 for e in job.budget.values() if e.counts)
        if counted > job.spec.restarts.max + 1:
            raise Broken(f"invariant 5: {counted} restarts spent of {job.spec.restarts.max}")


def _devices_of(job: JobRecord) -> set[tuple[str, str]]:
    """Node and device, of members and of who may still run."""
    generation = job.generation
    if generation is None:
        return set()
    entries = [*(generation.members.values() if generation.state != "ended" else ()), *generation.holders.values()]
    return {(entry.node, device) for entry in entries for device in entry.devices}


def _rounds(pod: SimPod) -> dict[str, int]:
    """Role to the round that its living workers here are of."""
    return {role: pod.runs.get(role, 0) for role in {pod.role_of(local) for local in pod.alive}} if pod.places else {}


def _executes(machine: SimMachine) -> dict[str, Token]:
    return {uid: token for uid in machine.pods if (token := machine.running(uid)) is not None}
