"""Repairs this node, one repair at a time: claims it, waits until the hardware is free, runs the command, has it
verified. What was begun lies on disk: it is known after a restart of the agent, and after a reboot.

What is to be done is ``plan/repair.py``'s decision, what a verdict becomes the judge's. Must never hold up the agent's
loop, never begin what is not written down, and never begin while the store has not got the claim.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog

from nodeagent.agent.published import Advert
from nodeagent.agent.repaircommands import CommandRunner, Verifier, Ward
from nodeagent.model.health import LABEL, Attempt, Claim, Kind, RepairOutcome, RepairState, Verdict
from nodeagent.osutil.clock import Clock
from nodeagent.osutil.linux import open_plain, write_atomic
from nodeagent.plan import repair as plan
from nodeagent.plan.cluster import Cluster
from nodeagent.pods.base import PodStatus
from nodeagent.store.base import StoreRefusedError, StoreUnavailableError

TICK = 0.5
"""Seconds between two looks."""
AGAIN = 30.0
"""Seconds after its repair in which a fault that is read again may yet go; then the repair did not help."""
SETTLE = 300.0
"""Seconds after its repair in which a device has to be read without a fault; else that did not help."""


class Side(Protocol):
    """What the repairs need of the agent."""

    @property
    def settled(self) -> bool:
        """The store answers, and has all that this agent knows."""
        ...

    def cluster(self) -> Cluster: ...

    def pods(self) -> Mapping[str, PodStatus]: ...

    def publish_repair(self, repair_state: RepairState) -> None:
        """Have the others hear of it at once."""
        ...

    async def refresh(self) -> None: ...

    async def round_over(self) -> None:
        """Wait until a round that began before is over."""
        ...

    @property
    def advert(self) -> Advert:
        """Tells of this node."""
        ...


@dataclass(frozen=True, slots=True)
class RepairBounds:
    """What the config says."""

    means: plan.Means
    deadline: float


class Repairer:
    """Made with the agent: what was under way before its start is published from its first join on."""

    def __init__(
        self, node: str, boot: str, bounds: RepairBounds, ward: Ward, log: RepairLog, runner: CommandRunner,
        clock: Clock, counted: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self._node, self._boot, self._bounds = node, boot, bounds
        self._ward, self._repairs, self._runner, self._clock, self._counted = ward, log, runner, clock, counted
        self._log = structlog.get_logger("repair").bind(node=node)
        self._past: tuple[Attempt, ...] = ()
        self._verifier = Verifier(ward, runner, clock, counted)
        self._watched: frozenset[tuple[str, str]] = frozenset()
        """Verdicts (rule, device) on probation, as last seen."""
        kinds = tuple(sorted(bounds.means.whole))
        self._unreadable = ""
        try:
            self._past = log.load()
        except ValueError as error:  # how often it was repaired today nobody knows
            self._unreadable = str(error)
            self._log.error("nothing is repaired", why=self._unreadable)
        last = self._under_way()
        claim = None if last is None else _claim(last, clock.wall())
        self.repair_state = RepairState(kinds=kinds, claim=claim, why=self._unreadable)
        """What the others are to hear."""
        self._side: Side

    async def run(self, side: Side) -> None:
        """Until cancelled; a command that runs then is left to itself, and found by the next start."""
        self._side = side
        await self._resume()
        while True:
            if not self._unreadable and side.settled:
                self._see_off()
                await self._look()
            await asyncio.sleep(TICK)

    def _see_off(self) -> None:
        """Tell of those whose probation ended well."""
        verdicts = self._ward.verdicts
        for rule, device in sorted(self._watched - {(v.rule, v.device) for v in verdicts}):
            self._side.advert.note(
                "Readmitted", f"{device or 'the node'} ({rule}): its probation is over, it gets work again"
            )
        self._watched = frozenset((v.rule, v.device) for v in verdicts if v.stage == "probation" and v.bars)
        self._verifier.forget()

    # --- deciding ---------------------------------------------------------------------------------

    async def _look(self) -> None:
        claim = self.repair_state.claim
        if claim is None:
            await self._begin()
        elif claim.phase == "verifies":
            await self._verify_claim(claim)
        elif self._announced(claim):
            await self._onward(claim)

    async def _begin(self) -> None:
        verdict = plan.call(self._ward.verdicts, self._bounds.means, self._past)
        if verdict is not None:
            await self._call(verdict)
        stuck = await self._verify_others()
        claim, why = plan.wanted_claim(
            self._side.cluster(), self._node, self._ward.verdicts, self._bounds.means, self._past, self._use(),
            self._clock.wall(),
        )  # fmt: skip
        await self._publish(claim, stuck or why)

    async def _onward(self, claim: Claim) -> None:
        step = plan.onward(
            self._side.cluster(), self._node, claim, self._ward.verdicts, self._bounds.means, self._past, self._use(),
            self._clock.wall(),
        )  # fmt: skip
        if step.phase is None:
            await self._publish(None, step.why)
        elif step.phase == "runs":
            await self._repair(claim)
        else:
            await self._publish(self._moved(claim, step))
            if step.phase == "holds" != claim.phase:
                self._log.info("hardware is set aside for its repair", repair=claim.kind, device=claim.device)
                await self._side.round_over()  # it may be about to start something there

    def _announced(self, claim: Claim) -> bool:
        """The store has the claim as it is here, so everyone who begins from now on sees it."""
        me = self._side.cluster().nodes.get(self._node)
        return me is not None and me.facts.repair_state is not None and me.facts.repair_state.claim == claim

    def _moved(self, claim: Claim, step: plan.Next) -> Claim:
        assert step.phase is not None
        since = claim.since if step.phase == claim.phase else round(self._clock.wall(), 3)
        return claim.model_copy(update={"phase": step.phase, "since": since, "why": step.why})

    def _use(self) -> plan.HardwareUse:
        pods = self._side.pods()
        return plan.HardwareUse(
            [uid for uid, pod in pods.items() if not pod.quiet],
            [uid for uid, pod in pods.items() if pod.phase == "stuck"],
            self._ward.processes,
            self._ward.strangers,
            self._ward.expected,
        )

    async def _publish(self, claim: Claim | None, why: str = "") -> None:
        repair_state = RepairState(kinds=self.repair_state.kinds, claim=claim, why="" if claim is not None else why)
        if repair_state == self.repair_state:
            return
        self.repair_state = repair_state
        self._side.publish_repair(repair_state)
        with suppress(StoreUnavailableError, StoreRefusedError):  # it goes with the next beat that is answered
            await self._side.refresh()

    # --- repairing ----------------------------------------------------------------------------------

    async def _repair(self, claim: Claim) -> None:
        attempt = self._attempt(claim.kind, claim.rule, claim.device, claim.whole)
        if not await self._keep(attempt):
            await self._publish(None, "what is repaired cannot be written down: see the agent's log")
            return
        now = round(self._clock.wall(), 3)
        await self._publish(claim.model_copy(update={"phase": "runs", "since": now, "why": ""}))
        self._announce("RepairStarted", attempt, "began")
        pause = claim.kind == "reset_gpu"
        if pause:
            await self._ward.pause()
        try:
            ended = await self._runner.repair(attempt, self._started)
        finally:
            if pause:
                self._ward.resume()
        attempt = self._past[-1]
        if claim.kind == "reboot" and ended.code == 0:
            await asyncio.sleep(max(0.0, attempt.at + self._bounds.deadline - self._clock.wall()))
            await self._failed(attempt, f"{ended.text}, and the machine is still up after {self._bounds.deadline:g} s")
        elif ended.code == 0:
            await self._done(attempt, ended.text)
        else:
            await self._failed(attempt, ended.text)

    async def _started(self, pid: int, start: int) -> None:
        await self._keep(self._past[-1].model_copy(update={"pid": pid, "start": start}))

    async def _done(self, attempt: Attempt, text: str) -> None:
        attempt = attempt.model_copy(update={"outcome": "done", "text": text})
        await self._keep(attempt)
        if attempt.kind == "reset_gpu":
            every = {v.device for v in self._ward.verdicts if v.device} if attempt.whole else {attempt.device}
            self._ward.repaired(every, "reset_gpu")
        self._announce("RepairDone", attempt, text)
        await self._publish(_claim(attempt, self._clock.wall()))

    async def _failed(self, attempt: Attempt, text: str) -> None:
        key = (attempt.rule, attempt.device)
        if any((v.rule, v.device) == key and v.action == attempt.kind for v in self._ward.verdicts):
            self._ward.escalate({key}, f"{LABEL[attempt.kind]} did not help: {text}")
        await self._over(attempt, "failed", text)

    async def _over(self, attempt: Attempt, outcome: RepairOutcome, text: str) -> None:
        attempt = attempt.model_copy(update={"outcome": outcome, "text": text, "over": True})
        await self._keep(attempt)
        self._counted(attempt.kind, outcome)
        if outcome != "done":
            self._announce("RepairFailed", attempt, text)
        await self._publish(None)

    async def _call(self, verdict: Verdict) -> None:
        attempt = self._attempt("service", verdict.rule, verdict.device, whole=False)
        attempt = attempt.model_copy(update={"text": f"{verdict.text}: {verdict.raw}"})
        if not await self._keep(attempt):
            return
        ended = await self._runner.repair(attempt, self._started)
        outcome: RepairOutcome = "done" if ended.code == 0 else "failed"
        attempt = self._past[-1].model_copy(update={"outcome": outcome, "text": ended.text, "over": True})
        await self._keep(attempt)
        self._counted("service", outcome)
        self._announce("ServiceCalled", attempt, ended.text)

    # --- verifying ----------------------------------------------------------------------------------

    async def _verify_claim(self, claim: Claim) -> None:
        """After a repair of ours: its devices, and with the node whatever else waits on it."""
        attempt = self._under_way()
        if attempt is None:
            await self._publish(None)
            return
        verdict = next((v for v in self._ward.verdicts if (v.rule, v.device) == (claim.rule, claim.device)), None)
        if verdict is None or verdict.stage == "probation":
            await self._over(attempt, "done", attempt.text)
            return
        waiting = self._ward.waiting if claim.whole else self._ward.waiting & {claim.device}
        if claim.device in waiting:
            stuck = await self._verifier.verify(waiting, claim.whole, self._side.advert.note)
            if stuck is not None and stuck.over:
                await self._over(attempt, "interrupted", stuck.reported)
            elif stuck is not None:
                await self._publish(claim.model_copy(update={"why": stuck.reported}))
            elif any((v.rule, v.device, v.stage) == (claim.rule, claim.device, "active") for v in self._ward.verdicts):
                await self._over(attempt, "failed", "it was verified, and failed")
        elif verdict.stage == "active" and verdict.seen > claim.since and self._clock.wall() - claim.since > AGAIN:
            await self._failed(attempt, "its fault is there again")
        elif self._clock.wall() - claim.since > SETTLE:
            await self._failed(attempt, f"it could not be read without a fault within {SETTLE:g} s")

    async def _verify_others(self) -> str:
        """What was repaired by other hands than ours, or has healed by itself; why one of them is not verified."""
        stuck = ""
        for device in sorted(self._ward.waiting):
            mine = [v for v in self._ward.verdicts if v.device == device and v.stage == "repaired"]
            if all(not v.bars for v in mine):
                self._ward.passed([device])  # it may be at work
                continue
            free = Claim(kind="reset_gpu", rule="", device=device, whole=not device, phase="verifies", since=0.0)
            busy = plan.users(self._side.cluster(), self._node, free, self._use())
            tries = None if busy else await self._verifier.verify({device}, not device, self._side.advert.note)
            why = f"it is verified once it is free: {busy}" if busy else tries.reported if tries is not None else ""
            stuck = stuck or why
        return stuck

    # --- after a start --------------------------------------------------------------------------------

    async def _resume(self) -> None:
        """A repair that was under way at this start: never done again, only looked after."""
        attempt = self._under_way()
        if attempt is None or attempt.outcome == "done":
            return
        if attempt.boot != self._boot and attempt.kind == "reboot":
            await self._done(attempt, "the machine was rebooted")
            return
        if attempt.boot == self._boot:
            left = attempt.at + self._bounds.deadline - self._clock.wall()
            left = min(left, self._bounds.deadline)  # a clock that was set back makes nobody wait for longer
            if attempt.kind == "reset_gpu":
                await self._ward.pause()
            try:
                await self._runner.outlived(attempt, left)
            finally:
                self._ward.resume()
            if attempt.kind == "reboot":
                await asyncio.sleep(max(0.0, min(attempt.at + self._bounds.deadline - self._clock.wall(), left)))
                await self._failed(attempt, "the agent was started again, and the machine was not")
                return
        await self._over(attempt, "interrupted", "the agent was started again before it had ended")

    # --- remembering ------------------------------------------------------------------------------------

    def _under_way(self) -> Attempt | None:
        last = self._past[-1] if self._past else None
        return last if last is not None and not last.over else None

    def _attempt(self, kind: Kind, rule: str, device: str, whole: bool) -> Attempt:
        at = round(self._clock.wall(), 3)
        return Attempt(kind=kind, rule=rule, device=device, whole=whole, at=at, boot=self._boot)

    async def _keep(self, attempt: Attempt) -> bool:
        """Write it down: in the place of the one under way, else as a new one. False if that failed."""
        past = self._past if self._under_way() is None else self._past[:-1]
        try:
            await self._repairs.save((*past, attempt))
        except OSError as error:
            self._log.error("repairs cannot be written down", why=error.strerror)
            return False
        self._past = (*past, attempt)
        return True

    def _announce(self, event: str, attempt: Attempt, text: str) -> None:
        what = f"{LABEL[attempt.kind]}{f' of {attempt.device}' if attempt.device else ''} ({attempt.rule}): {text}"
        self._log.warning(event, what=what)
        self._side.advert.note(event, what)


def _claim(attempt: Attempt, wall: float) -> Claim:
    """What a repair that was begun claims."""
    return Claim(
        kind=attempt.kind, rule=attempt.rule, device=attempt.device, whole=attempt.whole,
        phase="verifies" if attempt.outcome == "done" else "runs", since=round(wall, 3),
    )  # fmt: skip


VERSION = 1
MOST_KEPT = 64
"""Repairs remembered; the oldest go first."""


class RepairLog(Protocol):
    """Where a node's repairs are remembered."""

    def load(self) -> tuple[Attempt, ...]:
        """All of them, oldest first. Raises ValueError when they cannot be understood: then nobody knows how many
        there were."""
        ...

    async def save(self, attempts: Sequence[Attempt]) -> None:
        """Replace them, durably. Raises OSError."""
        ...


class FileRepairLog:
    """In one file of the agent's ``state`` folder."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def load(self) -> tuple[Attempt, ...]:
        try:
            with open_plain(self.file) as file:
                data: dict[str, Any] = json.loads(file.read())
            if data["version"] != VERSION:
                raise ValueError(f"it is of version {data['version']}, this agent reads {VERSION}")
            return tuple(Attempt.model_validate(one) for one in data["repairs"])
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = str(error).splitlines()[0]
            raise ValueError(f"{self.file} cannot be read ({what}): see what was repaired, then remove it") from error

    async def save(self, attempts: Sequence[Attempt]) -> None:
        kept = [one.model_dump() for one in attempts[-MOST_KEPT:]]
        text = json.dumps({"version": VERSION, "repairs": kept})
        await asyncio.to_thread(write_atomic, self.file, text, durable=True)
