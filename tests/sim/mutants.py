"""Each rule of the protocol, broken on purpose, with what makes it show: ``python -m tests.sim.mutants`` prints the
table. A mutant that survives is a hole in the simulation."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import pytest
import structlog

from nodeagent.agent import loop, savedview
from nodeagent.agent.comparison import Comparison
from nodeagent.agent.membership import Membership
from nodeagent.agent.pace import WakePace
from nodeagent.agent.savedview import Acknowledged, Acknowledger, Saver
from nodeagent.agent.verifier import AdmissionVerifier, _Judged
from nodeagent.lease import lending
from nodeagent.lease.core import NO_PROMISES, Core, Departure
from nodeagent.lease.failsafe import Failsafe as Lender
from nodeagent.lease.failsafe import Question
from nodeagent.lease.grants import Grant
from nodeagent.lease.lending import Ask, LoanAnswer, LoanRow, Promises, Table
from nodeagent.model.job import Admission, JobRecord
from nodeagent.model.jobspec import Role
from nodeagent.model.node import NodeRecord
from nodeagent.model.timing import Timing
from nodeagent.model.world import Generation, Member, PodReport
from nodeagent.plan.cluster import Cluster, RefusalKind
from nodeagent.plan.failure import newcomers, rounds
from nodeagent.plan.failure.faults import find_fault
from nodeagent.plan.failure.rounds import next_round
from nodeagent.plan.fairshare.reclaim import Reclaim
from nodeagent.plan.fairshare.resources import Resources
from nodeagent.plan.job import gang, running
from nodeagent.plan.job.running import judge_before
from nodeagent.plan.nodes import candidates, health, setbacks
from nodeagent.plan.nodes.labels import Tree
from nodeagent.plan.placing import places
from nodeagent.plan.placing import roles as placed_roles
from nodeagent.plan.placing.places import Ground, Site
from nodeagent.plan.pods import running as running_pod
from nodeagent.plan.pods import stopping
from nodeagent.plan.pods.actions import Release
from nodeagent.plan.steps import Decision
from nodeagent.pods.base import PodStatus
from nodeagent.store import calls, client, scripts
from nodeagent.store.messages import Saved
from nodeagent.store.scripts import Script
from nodeagent.trust.ledger import LedgerEntry
from nodeagent.trust.seal import Seal
from tests.inprocess.server import Server
from tests.sim import cluster as cluster_module
from tests.sim import provocations, saved
from tests.sim.cluster import SimCluster, started
from tests.sim.host import SimHost
from tests.sim.machine import SimMachine, SimPod
from tests.sim.virtual import run_virtual

Provocation = Callable[[SimCluster], Awaitable[None]]
Mutate = Callable[[pytest.MonkeyPatch], None]
SEEDS = range(1, 9)
SIZES: dict[Provocation, int] = {provocations.a_large_gang_forms_again: 40, provocations.lets_go_after_it_lent: 8}
"""Nodes of the provocations that need more than ``FEW``."""
FEW = 4


@dataclass(frozen=True)
class Mutant:
    """One broken rule: its docstring says which."""

    mutate: Mutate
    provocation: Provocation

    @property
    def name(self) -> str:
        return self.mutate.__name__

    @property
    def rule(self) -> str:
        return " ".join((self.mutate.__doc__ or "").split())


def caught(provocation: Provocation, seeds: range) -> int | None:
    """The first seed with which an invariant did not hold, or the provocation did not come to its end."""

    async def main(seed: int) -> None:
        async with started(seed, SIZES.get(provocation, FEW)) as cluster:
            await provocation(cluster)

    found: int | None = None
    for seed in seeds:
        try:
            run_virtual(main(seed))
        except* AssertionError:
            found = seed
        if found is not None:
            break
    return found


def change(patch: pytest.MonkeyPatch, *changes: tuple[str, str], everywhere: bool = False) -> None:
    """Replace these pieces of the scripts. Raises AssertionError for one that is not there exactly once
    (``everywhere``: at least once)."""
    folder = files("nodeagent.store") / "scripts"
    texts = [file.read_text() for file in folder.iterdir() if file.name.endswith(".lua")]
    for old, _ in changes:
        times = sum(text.count(old) for text in texts)
        assert times == 1 or (times and everywhere), f"this piece is there {times} times: {old}"

    def load(name: str, *, bare: bool = False) -> Script:
        source = scripts.load(name, bare=bare).source
        for old, new in changes:
            source = source.replace(old, new)
        return Script(name=name, source=source, sha=hashlib.sha1(source.encode()).hexdigest())

    for module in (calls, client):
        patch.setattr(module, "load", cache(load))


def holders_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A new generation does not wait for those who may still run the old one, once they are no members."""
    change(patch, ("local function next_holders(job, lost)\n", "local function next_holders()\n  do return {} end\n"))


def freed_and_still_counted(patch: pytest.MonkeyPatch) -> None:
    """Devices that a node lets go with its acknowledgement count for the job on and on."""
    change(patch, ("count_devices(job, { [A.node] = had }, { [A.node] = devices })", ""))


