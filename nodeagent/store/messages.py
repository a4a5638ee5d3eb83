"""Arguments and replies of the store's steps; for each of the big steps, what it checks and does.

``base.py`` defines the steps themselves. Must never hold behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from nodeagent.model.base import Record
from nodeagent.model.job import Admission, BudgetEntry, Control, JobRecord, Outcome, Phase, Setback
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.node import Incarnation, NodeFacts, NodeRecord, Readiness
from nodeagent.model.pod import PodState
from nodeagent.model.queue import QueuesRecord
from nodeagent.model.timing import Timing
from nodeagent.model.usage import UsageDay
from nodeagent.model.window import WindowsRecord
from nodeagent.model.world import Cause, Member, Token

PAGE_BYTES = 1024 * 1024
"""The most bytes of records in one reply or one offer; a larger record is sent alone."""


class Forgotten(Record):
    """A node that an operator confirmed to be down, after ``forget``."""

    node: NodeRecord | None
    """None: the same request removed it before."""
    removed: bool
    """Its record and its cordon are removed."""
    rev: int
    """Of the change; or, if the same request was carried out before, one that is no older."""


class NewJob(Record):
    """A job to submit. ``control``: of rev 1."""

    uid: str
    spec: JobSpec
    control: Control
    admission: Admission | None = None


class Saved(Record):
    """What a node has on its disk: everything up to ``rev`` of ``era``."""

    era: str
    rev: int = Field(ge=0)


class Saves(Record):
    """What nodes have reported as saved on their disks."""

    at: str
    """Pass this to the next call: it then waits for later reports."""
    nodes: dict[str, Saved] = {}


class JoinReply(Record):
    """The cluster's identity and clock, as of now."""

    cluster_uid: str
    served: int


class Unread(Record):
    """A record that cannot be decoded: another program wrote it, or damaged it."""

    key: str
    """``job:<uid>``, ``node:<id>``, ``queues``, ``windows``, ``usage:<day>``, or of the history ``past:<uid>``."""
    why: str


class PastJobs(Record):
    """Jobs of the history, the oldest end first."""

    jobs: tuple[JobRecord, ...]
    unread: tuple[Unread, ...] = ()
    """Those whose record cannot be read."""
    place: str = ""
    """Of a page: where the next one begins; empty: it has nothing, and there is no next one."""
    exact: bool = False
    """Of a search: what was found has this very uid or name."""


class BeatReply(Record):
    """What a beat brings back. Records changed since the ``rev`` that was sent, oldest change first."""

    cluster_uid: str
    served: int
    lapsed: tuple[str, ...]
    """Every node that has lapsed and neither left nor was declared lost. The latest to lapse comes first."""
    sheltered: tuple[str, ...] = ()
    """Other nodes whose lease has ended too, but which an amnesty protects."""
    silent: str = ""
    """A text that identifies ``lapsed`` and ``sheltered``: send it with the next beat."""
    same: bool = False
    """Both lists equal those of the ``silent`` that was sent, and come empty."""
    beyond: tuple[str, ...] = ()
    """Kinds of records (``nodes``) of which the store has more than an agent reads."""
    unfinished: bool = False
    """Of the records only a part could be read: it brings none, and the next beat asks for the same."""
    next_lapse: int | None
    """Served milliseconds until the next lease (other than the caller's) ends; None if there is no other lease."""
    nodes: tuple[NodeRecord, ...] = ()
    jobs: tuple[JobRecord, ...] = ()
    queues: QueuesRecord | None = None
    """Only when the queues changed."""
    windows: WindowsRecord | None = None
    """Only when the windows changed."""
    usage: tuple[UsageDay, ...] = ()
    gone: tuple[str, ...] = ()
    """Removed records: ``job:<uid>``, ``node:<id>`` or ``usage:<day>``."""
    unread: tuple[Unread, ...] = ()
    """Changed records that cannot be decoded."""
    rev: int
    """The revision to send with the next beat."""
    more: bool = False
    """More changes wait (at most 256 records come in one reply): beat again at once."""
    event: str = "0-0"
    """Id of the newest event: wait for later ones."""
    era: str = ""
    asked: int = 0
    """The newest revision that an operator wrote: that operator's command waits until disks have it."""
    recovering: bool = False
    """The store is recovering: the reply brings no records, and ``rev`` is the one that was sent."""
    recovers: int = 0
    """Only while recovering: served milliseconds until the recovery ends at the latest."""
    awaited: tuple[str, ...] = ()
    """Only while recovering: nodes that the store waits for, since they may know what it has lost; the first few by
    name."""
    awaits: int = 0
    """Only while recovering: the number of nodes that the store waits for."""


