"""The timing values and the inequalities between them. One copy lives in the store; an agent whose values differ is
refused.

Derivation: with clock rates within 1 % of each other (two nodes differ by at most 2 %), a node's workers are gone at
``fence * 1.02 + kill`` after its last good renewal was sent; the store counts the lease from when it served that
renewal, and its served clock may run ``credit`` ahead of a silent moment. So a lapse is seen only after the workers
are gone when ``fence * 1.02 + credit + kill <= lease``.
"""

from __future__ import annotations

from nodeagent.model.base import Record

RELEASE = 1.05
"""Work on failsafe time counts as gone after this many times ``failsafe_limit``: a node's clock measures the limit, and
the store's clock measures this. The scripts have the same value (``_clock.lua``)."""


class Timing(Record):
    """All values are in seconds."""

    heartbeat: float = 0.5
    store_timeout: float = 0.5
    credit: float = 0.5
    """The most that the served clock advances between two calls."""
    gap: float = 1.5
    """A silence longer than this (or a clock step) opens an amnesty of one lease."""
    lease: float = 3.0
    fence: float = 2.2
    """A shim stops its workers this long after the last good renewal was sent."""
    kill: float = 0.2
    """The longest time from a shim's deadline until its workers are gone."""
    stuck: float = 10.0
    """After SIGKILL, the time until a process that still exists is declared stuck."""
    form_margin: float = 15.0
    """A forming generation's deadline is the job's grace (if planned) plus this."""
    cooldown: float = 30.0
    """A job below its target grows again when its gang and the new node have both been steady for this long."""
    failsafe: float = 1.0
    """After this time without a good renewal, a node requests failsafe time from the failsafe members of its jobs."""
    promise: float = 3.0
    """A failsafe member that gave failsafe time lets nothing newer start for this long."""
    failsafe_limit: float = 86400.0
    """The longest that workers run on failsafe time."""
    turn: float = 0.1
    """Each next proposer waits this much longer than the previous one."""
    early: float = 30.0
    """A worker that exits with an error this soon after the job's first start fails the job at once. One that asks to
    be re-formed this soon after its generation's start, again and again, makes the job back off."""

    def problems(self) -> list[str]:
        """Every inequality that does not hold, as a sentence with the numbers; empty if all hold."""
        out = []
        gone = self.fence * 1.02 + self.credit + self.kill
        if gone > self.lease + 1e-9:
            out.append(
                f"fence x 1.02 + credit + kill = {gone:.3f} s is longer than lease = {self.lease} s: "
                f"a node could be replaced while its workers still run; lower fence or raise lease"
            )
        if self.heartbeat + 2 * self.store_timeout >= self.fence:
            out.append(
                f"heartbeat + 2 x store_timeout = {self.heartbeat + 2 * self.store_timeout:.3f} s is not below fence = "
                f"{self.fence} s: one slow reply would stop healthy workers; lower them or raise fence and lease"
            )
        if not self.heartbeat <= self.credit < self.gap:
            out.append(
                f"heartbeat <= credit < gap does not hold ({self.heartbeat}, {self.credit}, {self.gap}): "
                f"silent nodes would never lapse, or every pause would count as silence"
            )
        if self.fence * 1.02 + self.kill > self.promise:
            out.append(
                f"fence x 1.02 + kill = {self.fence * 1.02 + self.kill:.3f} s is longer than promise = "
                f"{self.promise} s: a failsafe member could let go while workers still run on failsafe time; "
                "raise promise"
            )
        latest = (self.failsafe_limit + self.fence) * 1.02 + self.kill
        if latest > self.failsafe_limit * RELEASE + self.lease:
            out.append(
                f"(failsafe_limit + fence) x 1.02 + kill = {latest:.3f} s is longer than failsafe_limit x {RELEASE} + "
                f"lease = {self.failsafe_limit * RELEASE + self.lease:.3f} s: a failsafe member could be given up "
                "while workers still run on its time; lower fence or raise lease"
            )
        if not self.heartbeat <= self.failsafe <= self.fence - 2 * self.heartbeat:
            out.append(
                f"failsafe = {self.failsafe} s is not within heartbeat = {self.heartbeat} s and fence - 2 x heartbeat "
                f"= {self.fence - 2 * self.heartbeat:.3f} s: there would be no time to ask the failsafe members"
            )
        if min(self.heartbeat, self.store_timeout, self.kill, self.form_margin, self.turn) <= 0:
            out.append("heartbeat, store_timeout, kill, form_margin and turn must be above zero")
        return out


def millis(seconds: float) -> int:
    """Seconds to whole milliseconds, the unit of served time."""
    return round(seconds * 1000)