def asked_again_at_once(patch: pytest.MonkeyPatch) -> None:
    """A call that was not answered in time is made again with the next heartbeat, however long that goes on."""
    patch.setattr(WakePace, "left", lambda pace, now: 0.0)


def ack_before_stopping(patch: pytest.MonkeyPatch) -> None:
    """Nodes acknowledge while their old workers still run."""
    patch.setattr(PodStatus, "quiet", property(lambda status: True))


def unseen_is_quiet(patch: pytest.MonkeyPatch) -> None:
    """A shim that an agent, just started, has not heard yet counts as one that runs nothing."""

    def received(host: SimHost, uid: str, status: PodStatus) -> PodStatus:
        return PodStatus(uid=uid, phase="preparing") if uid in host._unseen else status

    patch.setattr(SimHost, "_received", received)


def an_order_on_its_way_is_quiet(patch: pytest.MonkeyPatch) -> None:
    """A pod counts as quiet though its shim may still read an order to start."""
    patch.setattr(PodStatus, "starting", lambda status, token: status)


def a_primary_is_its_process(patch: pytest.MonkeyPatch) -> None:
    """A primary that was a replica in between counts as the one of before."""
    patch.setattr(Server, "_history", property(lambda server: f"{server._starts:x}"))


def who_answers_is_the_failsafe_member(patch: pytest.MonkeyPatch) -> None:
    """Neither who is asked nor who answers is looked at."""
    judged = Lender._judged

    def judge(lender: Lender, ask: Ask, now: float) -> LoanAnswer:
        order = lender._core.order
        return judged(lender, ask if order is None else ask._replace(to=order.node, to_life=order.life), now)

    patch.setattr(Lender, "_judged", judge)
    patch.setattr(LoanAnswer, "of", lambda shown, node, life: True)


def lease_shorter_than_the_fence(patch: pytest.MonkeyPatch) -> None:
    """The inequality of the timing is broken: silence counts as death before the shims have stopped the workers."""
    patch.setattr(Timing, "problems", lambda timing: [])
    patch.setattr(cluster_module, "TIMING", cluster_module.TIMING.model_copy(update={"fence": 6.0}))


def guard_asleep(patch: pytest.MonkeyPatch) -> None:
    """Assumption A2 broken: shims act five seconds after their deadline."""

    real = SimMachine.grant

    def late(self: SimMachine, uid: str, grant: Grant) -> None:
        self.guard_late = 5.0
        real(self, uid, grant)

    patch.setattr(SimMachine, "grant", late)


def setbacks_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A job does not remember which nodes did not acknowledge in time."""
    change(patch, ("job.setbacks = A.setbacks or job.setbacks", "job.setbacks = nil"))


def silence_not_recorded(patch: pytest.MonkeyPatch) -> None:
    """No renewal marks a node whose agent is silent: others learn that from nobody."""
    change(patch, ("silent.mute = '1'", ""))


def a_silent_agent_is_given_work(patch: pytest.MonkeyPatch) -> None:
    """A node whose agent is silent is as good as any other."""

    def only_hardware(node: NodeRecord) -> str:
        return health.bar(node.model_copy(update={"mute": False}))

    patch.setattr(candidates, "bar", only_hardware)


def silent_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A beat of an agent that was silent does not clear the mark."""
    change(patch, ("new.mute = not is_back and new.mute or nil", ""))


def newcomers_are_founders(patch: pytest.MonkeyPatch) -> None:
    """Who joined a gang is a member like any other: its failures count, and it is started again with the others."""
    patch.setattr(setbacks, "newcomer", lambda *_: False)
    patch.setattr(newcomers, "newcomer", lambda *_: False)


def half_a_gang(patch: pytest.MonkeyPatch) -> None:
    """A generation becomes active once its first member acknowledged (who names the address), without the others."""
    early = """local function not_ready(job)
  for node, member in pairs(decoded(entries(job, 'member'))) do
    if member.group_rank == 0 and not job['missing:' .. node] then
      return
    end
  end
"""
    counted = "if job.generation_state == 'forming' and counts.missing == 0 and counts.holding == 0 then"
    change(patch, ("local function not_ready(job)\n", early), (counted, "if job.generation_state == 'forming' then"))


def merged_by_arrival(patch: pytest.MonkeyPatch) -> None:
    """A store that lost writes keeps of each record what it has or was given first, whichever is newer."""
    change(
        patch, ("local function taken(stored, offered)\n", "local function taken(stored)\n  do return not stored end\n")
    )


def a_newer_view_ends_leases(patch: pytest.MonkeyPatch) -> None:
    """A life that a newer view knows as lost is taken for gone, though the store has granted it a lease since."""
    change(patch, ("    outlast(math.min(lease_end(id), served + lease_ms))\n", ""))


def deciding_while_recovering(patch: pytest.MonkeyPatch) -> None:
    """A store that lost writes decides at once on what it still has."""
    change(patch, ("served < recover", "false"), ("served >= recover", "true"), everywhere=True)