class Note(Record):
    """Something about its node that an agent reports for the event log."""

    kind: str
    text: str


class OwnJob(Record):
    """A job that runs on the node of who beats, as its view has it."""

    uid: str
    rev: int = 0
    stands: str = ""
    """Number, id and state of its newest generation, and its phase, at that revision."""


class Beat(Record):
    """One heartbeat: renews the lease and brings changes both ways."""

    node: str
    incarnation: Incarnation
    seq: int
    """Grows with each beat of this start; an older beat is refused (``stale``)."""
    rev: int
    """Records changed after this revision are returned; 0 for all."""
    era: str = ""
    """The era of the view that ``rev`` belongs to; empty if nothing has been read yet."""
    top: int = 0
    """The newest revision in the view, if replies of the agent's own steps brought more than ``rev``."""
    facts: NodeFacts | None = None
    """Only when they changed."""
    readiness: dict[str, Readiness] | None = None
    """Only when it changed (whole map)."""
    pods: tuple[PodState, ...] | None = None
    """Those pods of this node that have changed, and now and then all, to refresh their TTL. The store lets the pod
    keys of others expire."""
    saved: Saved | None = None
    """Only when it changed. The store passes it to callers of ``Store.saved`` if it is the first of this node that
    covers the last write of an operator. It is no part of the node's record, so it raises no revision."""
    notes: tuple[Note, ...] = ()
    runs: tuple[OwnJob, ...] = ()
    """Jobs that have not ended and of which this node is a member or holder, by its view. The store checks that it
    still has their records and keys, and that a record of the same revision has the same generation."""
    ahead: dict[str, int] = {}
    """Jobs (uids) that replies of the agent's own steps or wakes have brought up to this revision, which is above
    ``rev``. A beat does not bring them again."""
    damaged: tuple[str, ...] = ()
    """Records (``job:<uid>``) of jobs that run here, if they could not be decoded or were reported as removed."""
    silent: str = ""
    """``BeatReply.silent`` of the lists that this agent has."""
    looks: int = Field(default=0, ge=0)
    """The number of this agent's look for damage, which chooses the one of ``runs`` that is looked at; 0: it looks for
    none. The store does not keep the ``seq`` of a beat that neither looks nor brings nor reads anything."""
    unanswered: bool = False
    """What the agent asked before was not answered, and perhaps no answer reaches it: its node stays ``mute``."""
    room: int = Field(default=PAGE_BYTES, ge=1, le=PAGE_BYTES)
    """The most bytes of records in the reply; a larger record is sent alone."""


@dataclass(frozen=True, slots=True)
class Woken:
    """Why an agent's wait is over."""

    event: str
    """The newest event that concerns it, or the one after which it waited."""
    jobs: tuple[JobRecord, ...] = ()
    """The jobs that have changed, as they are now, if that is all it has to know; else empty, and a beat brings it."""


