"""What travels with the store's steps, there and back, and what each of the big ones checks and does.

The steps themselves are ``base.py``'s. Must never hold behaviour.
"""

from __future__ import annotations

from pydantic import Field

from nodeagent.model.base import Record
from nodeagent.model.job import Admission, Control, JobRecord, Outcome, Phase, Spend
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.node import Incarnation, NodeFacts, NodeRecord, Readiness
from nodeagent.model.pod import PodState
from nodeagent.model.queue import QueuesRecord
from nodeagent.model.timing import Timing
from nodeagent.model.usage import UsageDay
from nodeagent.model.window import WindowsRecord
from nodeagent.model.world import Cause, Member, Token

PAGE_BYTES = 1024 * 1024
"""Most bytes of records that one reply or one offer carries; a record that is larger travels alone."""


class Forgotten(Record):
    """A node that somebody confirmed to be down, as ``forget`` left it; its revision is that of the change."""

    node: NodeRecord
    removed: bool
    """There is no record of it any more, and no cordon."""


class NewJob(Record):
    """One job of those that are submitted together. ``control``: of rev 1."""

    uid: str
    spec: JobSpec
    control: Control
    admission: Admission | None = None


class Saved(Record):
    """What a node has on its disk: everything up to ``rev`` of ``era``."""

    era: str
    rev: int = Field(ge=0)


class Saves(Record):
    """What nodes have told of their disks."""

    at: str
    """Wait for what is told after it."""
    nodes: dict[str, Saved] = {}


class JoinReply(Record):
    """The cluster's identity and clock, as of now."""

    cluster_uid: str
    served: int


class Unread(Record):
    """A record that cannot be decoded: another program wrote it, or damaged it."""

    key: str
    """``job:<uid>``, ``node:<id>``, ``queues``, ``windows`` or ``usage:<day>``."""
    why: str


class BeatReply(Record):
    """What a beat brings back. Records changed since the ``rev`` that was sent, oldest change first."""

    cluster_uid: str
    served: int
    lapsed: tuple[str, ...]
    """Every node that has lapsed, and neither left nor was declared lost: the latest to lapse first."""
    sheltered: tuple[str, ...] = ()
    """Others whose lease has run out as well, but whom an amnesty protects."""
    silent: str = ""
    """What both lists are: send it back."""
    same: bool = False
    """They are those that were sent with this ``silent``, and come empty."""
    next_lapse: int | None
    """Served milliseconds until the earliest lease not lapsed yet (other than the caller's) ends; None without
    any."""
    nodes: tuple[NodeRecord, ...] = ()
    jobs: tuple[JobRecord, ...] = ()
    queues: QueuesRecord | None = None
    """Only when they changed."""
    windows: WindowsRecord | None = None
    """Likewise."""
    usage: tuple[UsageDay, ...] = ()
    gone: tuple[str, ...] = ()
    """Removed records: ``job:<uid>``, ``node:<id>`` or ``usage:<day>``."""
    unread: tuple[Unread, ...] = ()
    """Changed records that cannot be decoded."""
    rev: int
    """Send this next time."""
    more: bool = False
    """More changes wait (at most 256 records come in one reply): beat again at once."""
    event: str = "0-0"
    """Id of the newest event: wait for what comes after it."""
    era: str = ""
    asked: int = 0
    """The newest revision that an operator wrote: somebody waits until it is on disks."""
    recovering: bool = False
    """The store is recovering: the reply brings no records, and ``rev`` is the one that was sent."""
    recovers: int = 0
    """Then: served milliseconds until that ends at the latest."""
    awaited: tuple[str, ...] = ()
    """Then: the nodes that it waits for, since they may know what it has lost; the first few by name."""
    awaits: int = 0
    """Then: how many they are."""


class Note(Record):
    """What an agent has to tell of its node, for the event log."""

    kind: str
    text: str


class Beat(Record):
    """One heartbeat: renews the lease and brings changes both ways."""

    node: str
    incarnation: Incarnation
    seq: int
    """Grows with each beat of this start; an older one is refused (``stale``)."""
    rev: int
    """Records changed after this are returned; 0 for all."""
    era: str = ""
    """The era of the view that ``rev`` belongs to; empty if nothing has been read yet."""
    top: int = 0
    """The newest revision in the view, where replies of the agent's own steps brought more than ``rev``."""
    facts: NodeFacts | None = None
    """Only when they changed."""
    readiness: dict[str, Readiness] | None = None
    """Only when it changed (whole map)."""
    pods: tuple[PodState, ...] | None = None
    """Only when something changed, or to refresh their TTL (all pods of this node); pod keys not named are left to
    expire."""
    saved: Saved | None = None
    """Only when it changed. Told on (``Store.saved``) if it is the first of this node that covers what operators
    wrote last. It is no part of the node's record: it raises no revision."""
    notes: tuple[Note, ...] = ()
    runs: tuple[str, ...] = ()
    """Jobs (uids) that this node is a member or holder of, by its view, and that have not ended: the store looks
    whether it still has them, and what belongs to them."""
    damaged: tuple[str, ...] = ()
    """Records (``job:<uid>``) that came so that they cannot be read, or are said to be removed, of what runs here."""
    silent: str = ""
    """``BeatReply.silent`` of the lists that are known."""