def anybody_commits(patch: pytest.MonkeyPatch) -> None:
    """A commit does not compare the generation that asks with the one that is active."""
    change(
        patch,
        (
            "if job.active_id ~= A.token.id or job.active_number ~= int(A.token.number) then",
            "if not job.active_id then",
        ),
        ("if not (A.again and new.number <= A.token.number or lives_of(job, A.node)[A.life]) then", "if false then"),
        (
            "if old and (old.number > new.number or (old.number == new.number and old.order >= new.order)) then",
            "if false then",
        ),
    )


def one_yes_is_enough(patch: pytest.MonkeyPatch) -> None:
    """A member asks itself only."""
    real = Lender._begun

    def begun(lender: Lender, uid: str, row: LoanRow, now: float) -> list[Question]:
        own = [question for question in real(lender, uid, row, now) if not question.address]
        if uid in lender._rounds:
            lender._rounds[uid].open = {question.nonce: question for question in own}
        return own

    patch.setattr(Lender, "_begun", begun)


def failsafe_members_need_not_let_go(patch: pytest.MonkeyPatch) -> None:
    """A new generation becomes active though no failsafe member of the old one let go, and is proposed without hearing
    one."""
    change(patch, ("  if #failsafe_members > 0 and job.generation_released ~= '1' then\n", "  if false then\n"))
    patch.setattr(gang, "silence", lambda cluster, job: "")


def let_go_unread(patch: pytest.MonkeyPatch) -> None:
    """An agent lets go without looking at what its lease process has promised."""
    patch.setattr(Promises, "end", lambda promises, uid, length, ours: 0.0)


def promised_unwritten(patch: pytest.MonkeyPatch) -> None:
    """A yes is said without writing down the promise."""

    def answer(lender: Lender, ask: Ask, now: float) -> Generator[Promises | None, Table | None, LoanAnswer]:
        shown = lender._judged(ask, now)
        if shown.yes:
            lender.table = yield None
            shown = lender._judged(ask, now)
        return shown

    patch.setattr(Lender, "answer", answer)


def reported_by_an_old_table(patch: pytest.MonkeyPatch) -> None:
    """A promise is written down, and what the agent may have changed meanwhile is not looked at again."""
    real = Lender.answer

    def answer(lender: Lender, ask: Ask, now: float) -> Generator[Promises | None, Table | None, LoanAnswer]:
        steps, table = real(lender, ask, now), lender.table
        try:
            yield next(steps)
            steps.send(table)
        except StopIteration as end:
            shown: LoanAnswer = end.value
        return shown

    patch.setattr(Lender, "answer", answer)


def promises_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A lease process that starts anew writes its own promises over those of the one before."""
    real = Lender.__init__

    def begin(lender: Lender, core: Core, promises: Promises, nonce: Callable[[], str]) -> None:
        real(lender, core, promises._replace(until={}), nonce)

    patch.setattr(Lender, "__init__", begin)


def promises_before_a_boot_unknown(patch: pytest.MonkeyPatch) -> None:
    """A node that was switched off lets go at once of what it had lent to, of which nothing is left."""
    real = Promises.end
    patch.setattr(Promises, "end", lambda promises, uid, length, ours: real(promises, uid, length, True))


def leaves_with_promises(patch: pytest.MonkeyPatch) -> None:
    """A lease process gives the lease back while others run on what it has promised."""
    patch.setattr(Promises, "last", lambda promises, length: 0.0)


def lends_while_served(patch: pytest.MonkeyPatch) -> None:
    """A failsafe member says yes though the store answers it: its promise then holds up the gang for nothing."""
    real = lending.answer
    monkey = lambda table, ask, renewed, unserved: real(table, ask, 1e9, unserved)  # noqa: E731
    patch.setattr("nodeagent.lease.failsafe.answer", monkey)


def counted_from_the_answer(patch: pytest.MonkeyPatch) -> None:
    """Lent time is counted from the last answer and in units of the promise, not from before the question."""
    real = Core.lend

    def late(core: Core, key: str, until: float) -> None:
        assert core.order is not None
        real(core, key, until + core.order.promise)

    patch.setattr(Core, "lend", late)


def signatures_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    """An agent runs what the store says, whoever signed it."""
    patch.setattr(Seal, "admits", lambda seal, job: True)
    patch.setattr(Seal, "controls", lambda seal, job: True)
    real = AdmissionVerifier._verdict
    signed = Admission(by="n1", issued=0, expires=1 << 40, signature="")

    def verdict(
        self: AdmissionVerifier, known: _Judged, entry: LedgerEntry | None, now: float
    ) -> tuple[RefusalKind | None, str]:
        job = known.job.model_copy(update={"admission": known.job.admission or signed})
        return real(self, replace(known, job=job), entry, now)

    patch.setattr(AdmissionVerifier, "_verdict", verdict)


def ends_not_remembered(patch: pytest.MonkeyPatch) -> None:
    """An agent runs again what has ended, as long as its signature is good."""
    patch.setattr(AdmissionVerifier, "_ends", lambda guard, uid, now: None)


def leaves_before_its_workers_are_gone(patch: pytest.MonkeyPatch) -> None:
    """A lease process gives the lease back before the shims have said that nothing runs, or their time was over."""
    real = Core.look

    def look(core: Core, now: float, obeyed: Callable[[], Mapping[str, float]]) -> str | None:
        call = real(core, now, dict)
        return call if call != "let go" else real(core, now, obeyed)  # what waits for the shims as before

    patch.setattr(Core, "look", look)


def departures_not_saved(patch: pytest.MonkeyPatch) -> None:
    """A lease process that starts anew knows nothing of the departure that the one before had begun."""
    real = Core.__init__

    def begin(core: Core, now: float, _departure: Departure | None = None, *more: Any) -> None:
        real(core, now, None, *more)

    patch.setattr(Core, "__init__", begin)


def lets_go_with_promises(patch: pytest.MonkeyPatch) -> None:
    """A lease process lets a job go whose members may still run on the time that it has lent them."""
    real = Core.free_of

    def free_of(core: Core, now: float, obeyed: Callable[[], Mapping[str, float]]) -> tuple[str, int] | None:
        promises, core.promises = core.promises, NO_PROMISES
        try:
            return real(core, now, obeyed)
        finally:
            core.promises = promises

    patch.setattr(Core, "free_of", free_of)


def takes_the_time_of_all(patch: pytest.MonkeyPatch) -> None:
    """Where one job waits, the time of every pod is taken back."""
    real = Core.grant

    def grant(core: Core, key: str) -> Grant:
        granted = real(core, key)
        return granted._replace(until=0.0) if core.withdrawn.pending else granted

    patch.setattr(Core, "grant", grant)


def lets_go_before_its_workers_are_gone(patch: pytest.MonkeyPatch) -> None:
    """A lease process lets a job go as soon as it has taken the pod's time back, whatever its shim says."""
    real = Core.free_of
    patch.setattr(Core, "free_of", lambda core, now, obeyed: real(core, now, dict))