class StoreCopy(Record):
    """What an agent knows of the store, or a page of it, offered to a store that may have lost it.

    The view is everything up to ``rev`` of ``era``, and single newer records from replies of the agent's own steps. In
    a view that is not complete ``rev`` is 0, and all records are single ones. ``top`` is the newest revision among them
    all.
    Refused: ``timing``; ``foreign`` if the store has another ``cluster_uid`` and jobs; ``far`` if ``top`` or ``served``
    is so high that only somebody's hand can have made it so, and the store's own is not. The offer takes over a store
    (the store takes the uid and opens a recovery) in three cases: the store is empty; its revision is lower than
    ``top``; or it has another uid but never had a job, and no earlier offer that ``holds`` jobs named that uid (if this
    offer holds none: no earlier offer at all). During a recovery the newest complete view wins: if ``rev`` is above
    ``Restored.known``, each record of the store that is not newer than ``rev`` becomes the offer's version, and records
    that the store lacks are added. Any other record is taken if its revision is above ``known`` and above the stored
    one. A taken record keeps its revision. ``uids``, on the last page: jobs that are not among them and not newer than
    ``rev`` were removed; then ``known`` = rev. Names, highest numbers (which never decrease), order, devices and
    cordons follow the records. A life is lost if either side says so; of the same life the higher start stays; a life
    that is replaced is dead; a node without a lease gets one that has ended, which the amnesty shelters. The first
    offer that adds something begins a new era (event StoreRestored), ``served`` = max(its own, the offer's).

    After the recovery, an offer adds only jobs that the store does not have, that were not removed in this history, and
    that are newer than ``known``. Such a job has no generation (its nodes have been silent too long) and is holding.

    ``regroup``: other nodes may have a newer view. The first offer that adds something, or that opens the recovery,
    prolongs it by this time. The recovery then waits until every node that was live by the newest view so far has
    called: the nodes in that view's ``awaited``, and the node that offered it. A call is a beat of this era or an
    attempt to join; both come after the node's own offer. When all have called the recovery ends, but never before the
    time at which it ends without this wait; then no node lapses for another ``credit + lease``. After a restart of the
    store in this time, all of them must call again.
    """

    cluster_uid: str
    timing: Timing
    era: str
    rev: int
    top: int = 0
    """At least ``rev``; 0 means ``rev``."""
    holds: bool = True
    """The view has jobs."""
    served: int
    """The agent's estimate of the served clock, in ms."""
    by: str
    """The offering node."""
    nodes: tuple[NodeRecord, ...] = ()
    jobs: tuple[JobRecord, ...] = ()
    queues: QueuesRecord | None = None
    """The queues, under the same rule as any other record; even after the recovery if the store has none."""
    windows: WindowsRecord | None = None
    """The maintenance windows, under the same rule as ``queues``."""
    usage: tuple[UsageDay, ...] = ()
    uids: tuple[str, ...] | None = None
    """Every job of the complete view. Only on its last page."""
    numbers: dict[str, int] = {}
    """Job name to the highest number of a generation that this node promised on its disk."""
    regroup: int = Field(default=0, ge=0)
    """In ms; 0: the store waits for no node."""
    awaited: tuple[str, ...] = ()
    """The nodes that were live in this view."""

    @property
    def newest(self) -> int:
        """The highest revision of anything that this agent knows."""
        return max(self.rev, self.top)


class Restored(Record):
    """The store after an offer."""

    era: str
    known: int
    """The store has everything up to this revision: a record that is not newer need not be offered."""
    recovering: bool


class CheckedStep(Record):
    """A step on a job as its agent knows it: refused (``stale``) where it is another by now."""

    uid: str
    expect: Token | None
    """The generation's; None: there is none yet."""
    expect_state: str = ""
    control_rev: int
    by: str
    """The node that decides."""


class GenerationEnd(CheckedStep):
    """One that ends the job's generation, if it has one."""

    lost: tuple[str, ...] = ()
    spend: BudgetEntry | None = None
    planned: bool = False
    steps_saved: bool = False
    """The newest steps of the generation that ends by a fault are in snapshots, so only the standstill counts as
    lost."""
    grace: float | None = None
    """For a planned end: seconds from SIGTERM to SIGKILL; None: the job's own grace."""
    setbacks: tuple[Setback, ...] | None = None
    """What the job remembers from now on of nodes that were no good to it; None: what it did."""