class StoreCopy(Record):
    """What an agent knows of the store, or a page of it, for a store that may have lost it.

    Its view is everything up to ``rev`` of ``era``, and single records that are newer (replies of its own steps; of a
    view that is not complete, all of them: ``rev`` is 0). ``top`` is the newest revision among them all.
    Refused: ``timing``; ``foreign`` when the store has another ``cluster_uid`` and jobs. A store that is empty, or has
    another uid but never had a job (nor was named by an offer that ``holds`` some; nor, if this holds none, by any), or
    has a lower revision than ``top``, takes the uid and opens a recovery. While it is recovering, the newest complete
    view wins: if ``rev`` is above ``Restored.known``, each record of the store that is not newer than ``rev`` becomes
    the offer's version (also one that it lacks); any other record is taken if its revision is above ``known`` and above
    the stored one. A taken record keeps its revision. ``uids``, on the last page: jobs not among them and not newer
    than ``rev`` were removed; then ``known`` = rev. Names, highest numbers (which never go down), order, devices and
    cordons follow the records. A life that either side knows as lost is lost; of the same life the higher start stays;
    a life that is replaced is dead; a node without a lease gets one that has ended, which the amnesty shelters. The
    first offer that brings something begins a new era (event StoreRestored), ``served`` = max(its own, the offer's).

    After the recovery an offer adds only jobs that are not there, were not removed in this history, and are newer than
    ``known``: their generation has ended, for its nodes have been silent too long, and the job holds.

    ``regroup``: others may have a newer view. From the first offer that brings something, or opens the recovery, that
    is longer by this, until every node that was live by the newest view so far (its ``awaited``, and who brings it) was
    heard: by a beat of this era, or by a try to join, both of which come after its offer. Then it ends, but not before
    it would have without a wait; and nobody lapses for ``credit + lease`` more. A restart of the store meanwhile asks
    all of them again.
    """

    cluster_uid: str
    timing: Timing
    era: str
    rev: int
    top: int = 0
    """At least ``rev``; 0 stands for it."""
    holds: bool = True
    """There are jobs in the view."""
    served: int
    """The agent's estimate."""
    by: str
    """The offering node."""
    nodes: tuple[NodeRecord, ...] = ()
    jobs: tuple[JobRecord, ...] = ()
    queues: QueuesRecord | None = None
    """Taken like a node's or a job's record; by a store that has none even after the recovery."""
    windows: WindowsRecord | None = None
    """Likewise."""
    usage: tuple[UsageDay, ...] = ()
    uids: tuple[str, ...] | None = None
    """Every job of the complete view: on its last page only."""
    numbers: dict[str, int] = {}
    """Job name to the highest number of a generation that this node promised on its disk."""
    regroup: int = Field(default=0, ge=0)
    """In ms; 0: nobody is waited for."""
    awaited: tuple[str, ...] = ()
    """Nodes that were live by this view."""

    @property
    def newest(self) -> int:
        """The highest revision of anything that this agent knows."""
        return max(self.rev, self.top)


class Restored(Record):
    """The store after an offer."""

    era: str
    known: int
    """The revision up to which the store has everything: records that are not above it need not be offered."""
    recovering: bool