def what_runs_stands_still(patch: pytest.MonkeyPatch) -> None:
    """An agent that is cut off says of all its pods that they stand still."""
    real = running_pod._waited_for
    patch.setattr(running_pod, "_waited_for", lambda job, node, life, _status: real(job, node, life, None))


def a_node_stands_still_as_a_whole(patch: pytest.MonkeyPatch) -> None:
    """An agent that is cut off says of no pod that it stands still while another one of its node runs."""
    real = running_pod.standing

    def standing(cluster: Cluster, node: str, life: str, statuses: Mapping[str, PodStatus], *more: Any) -> Any:
        return real(cluster, node, life, statuses, *more) if all(one.quiet for one in statuses.values()) else {}

    patch.setattr(loop, "standing", standing)


def marks_lost_unnoticed(patch: pytest.MonkeyPatch) -> None:
    """Who may have missed the mark of a removal, which is gone by now, reads on."""
    change(patch, ("math.max(A.rev, A.anew or 0) < tonumber(meta.horizon or '0')", "false"))


def renewed_in_any_era(patch: pytest.MonkeyPatch) -> None:
    """A lease is renewed in a store that lost writes before an agent has said what its node knows of them."""
    change(patch, ("if A.era ~= meta.era then\n  return refuse('era'", "if false then\n  return refuse('era'"))


def every_renewal_is_a_usual_one(patch: pytest.MonkeyPatch) -> None:
    """The short way of a renewal is taken in any era, in a recovery too, and where it has to ask who waits."""
    change(
        patch,
        ("usual_clock(not asked.asks and asked.era,", "usual_clock(redis.call('HGET', prefix .. 'meta', 'era'),"),
        ("and recover and served >= recover) then", "and recover) then"),
    )


def a_wake_brings_nothing(patch: pytest.MonkeyPatch) -> None:
    """Who is woken has to ask what has happened."""
    change(patch, ("return bytes <= NEWS_BYTES and words or { 'e', '' }", "return { 'e', '' }"))


def every_acknowledgement_is_the_whole_step(patch: pytest.MonkeyPatch) -> None:
    """The short way of an acknowledgement is never taken."""
    change(patch, ("if others > PART and node[1]", "if false and node[1]"))


def acknowledged_and_still_held(patch: pytest.MonkeyPatch) -> None:
    """The short way of an acknowledgement lets a member hold on to what it held before."""
    change(patch, ("      job[of_holder] = nil\n", ""))


def acknowledged_unsaved(patch: pytest.MonkeyPatch) -> None:
    """A command is answered without waiting until it is on any disk."""

    async def at_once(self: Acknowledger, write: Saved) -> Acknowledged:
        return Acknowledged(nodes=("n1", "n2"), wanted=2, waited=0.0)

    patch.setattr(Acknowledger, "__call__", at_once)


