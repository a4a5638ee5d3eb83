"""What agents may ask of the store: the contract that the Lua steps keep.

Each call is one atomic step: it checks, then writes, or changes nothing. A call whose reply was lost may be sent
again: all of them are idempotent. Owns the meaning of each step; holds no implementation.

Every step first advances the **served clock**, the only clock that leases are judged by::

    enter(run_id, TIME):                       # run_id: identity of the server process behind this connection
        d = TIME - last
        if run_id != run or d < 0 or d > gap:  # restart, fail-over, freeze, clock step
            run = run_id; amnesty = served + credit + lease
        served += clamp(d, 0, credit); last = TIME
    lapsed(n) = left(n) or lost(n) or (lease_end(n) <= served and served >= amnesty, recovery)

A run id that differs (a restart, a fail-over, other data) also opens a **recovery**: its server may have lost writes.
Until it ends, together with that amnesty, agents may offer what they know (``restore``), and every step that decides
something of a job (all but join, beat, restore and the reads) is refused (``recovering``). It lasts until half of the
nodes that were live were heard, and where an offer shows that writes were lost, all of them, within a bound
(``StoreCopy``). Each recovery begins
a new **era**, a text that names it; an agent's view of the store is known by its era and its revision. Revisions only
grow from era to era, so that of two versions of a record the one with the higher revision is always the newer.

All served times are integer milliseconds since the cluster's record began; the clock stands at 0 until the first join
has written the timing.

A **holder** is a life that may still run workers of an older generation. A member of an active head becomes one when
the next head forms or the head ends. It stops being one by its ack, or when its life ends: it left, was declared
lost, or another life took its node. A life that has ended is taken out of the holders of every job at once, its
devices are free, and a job ``pausing`` without holders becomes ``paused`` (event JobPaused). A life that was replaced
never comes back (``lost``).

What a job **uses** is counted in the step that books its devices or frees them: devices x served time, in its record
by day (``JobRecord.used``). A step that removes the record, or moves it into the history, adds that to the day's sums
(``UsageDay``); these are records of the view.

A **keeper** is a node that may lend the members of the active generation time while the store is away; all keepers
must, or none does. So the store lets nothing newer start before one keeper has let go: by an ack that does not say
``lends``. A job that has ended is *kept* until then, unless all its keepers have been silent for ``failsafe_limit``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from nodeagent.model.job import Admission, Control, JobEvent, JobRecord, Quota
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.node import Cordon, Incarnation, NodeFacts, NodeRecord
from nodeagent.model.pod import PodState
from nodeagent.model.queue import Queues, QueuesRecord
from nodeagent.model.timing import Timing
from nodeagent.model.window import Windows, WindowsRecord
from nodeagent.model.world import Ack, PodReport, Token
from nodeagent.store.messages import (
    Answer,
    Beat,
    BeatReply,
    Ending,
    Forgotten,
    JoinReply,
    Judgement,
    NewJob,
    Proposal,
    QuotaClaims,
    Restored,
    Saves,
    Settlement,
    StoreCopy,
)


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
    (head, state, control or spec revision changed: read again), ``not_live``, ``busy`` (a device is another job's, or
    as many of its array run as may at once), ``unsupported`` (exits do not support the outcome, or a size out of
    min..max), ``name_taken``, ``stopping`` (workers of the job that had the name still stop), ``not_found``, ``ended``,
    ``version``, ``recovering`` (nothing is decided until every agent had time to say what it knows), ``behind`` (the
    store may lack what this agent knows: restore, then join again), ``foreign`` (it is another cluster's).
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Store(Protocol):
    """One connection's view of the store. Every method raises StoreUnavailableError or StoreRefusedError, nothing
    else.

    Methods that return a JobRecord return it as it is after the step (also when the step had been done before).
    """

    async def join(
        self, node: str, incarnation: Incarnation, facts: NodeFacts, timing: Timing, regroup: int = 0
    ) -> JoinReply:
        """Take the node's id. Allowed: no record, the same life with start not lower, or another life whose lease has
        lapsed (or that left). Refused: a lost life (``lost``), another life still leased (``lease_held``; the text
        names both addresses), sheltered by an amnesty or in a recovery (``recovering``), the same life with a lower
        start (``not_current``), timing that differs (``timing``; the first agent ever writes it). Effect: record
        (cordon is kept, readiness cleared for a new life), lease = served + lease; event NodeJoined for a new life;
        ``joined`` only changes with the life. Nodes whose lease ended a day of served time ago are forgotten, but for
        their cordon. ``regroup``, in ms: for how long the store, when it is started anew, waits beyond a lease for half
        of those that are live then; 0: for nobody."""
        ...

    async def beat(self, beat: Beat) -> BeatReply:
        """Renew. Refused when the view sent is not one of this store's (``behind``: of another era and not the one that
        this era continues with ``rev`` within it, or beyond the store's revision) or the node has no record
        (``behind``). Refused unless the whole incarnation is current (``not_current``), not lost or left (``lost``),
        seq newer (``stale``). A lapsed but not lost life is renewed. Unchanged facts or readiness raise no revision;
        what is saved never does."""
        ...

    async def restore(self, offer: StoreCopy) -> Restored:
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
        head which has ended since. Effect: removed from holders and ``silent``; devices trimmed to the member's (none
        for a non-member). A member of a forming head is missing no more, its host is kept, its signature added to the
        seal, and of group rank 0 the address is the head's; only its first ack counts so, and of group rank 0 only one
        with an address. A keeper that does not lend releases a forming head; an ended one forgets all keepers then.
        ``last`` (the final report of generation ``last_number``) replaces that node's entry in ``last_reports``; then,
        if forming, ``activate``'s checks are tried at once; a head in ``pausing`` whose holders are empty makes the job
        ``paused``."""
        ...

    async def activate(self, uid: str, token: Token) -> JobRecord:
        """If no member of the forming head is missing, each of them is in its life and not lapsed, lost or left,
        holders is empty, and the job has no keepers or one of them has released it: active, since = served, ``active``
        = token, keepers = the head's, phase running, ``restarts`` + 1 unless it is the first, ``first_active``, event
        GenerationActive. Otherwise refused (``not_live``). Already active: returns it."""
        ...

    async def report(self, uid: str, token: Token, node: str, incarnation: Incarnation, report: PodReport) -> JobRecord:
        """A member's report of the active generation (token must be the head's and active: ``stale``). seq is set on
        the first failure-like state of that node (failed, lost, fenced, refused) in order of arrival from 1, else 0.
        Event WorkerFailed or PodFailed for those, and GenerationStarted for a first report that it runs (``reason``
        says how long it took)."""
        ...

    async def commit(
        self,
        uid: str,
        token: Token,
        node: str,
        incarnation: Incarnation,
        name: str,
        step: int,
        order: int,
        signature: str = "",
    ) -> JobRecord:
        """Move the job's checkpoint pointer. The token must be that of the newest generation that was ever active
        (``stale``; whether a newer one is forming does not matter), the incarnation current and a member or holder in
        that life, and the new pointer later than the present one by (generation, order). The same name again returns
        the job. No event: nobody has to act on it."""
        ...

    async def end(self, ending: Ending) -> JobRecord:
        """See Ending."""
        ...

    async def submit(
        self,
        uid: str,
        spec: JobSpec,
        owner: int,
        wall: float,
        by: str,
        request: str,
        *,
        control: Control | None = None,
        admission: Admission | None = None,
        quota: Quota | None = None,
        claims: QuotaClaims | None = None,
    ) -> JobRecord:
        """A new job, queued, with this control (None: run on the spec's target; unsigned, as without an admission) of
        rev 1, not to start before its ``begin`` as seen at ``wall``. Refused when a job of that name is live
        (``name_taken``) or an ended one still has holders that have not lapsed, or is kept (``stopping``); both name
        its uid and phase. An ended one of that name is removed. Refused when the owner's jobs with it, without the
        one it replaces, exceed ``quota`` (``limit``), and where ``claims`` are old (``stale``). The same ``request``
        or uid again returns the first reply's job. Event JobSubmitted."""
        ...

    async def submit_all(
        self,
        base: str,
        jobs: Sequence[NewJob],
        owner: int,
        wall: float,
        by: str,
        request: str,
        *,
        quota: Quota | None = None,
        claims: QuotaClaims | None = None,
    ) -> str:
        """Several jobs in one step: all of them as ``submit`` makes one, or, where one is refused, none. Their names
        differ. ``base`` (without spaces) is what the request is remembered with: the reply is that of the first call
        with this ``request``; empty, where that was for something else."""
        ...

    async def control(
        self, uid: str, expect_rev: int, control: Control | None, request: str, event: str, text: str, did: str = ""
    ) -> JobRecord:
        """Replace the control (its rev becomes expect_rev + 1, or stays its own if that is higher). Refused: ended job
        (``ended``) unless only ``delete`` is being set, rev changed (``stale``). The same ``request`` again returns
        the job and changes nothing. ``event`` is the event's kind, ``text`` its sentence, ``did`` what ``request()``
        tells of it. None: it is so already, and only the request is remembered."""
        ...

    async def request(self, request: str) -> Answer | None:
        """What a request id was used for, among the newest 1024; None if for nothing."""
        ...

    async def settle(self, settlement: Settlement) -> JobRecord:
        """See Settlement."""
        ...

    async def judge(self, judgement: Judgement) -> JobRecord:
        """See Judgement."""
        ...

    async def renew(self, uid: str, expect: str, admission: Admission) -> JobRecord:
        """Replace the admission of a job that has not ended (``ended``) and whose admission has the signature
        ``expect`` (``stale``). The same admission again returns the job."""
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

    async def forget(self, node: str, by: str) -> Forgotten:
        """An operator confirms that a lapsed node is permanently down: its life is lost, and it is no keeper any more:
        where it was one the job has none until the next. Event NodeForgotten. Of a node that left, or is lost already,
        the record is removed, and its cordon: whoever joins under that name begins anew. Event NodeRemoved. Refused:
        ``not_found``, ``not_live`` if its lease has not lapsed."""
        ...

    async def remove(self, uid: str) -> None:
        """Remove an ended job without holders that have not lapsed, and not kept (``stale`` otherwise), or one of the
        history; unknown is fine. The name's highest number stays for ever. Event JobDeleted."""
        ...

    async def shelve(self, uids: Collection[str], before: float, most: int) -> bool:
        """Move these ended jobs into the history, which no beat brings: as they are, those without holders that have
        not lapsed, and not kept (others are left as they are). Remove from the history what ended before that Unix
        time, and the oldest of more than ``most``, a few at once: true if there may be more. Event JobDeleted for each.
        What is in the history only ``past``, ``history`` and ``remove`` know: its name is free."""
        ...

    async def past(self, ref: str) -> tuple[JobRecord, ...]:
        """Of the history: the job with this uid; else the one of this name that ended last; else a few whose uids
        begin so."""
        ...

    async def history(self, after: str, limit: int) -> tuple[tuple[str, JobRecord], ...]:
        """Jobs of the history, the oldest end first, each with its place in it: those behind this place (empty: from
        the beginning)."""
        ...

    async def cordon(self, node: str, cordon: Cordon | None, request: str) -> NodeRecord:
        """Set or clear a node's cordon (``not_found``). Kept over the node's restarts and lives. Event NodeCordoned
        / NodeUncordoned."""
        ...

    async def queues(self, expect_rev: int, tree: Queues, request: str, text: str) -> QueuesRecord:
        """Replace the tree of queues (its rev becomes ``expect_rev`` + 1, or stays its own if that is higher). Refused
        when its rev is another by now (``stale``; 0: there is none). The same ``request`` again returns the record and
        changes nothing. Event QueueChanged."""
        ...

    async def windows(self, expect_rev: int, windows: Windows, request: str, text: str) -> WindowsRecord:
        """Replace the maintenance windows, as ``queues`` does the tree. Event WindowsChanged."""
        ...

    async def pods(self, wanted: Mapping[str, Collection[str]]) -> dict[str, tuple[PodState, ...]]:
        """The pods that these nodes publish of these jobs (uids), by node; each job is in it, and no other."""
        ...

    async def events(self, after: str, limit: int) -> tuple[JobEvent, ...]:
        """Events after this id, oldest first (``0-0`` from the beginning); with a negative limit the newest -limit
        of them."""
        ...

    async def wait(self, after: str, timeout: float, node: str = "", jobs: Collection[str] = ()) -> str:
        """Return an event's id as soon as one after ``after`` exists, or ``after`` when ``timeout`` seconds have
        passed. For a ``node``: only one that concerns all, this node, or the members, holders and keepers of these
        ``jobs`` (uids), the newest of them. Uses its own connection."""
        ...

    async def saved(self, after: str, timeout: float) -> Saves:
        """What each node has told of its disk: as soon as one told on after ``after`` (empty: at once), or when
        ``timeout`` seconds have passed. Uses the connections of ``wait``."""
        ...

    async def close(self) -> None:
        """Give up the connections."""
        ...