class Proposal(Record):
    """The next generation of a job.

    Checks: ``expect`` is the head's token (None: no head yet) and it has state ``expect_state``; ``control_rev`` is the
    control's; the phase is not terminal; min <= members <= max; each member's node is live (not lapsed), of that life,
    not lost or left, not cordoned; its devices are free or this job's own (being freed by one of its own holders counts
    as its own); each node in ``lost`` (a member or holder of the head) has lapsed or has another life by now (``stale``
    otherwise). Effect: the lives in ``lost`` that are still their node's life, and did not leave, are marked lost for
    ever (event NodeLost); number = highest of the name + 1; head = forming with holders = old holders + members of a
    head that was active, each with its life and devices, less ``lost`` ones and lives that have ended (a head that was
    only forming adds none: it never ran); all members missing, reports empty; the reports of a head that was active
    become ``last_reports``; devices are booked for members plus holders; ``spend`` (if given) becomes the ``budget``
    entry of the generation that last was active (``active.number``), replacing what is there; None leaves the budget
    alone; if a head that was active ends by an entry that counts, ``silent`` becomes its members without a fault of
    their own, by no entry or a free one it becomes empty, and so it does by a free entry that comes later;
    ``restart_done`` = control.restart; ``not_before`` = 0; phase forming with the cause's text as reason;
    ``control_rev`` is kept in the head; event GenerationForming.
    """

    uid: str
    expect: Token | None
    expect_state: str = ""
    control_rev: int
    id: str
    """Random id of the new generation. Proposing the same id again returns the head."""
    members: dict[str, Member]
    lost: tuple[str, ...] = ()
    cause: Cause
    spend: Spend | None = None
    planned: bool = False
    kept: bool = False
    """What ends by a fault has its newest steps in snapshots: only the standstill is counted as lost."""
    grace: float | None = None
    """If planned: seconds from SIGTERM to SIGKILL, other than the job's."""
    form_ms: int
    """The deadline is this many served milliseconds from now."""
    keepers: dict[str, str] = {}
    """Node to life: the keepers of this generation once it is active."""
    outside: dict[str, str] = {}
    claims: tuple[str, ...] = ()
    """Queues with a capability of whose share this takes more. Refused (``stale``) if in one of them somebody else did
    so after ``read``: two jobs that both have room are given nodes one after the other."""
    read: int = 0
    """The revision up to which the proposer has read everything."""
    by: str
    """The proposing node."""


class QuotaClaims(Record):
    """That a submit was judged by what its owner's jobs in some queues come to. Refused (``stale``) if anybody else has
    submitted to one of them after ``read``: two submits that would both be within a quota come one after the other."""

    queues: tuple[str, ...]
    """Those with a quota for each user."""
    read: int
    """The revision up to which the judge has read everything."""


class Ending(Record):
    """The end of a generation, and the phase the job goes to: holding, pausing, paused, succeeded, failed or stopped.

    Checks: as Proposal's ``expect``, ``expect_state`` and ``control_rev`` (head may be None or already ended: then only
    the phase changes); the phase is not terminal; ``succeeded`` needs an active head whose every member reported
    succeeded; ``lost`` as in Proposal. Effect: head.state = ended with ``planned`` and holders as in Proposal; the
    reports of a head that was active become ``last_reports`` (none stay in the head); spend as in Proposal; phase,
    reason, outcome, ``not_before`` = served + delay_ms; ``pausing`` with no holders becomes ``paused``; terminal phases
    set ``ended``; devices of nodes that hold nothing any more are free; event ``Job`` + the phase (JobHolding,
    JobFailed, ...), unless nothing changed. An Ending that was done before returns the job.
    """

    uid: str
    expect: Token | None
    expect_state: str = ""
    control_rev: int
    phase: Phase
    reason: str
    outcome: Outcome | None = None
    spend: Spend | None = None
    lost: tuple[str, ...] = ()
    planned: bool = False
    kept: bool = False
    """As in Proposal."""
    delay_ms: int = 0
    wall: float
    """Unix time, for people."""
    by: str


class Settlement(Record):
    """The end of a pending scale, met or rolled back: the one write of agents to a job's control.

    Checks: as Proposal's ``expect``, ``expect_state`` and ``control_rev`` (so that neither a newer wish nor a gang that
    has formed in between is overruled); the phase is not terminal. Effect: control replaced, its rev ``control_rev`` +
    1; the event. A settlement that was done before returns the job.
    """

    uid: str
    expect: Token | None
    expect_state: str = ""
    control_rev: int
    control: Control
    event: str
    text: str
    by: str
    """The settling node."""


class Judgement(Record):
    """What ended the generation that was active last, now that all its members have answered or are lost.

    Checks: as Proposal's ``expect``, ``expect_state`` and ``control_rev``; the phase is not terminal; ``number`` is
    ``last_number`` and has a budget entry (``stale``). Effect: the entry is replaced, ``silent`` is empty; event
    FaultJudged. A judgement that was done before returns the job.
    """

    uid: str
    expect: Token | None
    expect_state: str = ""
    control_rev: int
    number: int
    spend: Spend
    by: str


class Answer(Record):
    """What a request id was used for."""

    subject: str
    """The job's uid, or the node."""
    did: str = ""
    """The change, as its writer described it to itself."""