def one_disk_is_enough(patch: pytest.MonkeyPatch) -> None:
    """A command is answered when its own agent alone has it on disk."""
    patch.setattr(savedview, "COPIES", 1)


def reported_before_it_was_written(patch: pytest.MonkeyPatch) -> None:
    """What was handed to the disk counts as saved: nobody waits for the fsync."""
    real = Saver._save

    async def early(self: Saver) -> None:
        known = self._snapshot.known(self._clock.now())
        self.saved = Saved(era=known.era, rev=known.rev)
        self._news.set()
        self._notify()
        await asyncio.sleep(0.05)
        await real(self)

    patch.setattr(Saver, "_save", early)


def disks_not_offered(patch: pytest.MonkeyPatch) -> None:
    """Nobody reads what was kept."""
    patch.setattr(Saver, "load", lambda saver: None)


def the_first_view_wins(patch: pytest.MonkeyPatch) -> None:
    """A store that was restored from one view does not wait for those that may know better: what had ended is back, and
    what was replaced is formed again beside its successor."""
    patch.setattr(Membership, "regroup", property(lambda lease: 0.0, lambda lease, value: None), raising=False)


def the_first_view_is_enough(patch: pytest.MonkeyPatch) -> None:
    """The store waits until one agent has said what it knows, not for all that were live."""
    change(
        patch, (" or redis.call('ZCARD', AWAITED) > (known_loss and 0 or redis.call('ZCARD', CALLED)) then", " then")
    )


def those_who_come_are_enough(patch: pytest.MonkeyPatch) -> None:
    """A store that was started anew, and of which nobody who comes knows that it has lost writes, waits for nobody."""
    change(patch, ("recover = least + (count > 0 and wait or 0)", "recover = least\n  redis.call('DEL', AWAITED)"))


def judged_at_once(patch: pytest.MonkeyPatch) -> None:
    """A failure is judged when it is reported, whoever has not answered since."""
    change(patch, ("put_entries(job, 'silent', silent)", "put_entries(job, 'silent', {})"))


def the_new_fault_goes_first(patch: pytest.MonkeyPatch) -> None:
    """A gang that has failed again is formed anew before it is written down what had ended the generation before."""

    def unless_it_failed(cluster: Cluster, job: JobRecord, wall: float) -> Decision | None:
        return judge_before(cluster, job, wall) if find_fault(cluster, job, wall) is None else None

    patch.setattr(gang, "judge_before", unless_it_failed)


def one_trainer_is_enough(patch: pytest.MonkeyPatch) -> None:
    """A node says that its workers of the role that completes the job have ended well when the first of them has."""

    def first(
        report: PodReport | None, status: PodStatus, member: Member, role: str, _asked: Collection[str]
    ) -> PodReport | None:
        ranks = member.ranks_of(role)
        if not any(e.rank in ranks and e.code == 0 and not e.stopped for e in status.exits):
            return report
        return (report or PodReport(state="running")).model_copy(update={"completed": True})

    patch.setattr(running_pod, "with_completion", first)


def roles_start_at_once(patch: pytest.MonkeyPatch) -> None:
    """A role that comes after others is released when the first place of those is ready."""

    def at_once(job: JobRecord, generation: Generation, status: PodStatus) -> Release | None:
        if not status.waiting or not any(report.ready for report in generation.reports.values()):
            return None
        return Release(job.uid, generation.token, status.waiting, "some place is ready")

    patch.setattr(running_pod, "_release", at_once)


def roles_stop_at_once(patch: pytest.MonkeyPatch) -> None:
    """Servers do not wait for trainers on other nodes."""
    patch.setattr(stopping, "stops_later", lambda *_: ())


def a_part_that_has_ended_is_not_announced(patch: pytest.MonkeyPatch) -> None:
    """Two nodes with servers and trainers wait for each other until half of the grace is over."""
    patch.setattr(stopping, "newly_down", lambda *_: ())


def a_part_counts_as_the_whole(patch: pytest.MonkeyPatch) -> None:
    """A node whose trainers have ended has let go, though its servers run."""
    change(patch, ("if #ack.down > 0 then", "if #ack.down > 99 then"))


def roles_start_again_one_by_one(patch: pytest.MonkeyPatch) -> None:
    """A role that is started again as a whole starts on each node as soon as its workers there are dead."""
    patch.setattr(rounds, "agreed_round", rounds.asked_round)


def failures_ask_one_by_one(patch: pytest.MonkeyPatch) -> None:
    """A node stops its workers of such a role only when one of them fails."""

    def starts(
        generation: Generation, member: Member, reached: Mapping[str, int], down: Iterable[str]
    ) -> rounds.Round | None:
        what = next_round(generation, member, reached, down)
        return what if what is None or what.starts else None

    patch.setattr(running_pod, "next_round", starts)


def _least_one(one: Role) -> dict[str, object]:
    return {"replicas" if one.replicas else "nodes": one.size.model_copy(update={"min": 1})}