class Proposal(GenerationEnd):
    """The next generation of a job.

    Checks: ``expect`` is the generation's token (None: no generation yet) and the generation has state
    ``expect_state``; ``control_rev`` is the control's; the phase is not terminal; min <= members <= max; each member's
    node is live (not lapsed), of that life, not lost or left, not cordoned; its devices are free or this job's own (a
    device that one of the job's own holders is freeing counts as its own); each node in ``lost`` (a member or holder of
    the current generation) has lapsed or has another life by now (``stale`` otherwise). Effect: the lives in ``lost``
    that are still their node's life, and did not leave, are marked lost for ever (event NodeLost); number = highest of
    the name + 1; generation = forming with holders = old holders + members of a generation that was active, each with
    its life and devices, without ``lost`` ones and lives that have ended (a generation that was only forming adds none:
    it never ran); all members missing, reports empty; the reports of a generation that was active become
    ``last_reports``; devices are booked for members plus holders; ``spend`` (if given) becomes the ``budget`` entry of
    the generation that last was active (``active.number``) and replaces an entry that is there; None leaves the budget
    alone. ``silent``: if an entry that counts ends an active generation, it becomes that generation's members without a
    fault of their own; if no entry or a free one ends it, ``silent`` becomes empty; a later free entry also empties it.
    ``restart_done`` = control.restart; ``not_before`` = 0; phase forming with the cause's text as reason;
    ``control_rev`` is kept in the generation; event GenerationForming.
    """

    id: str
    """Random id of the new generation. A second proposal of the same id returns the generation."""
    members: dict[str, Member]
    cause: Cause
    form_ms: int
    """Served milliseconds from now to the deadline."""
    failsafe_members: dict[str, str] = {}
    """Node to life: the failsafe members of this generation once the generation is active."""
    outside: dict[str, str] = {}
    claims: tuple[str, ...] = ()
    """Queues with a capability from whose share this proposal takes more. Refused (``stale``) if another proposal took
    from one of them after ``read``, so that two jobs for which there is room get their nodes one after the other."""
    read: int = 0
    """The revision up to which the proposer has read everything."""


class QuotaClaims(Record):
    """The owner's jobs in some queues that a submit, or the scale-out of a job of several roles, was judged by.
    Refused (``stale``) if another of these came to one of the queues after ``read``, so that two within a quota are
    judged one after the other."""

    queues: tuple[str, ...]
    """The queues that have a quota for each user."""
    read: int
    """The revision up to which the writing agent has read everything."""


class Ending(GenerationEnd):
    """The end of a generation, and the next phase of its job: holding, pausing, paused, succeeded, failed or stopped.

    Checks: as Proposal's ``expect``, ``expect_state`` and ``control_rev`` (generation may be None or already ended:
    then only the phase changes); the phase is not terminal; ``succeeded`` needs an active generation whose every member
    reported succeeded, or, with ``by_policy``, a spec with a policy that says CompleteJob; ``lost`` as in Proposal.
    Effect: the control, if one is given, replaced; generation.state = ended with ``planned`` and holders as in
    Proposal; the reports of a generation that was active become ``last_reports`` (none stay in the generation); spend
    as in Proposal; phase, reason, outcome, ``not_before`` = served + delay_ms; ``pausing`` with no holders becomes
    ``paused``; terminal phases set ``ended``; devices of nodes that hold nothing any more are free; event ``Job`` + the
    phase (JobHolding, JobFailed, ...), unless nothing changed. An Ending that was done before returns the job.
    """

    phase: Phase
    reason: str
    outcome: Outcome | None = None
    delay_ms: int = 0
    control: Control | None = None
    """Replaces the job's: its rev is ``control_rev`` + 1."""
    by_policy: bool = False
    wall: float
    """Unix time, from which records are kept. If it is hours off, the store takes its own instead."""


class Settlement(CheckedStep):
    """The end of a pending scale, reached or rolled back, or of a job that this one comes after.

    Checks: as Proposal's ``expect``, ``expect_state`` and ``control_rev`` (so that it overrules neither a newer control
    nor a gang that has formed in between); the phase is not terminal. Effect: control replaced, its rev ``control_rev``
    + 1; the event; of a job whose others have ended (JobAfterMet) ``not_before`` is served at least. A settlement that
    was done before returns the job.
    """

    control: Control
    event: str
    text: str


class Judgement(CheckedStep):
    """The judgement on how the last active generation ended, after all its members have answered or are lost.

    Checks: as Proposal's ``expect``, ``expect_state`` and ``control_rev``; the phase is not terminal, or the entry does
    not count (a lost node was the cause); ``number`` is ``last_number`` and has a budget entry (``stale``). Effect: the
    entry is replaced, ``silent`` is empty; event FaultJudged. A judgement that was done before returns the job.
    """

    number: int
    spend: BudgetEntry


class Answer(Record):
    """What a request id was used for."""

    subject: str
    """The job's uid, the node, ``queues`` or ``windows``."""
    did: str = ""
    """The change, in the words of the program that made it: the first of them says which one it was."""
    rev: int = 0
    """The newest revision, and so one at which it is written."""
