"""What agents may ask of the store: the contract that Redis and the in-memory twin both keep.

Each call is one atomic step: it checks, then writes, or changes nothing. A call whose reply was lost may be sent
again: all of them are idempotent. Owns the meaning of each step; holds no implementation.

Every step first advances the **served clock**, the only clock that leases are judged by::

    enter(run_id, TIME):                       # run_id: identity of the server process behind this connection
        d = TIME - last
        if run_id != run or d < 0 or d > gap:  # restart, fail-over, freeze, clock step
            run = run_id; amnesty = served + credit + lease
        served += clamp(d, 0, credit); last = TIME
    lapsed(n) = left(n) or lost(n) or (lease_end(n) <= served and served >= amnesty)

A run id that differs (a restart, a fail-over, other data) also opens a **recovery**: its server may have lost writes.
Until it ends, together with that amnesty, agents may offer what they know (``restore``), and every step that decides
something of a job (all but join, beat, restore and the reads) is refused (``recovering``). Each recovery begins a new
**era**, a text that names it; an agent's view of the store is known by its era and its revision. Revisions only grow
from era to era, so that of two versions of a record the one with the higher revision is always the newer.

All served times are integer milliseconds since the cluster's record began; the clock stands at 0 until the first join
has written the timing.

A **holder** is a life that may still run workers of an older generation. A member of an active head becomes one when
the next head forms or the head ends. It stops being one by its ack, or when its life ends: it left, was declared
lost, or another life took its node. A life that has ended is taken out of the holders of every job at once, its
devices are free, and a job ``pausing`` without holders becomes ``paused`` (event JobPaused). A life that was replaced
never comes back (``lost``).

A **keeper** is a node that may lend the members of the active generation time while the store is away; all keepers
must, or none does. So the store lets nothing newer start before one keeper has let go: by an ack that does not say
``lends``. A job that has ended is *kept* until then, unless all its keepers have been silent for ``failsafe_limit``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from nodeagent.model.base import Record
from nodeagent.model.event import Event
from nodeagent.model.job import Control, JobRecord, Outcome, Phase, Spend
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.node import Cordon, Incarnation, NodeFacts, NodeRecord, Readiness
from nodeagent.model.pod import PodState
from nodeagent.model.timing import Timing
from nodeagent.model.world import Ack, Cause, Member, PodReport, Token


class StoreError(Exception):
    """The base of everything a store call raises on purpose."""


class StoreUnavailableError(StoreError):
    """No answer, or the server cannot serve (down, timeout, loading, read-only, out of memory, wrong password).

    The step may or may not have happened.
    """


class StoreRefusedError(StoreError):
    """A check failed; nothing was changed. ``str()`` is a sentence for the person.

    ``code`` is one of: ``lost`` (this life was declared lost), ``not_current`` (another incarnation holds the node's
    id), ``lease_held`` (another life's lease has not lapsed), ``timing`` (values differ from the store's), ``stale``
    (head, state, control or spec revision changed: read again), ``not_live``, ``busy`` (a device is another job's),
    ``unsupported`` (exits do not support the outcome, or a size out of min..max), ``name_taken``, ``not_found``,
    ``ended``, ``version``, ``recovering`` (nothing is decided until every agent had time to say what it knows),
    ``behind`` (the store may lack what this agent knows: restore, then join again), ``foreign`` (it is another
    cluster's).
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class JoinReply(Record):
    """The cluster's identity and clock, as of now."""

    cluster_uid: str
    served: int
    secret: str
    """What only those who may use the store know: agents sign with it what they say to each other."""


class BeatReply(Record):
    """What a beat brings back. Records changed since the ``rev`` that was sent, oldest change first."""

    cluster_uid: str
    served: int
    lapsed: tuple[str, ...]
    """Nodes that have lapsed, among those that still have a record: the latest to lapse first, at most 256."""
    next_lapse: int | None
    """Served milliseconds until the earliest lease not lapsed yet (other than the caller's) ends; None without
    any."""
    nodes: tuple[NodeRecord, ...] = ()
    jobs: tuple[JobRecord, ...] = ()
    gone: tuple[str, ...] = ()
    """Removed records: ``job:<uid>`` or ``node:<id>``."""
    rev: int
    """Send this next time."""
    more: bool = False
    """More changes wait (at most 256 records come in one reply): beat again at once."""
    event: str = "0-0"
    """Id of the newest event: wait for what comes after it."""
    era: str = ""
    recovering: bool = False
    """The store is recovering: the reply brings no records, and ``rev`` is the one that was sent."""


class Beat(Record):
    """One heartbeat: renews the lease and brings changes both ways."""

    node: str
    incarnation: Incarnation
    seq: int
    """Grows with each beat of this start; an older one is refused (``stale``)."""
    length: int
    """Lease length asked for, in ms."""
    rev: int
    """Records changed after this are returned; 0 for all."""
    era: str = ""
    """The era of the view that ``rev`` belongs to; empty if nothing has been read yet."""
    facts: NodeFacts | None = None
    """Only when they changed."""
    readiness: dict[str, Readiness] | None = None
    """Only when it changed (whole map)."""
    pods: tuple[PodState, ...] | None = None
    """Only when something changed, or to refresh their TTL (all pods of this node); pod keys not named are left to
    expire."""


class Offer(Record):
    """What an agent knows of the store, or a page of it, for a store that may have lost it.

    Its view is everything up to ``rev`` of ``era``, and single records that are newer (replies of its own steps).
    Refused: ``timing``; ``foreign`` when the store has another ``cluster_uid`` and jobs. A store that is empty, or has
    another uid (not from an offer) but never had a job, or has a lower revision than the offer's, takes the uid and
    opens a recovery. While
    it is recovering, the newest complete view wins: if ``rev`` is above ``Restored.known``, each record of the store
    that is not newer than ``rev`` becomes the offer's version (also one that it lacks); any other record is taken if
    its revision is above ``known`` and above the stored one. A taken record keeps its revision. ``uids``, on the last
    page: jobs not among them and not newer than ``rev`` were removed; then ``known`` = rev. Names, highest numbers
    (which never go down), order, devices and cordons follow the records. A life that either side knows as lost is
    lost; of the same life the higher start stays; a life that is replaced is dead; a node without a lease gets one that
    has ended, which the amnesty shelters. The first offer that brings something begins a new era (event
    StoreRestored), ``served`` = max(its own, the offer's).

    After the recovery an offer adds only jobs that are not there and newer than ``known``: their generation has ended,
    for its nodes have been silent too long, and the job holds.
    """

    cluster_uid: str
    secret: str
    timing: Timing
    era: str
    rev: int
    served: int
    """The agent's estimate."""
    by: str
    """The offering node."""
    nodes: tuple[NodeRecord, ...] = ()
    jobs: tuple[JobRecord, ...] = ()
    uids: tuple[str, ...] | None = None
    """Every job of the complete view: on its last page only."""


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
    only forming adds none: it never ran); acks, reports empty; the reports of a head that was active become
    ``last_reports``; devices are booked for members plus holders; ``spend`` (if given) becomes the ``budget`` entry of
    the generation that last was active (``active.number``), replacing what is there; None leaves the budget alone;
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
    grace: float | None = None
    """If planned: seconds from SIGTERM to SIGKILL, other than the job's."""
    form_ms: int
    """The deadline is this many served milliseconds from now."""
    keepers: dict[str, str] = {}
    """Node to life: the keepers of this generation once it is active."""
    outside: dict[str, str] = {}
    by: str
    """The proposing node."""


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


class Answer(Record):
    """What a request id was used for."""

    subject: str
    """The job's uid, or the node."""
    did: str = ""
    """The change, as its writer described it to itself."""


class Store(Protocol):
    """One connection's view of the store. Every method raises StoreUnavailableError or StoreRefusedError, nothing
    else.

    Methods that return a JobRecord return it as it is after the step (also when the step had been done before).
    """

    async def join(self, node: str, incarnation: Incarnation, facts: NodeFacts, timing: Timing) -> JoinReply:
        """Take the node's id. Allowed: no record, the same life with start not lower, or another life whose lease
        has lapsed (or that left). Refused: a lost life (``lost``), another life still leased (``lease_held``; the
        text names both addresses), sheltered by an amnesty or in a recovery (``recovering``), the same life with a
        lower start (``not_current``), timing that differs (``timing``; the first agent ever writes it). Effect: record
        (cordon is kept, readiness cleared for a new
        life), lease = served + lease; event NodeJoined for a new life; ``joined`` only changes with the life. Nodes
        whose lease ended a day of served time ago are forgotten, but for their cordon."""
        ...

    async def beat(self, beat: Beat) -> BeatReply:
        """Renew. Refused when the view sent is not one of this store's (``behind``: of another era and not the one that
        this era continues with ``rev`` within it, or beyond the store's revision) or the node has no record
        (``behind``). Refused unless the whole incarnation is current (``not_current``), not lost or left (``lost``),
        seq newer (``stale``). A lapsed but not lost life is renewed. Unchanged facts or readiness raise no revision."""
        ...

    async def restore(self, offer: Offer) -> Restored:
        """See Offer. Without records it only asks."""
        ...

    async def leave(self, node: str, incarnation: Incarnation) -> None:
        """The node has stopped all its workers and goes: lease ended now, ``left``; it is removed from all holders.
        Event NodeLeft. The same life may join again."""
        ...

    async def propose(self, proposal: Proposal) -> JobRecord:
        """See Proposal."""
        ...

    async def ack(
        self, uid: str, token: Token, node: str, incarnation: Incarnation, ack: Ack, last: PodReport | None
    ) -> JobRecord:
        """A member or holder has stopped everything older. Head must have this token (``stale``), the incarnation must
        be current. A node that is neither, nor a keeper, changes nothing; nor does an ack that answers the forming of a
        head which has ended since. Effect: removed from holders; devices trimmed to the member's (none for a
        non-member); a forming head records a member's or keeper's ack; an ended head forgets all keepers at the first
        ack of one that does not lend; ``last`` (the final report of generation ``last_number``) replaces that node's
        entry in ``last_reports``; then, if forming, ``activate``'s checks are tried at once; a head in ``pausing``
        whose holders are empty makes the job ``paused``."""
        ...

    async def activate(self, uid: str, token: Token) -> JobRecord:
        """If every member of the forming head has acknowledged with its life, is not lapsed, lost or left, holders is
        empty, and the job has no keepers or one of them acknowledged and does not lend: active, address and
        store_hosted from group rank 0's ack, since = served, ``active`` = token, keepers = the head's, phase running,
        ``restarts`` + 1 unless it is the first, ``first_active``, event GenerationActive. Otherwise refused
        (``not_live``). Already active: returns it."""
        ...

    async def report(self, uid: str, token: Token, node: str, incarnation: Incarnation, report: PodReport) -> JobRecord:
        """A member's report of the active generation (token must be the head's and active: ``stale``). seq is set on
        the first failure-like state of that node (failed, lost, fenced, refused) in order of arrival from 1, else 0.
        Event WorkerFailed or PodFailed for those."""
        ...

    async def end(self, ending: Ending) -> JobRecord:
        """See Ending."""
        ...

    async def submit(self, uid: str, spec: JobSpec, owner: int, wall: float, by: str, request: str) -> JobRecord:
        """A new job, queued, control rev 1. Refused when a job of that name is live or an ended one still has holders
        that have not lapsed, or is kept (``name_taken``, naming its uid and phase). An ended one of that name is
        removed. The same ``request`` or uid again returns the first reply's job. Event JobSubmitted."""
        ...

    async def control(
        self, uid: str, expect_rev: int, control: Control | None, request: str, event: str, text: str, did: str = ""
    ) -> JobRecord:
        """Replace the control (its rev is set to expect_rev + 1). Refused: ended job (``ended``) unless only
        ``delete`` is being set, rev changed (``stale``). The same ``request`` again returns the job and changes
        nothing. ``event`` is the event's kind, ``text`` its sentence, ``did`` what ``request()`` tells of it. None:
        it is so already, and only the request is remembered."""
        ...

    async def request(self, request: str) -> Answer | None:
        """What a request id was used for, among the newest 1024; None if for nothing."""
        ...

    async def settle(self, settlement: Settlement) -> JobRecord:
        """See Settlement."""
        ...

    async def keep(
        self,
        uid: str,
        token: Token,
        node: str,
        incarnation: Incarnation,
        expect: Mapping[str, str],
        keepers: Mapping[str, str],
    ) -> JobRecord:
        """Replace the keepers of the active generation. Only by one of them that does not lend (the caller's to know),
        or by a member where there are none; ``stale`` if the head is not this one and active, or the keepers are not
        ``expect``. From then on that node lends nothing under the old keepers."""
        ...

    async def forget(self, node: str, by: str) -> NodeRecord:
        """An operator vouches that a lapsed node is off for good: its life is lost, and it is no keeper any more: where
        it was one the job has none until the next. Refused: ``not_found``, ``not_live`` if its lease has not lapsed.
        Event NodeForgotten."""
        ...

    async def remove(self, uid: str) -> None:
        """Remove an ended job without holders that have not lapsed, and not kept (``stale`` otherwise); unknown is
        fine. The name's highest number stays for ever. Event JobDeleted."""
        ...

    async def cordon(self, node: str, cordon: Cordon | None, request: str) -> NodeRecord:
        """Set or clear a node's cordon (``not_found``). Kept over the node's restarts and lives. Event NodeCordoned
        / NodeUncordoned."""
        ...

    async def pods(self, uid: str) -> tuple[PodState, ...]:
        """The published pods of a job, by node."""
        ...

    async def events(self, after: str, limit: int) -> tuple[Event, ...]:
        """Events after this id, oldest first (``0-0`` from the beginning); with a negative limit the newest -limit
        of them."""
        ...

    async def wait(self, after: str, timeout: float) -> str:
        """Return the newest event's id as soon as one after ``after`` exists, or ``after`` when ``timeout`` seconds
        have passed. Uses its own connection."""
        ...

    async def close(self) -> None:
        """Give up the connections."""
        ...