def roles_shrink_to_nothing(patch: pytest.MonkeyPatch) -> None:
    """A role goes on with fewer places than its file allows."""

    def fewer(roles: Sequence[Role], sites: Sequence[Site], known: Tree) -> Ground:
        return Ground([one.model_copy(update=_least_one(one)) for one in roles], sites, known)

    patch.setattr(placed_roles, "Ground", fewer)


def places_keep_their_gaps(patch: pytest.MonkeyPatch) -> None:
    """Of a role that has lost a place the others keep their indexes."""
    patch.setattr(places._Try, "_number_anew", lambda _self: None)


def roles_stay_small(patch: pytest.MonkeyPatch) -> None:
    """A role that has shrunk does not grow when there is room again."""
    patch.setattr(running, "_join_roles", lambda *_: Decision(None))


def silent_shims_left_alone(patch: pytest.MonkeyPatch) -> None:
    """A shim that does not answer its agent is not killed by its host."""
    patch.setattr(SimMachine, "_kill_silent", lambda machine, pod: None)


def only_groups_are_killed(patch: pytest.MonkeyPatch) -> None:
    """What has left its worker's group and session is not killed with it."""

    def end(pod: SimPod) -> None:
        pod.phase, pod.killing, pod.doomed = "exited", False, False

    patch.setattr(SimMachine, "_end_tree", lambda machine, pod: None)
    patch.setattr(SimPod, "end", end)


def what_is_not_reclaimable_comes_back(patch: pytest.MonkeyPatch) -> None:
    """What a job has borrowed comes back for another queue only if its own is ``reclaimable``."""

    def spares(reclaim: Reclaim, name: str, left: Resources, use: Resources) -> bool:
        guarantee = reclaim._owned(name).items()
        return all(getattr(left, resource) >= amount for resource, amount in guarantee if getattr(use, resource))

    patch.setattr(Reclaim, "_spares", spares)


def what_is_guaranteed_comes_back(patch: pytest.MonkeyPatch) -> None:
    """What a job has borrowed comes back for another queue only as far as its own has more than its guarantee."""
    patch.setattr(
        Reclaim, "_spares", lambda reclaim, name, _left, _use: reclaim._cluster.queues.by_name[name].reclaimable
    )  # fmt: skip


def records_of_nodes_are_believed(patch: pytest.MonkeyPatch) -> None:
    """What a node's record says is believed, whoever has written it."""
    change(patch, ("local function as_written(id)\n", "local function as_written(id)\n  do return true end\n"))


def a_copy_of_another_revision_agrees(patch: pytest.MonkeyPatch) -> None:
    """A node's record is believed where its copy is of another revision."""
    change(patch, ("  local same = true\n", "  local same = true\n  if copy[5] ~= node[5] then return true end\n"))


def marks_of_removals_are_believed(patch: pytest.MonkeyPatch) -> None:
    """A job that is marked as removed is removed for an agent that reads everything, whether it is there or not."""
    change(patch, (" or redis.call('ZSCORE', CHANGES, record) then -- no step leaves both", " then"))


def the_steps_count_by_any_times(patch: pytest.MonkeyPatch) -> None:
    """What a step counts by need not be what all agents were started with."""
    change(patch, ("if seconds and math.abs(tonumber(meta[field]) - 1000 * seconds) > 1 then", "if false then"))


def holders_need_not_be_nodes(patch: pytest.MonkeyPatch) -> None:
    """A generation waits for whoever is named, whether there is such a node or not."""
    change(patch, ("  return out, unknown\n", "  return out\n"))


def any_phase_is_believed(patch: pytest.MonkeyPatch) -> None:
    """A record says that its job has ended, and its revision is the one that all have read."""
    change(
        patch,
        ("(own.stands ~= stands or", "(string.match(own.stands, '^(.*) ') ~= string.match(stands, '^(.*) ') or"),
        ("if asked.seen and same_era and not damaged and has_other_texts(asked.seen) then", "if false then"),
    )


def members_need_not_be_there(patch: pytest.MonkeyPatch) -> None:
    """A node's job that does not name the node, at the revision at which it did, is as it was."""
    change(patch, (" or not held or held.life ~= asked.life) then", ") then"))


def the_newest_checkpoint_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """An agent knows of no other checkpoint than that of the record."""
    patch.setattr(AdmissionVerifier, "_keep_pointer", lambda _self, _job: None)


def texts_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """No beat looks whether a record has another control than its members have read."""
    change(patch, ("if asked.seen and same_era and not damaged and has_other_texts(asked.seen) then", "if false then"))


def refusals_are_believed(patch: pytest.MonkeyPatch) -> None:
    """An agent that is refused for what the record says asks again and again."""

    async def never(_self: Comparison, _uid: str, _refusal: object) -> bool:
        return False

    patch.setattr(Comparison, "written_over", never)
    change(patch, ("if asked.seen and same_era and not damaged and has_other_texts(asked.seen) then", "if false then"))


def what_does_not_count_comes_after_all(patch: pytest.MonkeyPatch) -> None:
    """A pointer that nobody signed, of a high number, cannot be replaced."""
    change(patch, ("  and (old.signature or '') == void.signature then", "  and false then"))


def a_refused_beat_goes_on_from_its_own_number(patch: pytest.MonkeyPatch) -> None:
    """A beat with a lower number than the record's does not read which one that is."""
    change(patch, ("node.seq, node.seq)", "node.seq)"))


def a_record_may_call_its_own_life_dead(patch: pytest.MonkeyPatch) -> None:
    """A node whose present life is among its dead ones must take a new one."""
    change(patch, ("or dead.mine and not same then", "or dead.mine then"))


def any_number_may_be_the_highest(patch: pytest.MonkeyPatch) -> None:
    """A generation gets the number after any that is kept for its job's name."""
    change(patch, ("found = #text <= 15 and ", "found = "), (" and found <= least + FURTHER", ""))


def what_is_in_the_history_has_ended(patch: pytest.MonkeyPatch) -> None:
    """A record among those of the history is believed, whether a step has moved it there or not."""
    change(patch, ("function past.has(uid)\n", "function past.has(uid)\n  do return past.read(uid) end\n"))


def older_records_are_read(patch: pytest.MonkeyPatch) -> None:
    """An agent is sent a record that is older than the one that a step has left."""
    change(patch, ("if has < tonumber(changed[i + 1]) then", "if has < 0 then"))


def users_may_fill_all_that_is_read(patch: pytest.MonkeyPatch) -> None:
    """Users submit as long as each is within his own limits, however much all of them have."""
    change(patch, ("  if exceeds(together, room) then", "  if false then"))


MUTANTS = (
    Mutant(users_may_fill_all_that_is_read, provocations.users_submit_as_long_as_they_may),
    Mutant(records_of_nodes_are_believed, provocations.its_record_denies_a_nodes_life),
    Mutant(a_copy_of_another_revision_agrees, provocations.its_record_denies_a_nodes_life),
    Mutant(marks_of_removals_are_believed, provocations.it_is_marked_as_removed),
    Mutant(the_steps_count_by_any_times, provocations.its_node_dies_while_no_gap_is_short),
    Mutant(holders_need_not_be_nodes, provocations.its_record_names_a_node_that_there_is_not),
    Mutant(any_phase_is_believed, provocations.its_record_says_that_it_has_failed),
    Mutant(members_need_not_be_there, provocations.its_record_lacks_a_member),
    Mutant(the_newest_checkpoint_is_forgotten, provocations.its_checkpoint_is_turned_back),
    Mutant(texts_are_not_compared, provocations.its_control_is_another_one),
    Mutant(refusals_are_believed, provocations.its_record_may_not_be_large_enough),
    Mutant(what_does_not_count_comes_after_all, provocations.its_checkpoint_is_turned_back),
    Mutant(a_refused_beat_goes_on_from_its_own_number, provocations.its_record_counts_ahead),
    Mutant(a_record_may_call_its_own_life_dead, provocations.its_record_calls_its_life_dead),
    Mutant(any_number_may_be_the_highest, provocations.its_highest_number_is_where_lua_counts_no_more),
    Mutant(what_is_in_the_history_has_ended, provocations.its_record_is_moved_into_the_history),
    Mutant(older_records_are_read, provocations.an_older_record_is_there_when_an_agent_starts),
    Mutant(only_groups_are_killed, provocations.a_process_outside_its_group),
    Mutant(silent_shims_left_alone, provocations.a_shim_hangs),
    Mutant(one_trainer_is_enough, provocations.trainers_end_one_by_one),
    Mutant(roles_start_at_once, provocations.trainers_end_one_by_one),
    Mutant(roles_stop_at_once, provocations.roles_stop_in_order),
    Mutant(a_part_that_has_ended_is_not_announced, provocations.roles_stop_in_order),
    Mutant(a_part_counts_as_the_whole, provocations.roles_stop_in_order),
    Mutant(roles_start_again_one_by_one, provocations.a_role_is_started_again),
    Mutant(failures_ask_one_by_one, provocations.a_role_is_started_again),
    Mutant(roles_shrink_to_nothing, provocations.loses_one_node_and_then_another),
    Mutant(places_keep_their_gaps, provocations.loses_one_node_and_then_another),
    Mutant(roles_stay_small, provocations.loses_one_node_and_then_another),
    Mutant(judged_at_once, provocations.peers_hide_why_they_fail),
    Mutant(the_new_fault_goes_first, provocations.the_next_fault_comes_before_the_verdict),
    Mutant(holders_forgotten, provocations.falls_silent_and_scales),
    Mutant(freed_and_still_counted, provocations.falls_silent_and_scales),
    Mutant(ack_before_stopping, provocations.falls_silent_and_scales),
    Mutant(unseen_is_quiet, provocations.scaled_in_while_its_agent_restarts),
    Mutant(an_order_on_its_way_is_quiet, provocations.scaled_in_while_it_is_ordered_to_start),
    Mutant(a_primary_is_its_process, provocations.fails_back_with_writes_lost),
    Mutant(who_answers_is_the_failsafe_member, provocations.one_address_for_two),
    Mutant(lease_shorter_than_the_fence, provocations.falls_silent_and_scales),
    Mutant(guard_asleep, provocations.falls_silent_and_scales),
    Mutant(half_a_gang, provocations.falls_silent_and_scales),
    Mutant(merged_by_arrival, provocations.store_loses_writes),
    Mutant(a_newer_view_ends_leases, provocations.back_before_its_loss_is_known),
    Mutant(deciding_while_recovering, provocations.store_loses_writes),
    Mutant(anybody_commits, provocations.a_commit_comes_late),
    Mutant(one_yes_is_enough, provocations.part_of_the_members),
    Mutant(failsafe_members_need_not_let_go, provocations.all_failsafe_members),
    Mutant(let_go_unread, provocations.back_one_by_one),
    Mutant(promised_unwritten, provocations.forgetful),
    Mutant(reported_by_an_old_table, provocations.lets_go_as_it_is_asked),
    Mutant(promises_forgotten, provocations.its_lease_process_forgets),
    Mutant(promises_before_a_boot_unknown, provocations.boots_after_it_lent),
    Mutant(leaves_with_promises, provocations.leaves_after_it_lent),
    Mutant(lends_while_served, provocations.one_alone),
    Mutant(counted_from_the_answer, provocations.back_one_by_one),
    Mutant(signatures_not_looked_at, provocations.forged_and_stolen),
    Mutant(ends_not_remembered, provocations.forged_and_stolen),
    Mutant(leaves_before_its_workers_are_gone, provocations.its_shim_hangs_while_its_agent_is_stuck),
    Mutant(lets_go_with_promises, provocations.lets_go_after_it_lent),
    Mutant(takes_the_time_of_all, provocations.one_of_two_jobs_waits_for_a_stuck_node),
    Mutant(lets_go_before_its_workers_are_gone, provocations.one_of_two_jobs_waits_for_a_stuck_node),
    Mutant(what_runs_stands_still, provocations.one_of_two_jobs_stands_still_on_a_node_that_is_cut_off),
    Mutant(a_node_stands_still_as_a_whole, provocations.one_of_two_jobs_stands_still_on_a_node_that_is_cut_off),
    Mutant(departures_not_saved, provocations.its_lease_process_dies_as_it_leaves),
    Mutant(renewed_in_any_era, provocations.the_store_goes_back_while_agents_are_dead),
    Mutant(every_renewal_is_a_usual_one, provocations.the_store_goes_back_while_agents_are_dead),
    Mutant(a_wake_brings_nothing, provocations.a_large_gang_forms_again),
    Mutant(every_acknowledgement_is_the_whole_step, provocations.a_large_gang_forms_again),
    Mutant(acknowledged_and_still_held, provocations.a_large_gang_forms_again),
    Mutant(marks_lost_unnoticed, provocations.removals_that_an_agent_sleeps_through),
    Mutant(acknowledged_unsaved, saved.dark_after_an_answer),
    Mutant(one_disk_is_enough, saved.dark_after_an_answer),
    Mutant(reported_before_it_was_written, saved.dark_after_an_answer),
    Mutant(disks_not_offered, saved.all_lose_power),
    Mutant(the_first_view_wins, saved.off_while_it_ended),
    Mutant(the_first_view_wins, provocations.an_old_view_comes_first),
    Mutant(the_first_view_is_enough, provocations.an_old_view_comes_first),
    Mutant(asked_again_at_once, provocations.overloaded),
    Mutant(what_is_not_reclaimable_comes_back, provocations.nodes_that_others_may_not_take_back),
    Mutant(what_is_guaranteed_comes_back, provocations.nodes_that_others_may_not_take_back),
    Mutant(silence_not_recorded, provocations.the_agent_of_a_spare_hangs),
    Mutant(a_silent_agent_is_given_work, provocations.the_agent_of_a_spare_hangs),
    Mutant(silent_for_ever, provocations.the_agent_of_a_spare_hangs),
    Mutant(setbacks_forgotten, provocations.a_node_never_acknowledges),
    Mutant(setbacks_forgotten, provocations.a_newcomer_is_broken),
    Mutant(newcomers_are_founders, provocations.a_newcomer_is_broken),
    Mutant(those_who_come_are_enough, provocations.the_store_goes_back_and_one_alone_comes),
)


def main() -> int:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # the agents' logs are not the point here,
    logging.getLogger("asyncio").disabled = True  # nor is where a broken invariant was met
    survivors = 0
    print("| broken rule | caught by | with seed |\n|---|---|---|")
    for mutant in MUTANTS:
        with pytest.MonkeyPatch.context() as patch:
            mutant.mutate(patch)
            seed = caught(mutant.provocation, SEEDS)
        survivors += seed is None
        print(f"| {mutant.rule} | {mutant.provocation.__name__} | {'SURVIVES' if seed is None else seed} |", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
