"""What agents may ask of the store: the contract that the Lua steps keep.

Each call is one atomic step: it checks, then writes, or changes nothing. All steps are idempotent, so a caller that
lost the reply may send the call again. This module defines the meaning of each step; it holds no implementation.

Every step first advances the **served clock**, the only clock that decides whether a lease has ended::

    enter(run_id, TIME):                       # run_id: identity of the server process behind this connection
        d = TIME - last
        if run_id != run or d < 0 or d > gap:  # restart, fail-over, freeze, clock step
            run = run_id; amnesty = served + credit + lease
        served += clamp(d, 0, credit); last = TIME
    lapsed(n) = left(n) or lost(n) or (lease_end(n) <= served and served >= amnesty, recovery)

A new run id (a restart, a fail-over, other data) also opens a **recovery**, because that server may have lost writes.
The amnesty lasts at least as long. Until the recovery ends, agents may offer what they know (``restore``), and the
store refuses (``recovering``) every step that decides something about a job: all but join, beat, renew_lease, restore,
examine, history and request. The recovery lasts until half of the nodes that were live have called. If an offer shows
that writes were lost, it lasts until all of them have called, within a bound (``StoreCopy``). Each recovery begins a
new **era**, a text that names it; an era and a revision identify an agent's view of the store. Revisions only grow from
era to era, so of two versions of a record the one with the higher revision is always the newer.

All served times are integer milliseconds since the cluster's record began; the clock is 0 until the first join has
written the timing.

A **holder** is a life that may still run workers of an older generation. A member of an active generation becomes a
holder when the next generation forms or this one ends. It is a holder until it acknowledges, or until its life ends:
the node left, the life was declared lost, or another life took the node. The step that ends a life removes it from the
holders of every job and frees its devices; a job that is ``pausing`` and has no holders left becomes ``paused`` (event
JobPaused). A life that was replaced never comes back (``lost``).

The step that books or frees a job's devices also counts what the job **uses**: devices x served time, by day, in the
job's record (``JobRecord.used``). A step that removes the record, or moves it into the history, adds this use to the
day's sums (``UsageDay``); these sums are records of the view.

A **failsafe member** is a node that may lend the members of the active generation time while the store is unreachable.
Either all failsafe members lend, or none does. So the store starts nothing newer before one failsafe member has let go:
it acknowledges without ``lends``. An ended job stays *lendable* until then, unless all its failsafe members have been
silent for ``failsafe_limit``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from nodeagent.model.job import Admission, Checkpoint, Control, JobEvent, JobRecord, Quota
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
    PastJobs,
    Proposal,
    QuotaClaims,
    Restored,
    Saves,
    Settlement,
    StoreCopy,
    Woken,
)


@dataclass(frozen=True, slots=True)
class KeyMark:
    """What the store compares of a node's cluster key; it tells nothing of the key."""

    digest: str
    file: str
    """Where the node has the key, for people."""


NO_KEY = KeyMark("", "")
"""Of a client without a key: a program that measures, or a test."""


class StoreError(Exception):
    """The base of everything a store call raises on purpose."""


class StoreUnavailableError(StoreError):
    """No answer, or the server cannot serve (down, timeout, loading, read-only, out of memory, wrong password).

    The step may or may not have happened.
    """


class TooMuchError(StoreUnavailableError):
    """The server's reply is longer than any of its kind: somebody has written into the store what no agent writes. Of
    the reply only a part was read."""


class StoreBusyError(StoreUnavailableError):
    """The server was not asked: what callers ask for waits for its turn, and that did not come in time."""


class StoreUnusableError(StoreUnavailableError):
    """The server answers, and cannot serve: read-only, out of memory, a wrong password, too few replicas."""


class StepFailedError(StoreUnavailableError):
    """The server answers, and cannot do this step: on other records it may do the same."""


class StoreRefusedError(StoreError):
    """A check failed; nothing was changed. ``str()`` is a sentence for people.

    ``code`` is one of: ``lost`` (this life was declared lost), ``not_current`` (another incarnation holds the node's
    id), ``lease_held`` (another life's lease has not lapsed), ``timing`` (values differ from the store's), ``key``
    (another key than the cluster's), ``stale`` (generation, state, control or spec revision changed: read again),
    ``not_live``, ``busy`` (another job has a device, or as many jobs of the array run as may run at once),
    ``unsupported`` (exits do not support the outcome, or a size out of min..max), ``name_taken``, ``stopping`` (workers
    of the job that had the name still stop), ``not_found``, ``ended``, ``version``, ``recovering`` (the store decides
    nothing until every agent had time to offer what it knows), ``behind`` (the store may lack what this agent knows:
    restore, then join again), ``foreign`` (the store belongs to another cluster), ``full`` (the jobs of all users
    together leave no room for these: see ``recordroom``), ``far`` (an offer's revision or served time comes from a
    damaged store).
    """

    def __init__(self, code: str, text: str, number: str = "0") -> None:
        super().__init__(text)
        self.code = code
        self.number = float(number)
        """Of ``lease_held``: seconds for which the other lease lasts, if nobody renews it. Of a beat that is ``stale``:
        the newest one's ``seq``."""


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Which store it is."""

    process: str
    """Of its server: random, with each start of that another one."""
    era: str
    """Of its records: which history of them it is; empty if nobody has joined here, or all was lost."""
    place: str
    """By the config, for people."""
    evicts: bool = False
    """Its server has thrown keys away since its start, for want of memory."""

    def goes_on(self, era: str) -> bool:
        """That era's records are these, as far as this server process knows: it has begun the era itself. What a
        server has read from a file, or copied from another one, is another history, which its first step begins."""
        return self.era == era and self.began(era)

    def began(self, era: str) -> bool:
        """This server process has begun that era (see ``begin_era`` in ``_clock.lua``)."""
        return bool(self.process) and era.startswith((f"{self.process}-", f"{self.process}@"))


class Store(Protocol):
    """One connection's view of the store. Every method raises StoreUnavailableError or StoreRefusedError, nothing
    else.

    A method that returns a JobRecord returns it as it is after the step, even if the step had been done before.
    """

    async def identity(self) -> StoreIdentity:
        """Which store this is, without a step in it."""
        ...

    async def join(
        self, node: str, incarnation: Incarnation, facts: NodeFacts, timing: Timing, regroup: int = 0
    ) -> JoinReply:
        """Take the node's id. Allowed: no record, the same life with start not lower, or another life whose lease has
        lapsed (or that left). Refused: a lost life (``lost``), another life still leased (``lease_held``; the text
        names both addresses), sheltered by an amnesty or in a recovery (``recovering``), the same life with a lower
        start (``not_current``), timing that differs (``timing``; the first agent ever writes it), another key than the
        cluster's (``key``; written likewise, and anew where no other node is there and no job that has not ended).
        Effect: record (cordon is kept, readiness cleared for a new life), lease = served + lease; the node is not
        ``mute`` (event AgentBack if it was, in the same life); event NodeJoined for a new life; ``joined`` only changes
        with the life.
        A node whose lease ended a day of served time ago is forgotten, but its cordon stays. ``regroup``, in ms: how
        long a restarted store waits beyond a lease for half of the nodes that are live then; 0: it waits for none."""
        ...

    async def beat(self, beat: Beat) -> BeatReply:
        """Renew. Refused (``behind``) if the view that the agent sent is not one of this store's, or if the node has no
        record. A view is not this store's if its revision is beyond the store's, or if its era is neither this era nor
        the one that this era continues (up to ``rev``). Refused unless the whole incarnation is current
        (``not_current``), not lost or left (``lost``), seq newer (``stale``). A life that lapsed but is not lost is
        renewed. A node that was ``mute`` is so no more (event AgentBack), unless the beat is ``unanswered``. Unchanged
        facts or readiness raise no revision; ``saved`` never raises one."""
        ...

    async def restore(self, offer: StoreCopy) -> Restored:
        """See StoreCopy. An offer without records only asks what the store has (``Restored``)."""
        ...

    async def leave(self, node: str, incarnation: Incarnation) -> None:
        """The node has stopped all its workers and leaves: its lease ends now, it is marked ``left`` and is removed
        from all holders. Event NodeLeft. The same life may join again."""
        ...

    async def propose(self, proposal: Proposal) -> JobRecord:
        """See Proposal."""
        ...

    async def ack(
        self, uid: str, token: Token, node: str, incarnation: Incarnation, ack: Ack, last: PodReport | None
    ) -> JobRecord:
        """A member or holder has stopped everything older. Refused (``stale``) unless the generation has this token;
        the incarnation must be current. An ack changes nothing if the node is no member, holder or failsafe member, or
        if it answers the forming of a generation that has ended since. With ``down`` a holder's entry only gets these
        roles, and the job's nodes are woken. Else, effect: the node is removed from holders and
        ``silent``; its devices are trimmed to the member's (none for a non-member). A member of a forming generation is
        missing no more: its host is kept and its signature is added to the seal; the address of group rank 0 becomes
        the generation's. Only the first ack of a member counts so, and of group rank 0 only one with an address. A
        failsafe member that does not lend releases a forming generation; an ended generation then forgets all its
        failsafe members. ``last`` (the final report of generation ``last_number``) replaces that node's entry in
        ``last_reports``. Then, if the generation is forming, the checks of ``activate`` are tried at once; if it is in
        ``pausing`` and has no holders, the job becomes ``paused``."""
        ...

    async def activate(self, uid: str, token: Token) -> JobRecord:
        """If no member of the forming generation is missing, each of them is in its life and not lapsed, lost or left,
        holders is empty, and the job has no failsafe members or one of them has released it: active, since = served,
        ``active`` = token, failsafe members = the generation's, phase running, ``restarts`` + 1 unless it is the first,
        ``first_active``, ``running_since`` unless a generation was active since the job last waited, event
        GenerationActive. Otherwise refused (``not_live``). Already active: returns it."""
        ...

    async def report(
        self, uid: str, token: Token, node: str, incarnation: Incarnation, report: PodReport, text: str = ""
    ) -> JobRecord:
        """A member's report about the active generation (token must be the generation's and active: ``stale``). ``seq``
        numbers the first failure-like report of each node (failed, lost, fenced, refused) from 1 in order of arrival;
        it is 0 for others. Event WorkerFailed or PodFailed for a failure-like report, with ``text``, else
        its reason; GenerationStarted for a node's first report that its workers run (``reason`` says how long the start
        took); of ``alone``, for each that was not reported before, WorkerRestarted, or RoleFailed if its whole role is
        started again; RoleStopped if it promises a round of a role that it had not promised before (``rounds``)."""
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
        instead: Checkpoint | None = None,
    ) -> JobRecord:
        """Move the job's checkpoint pointer. The token must be that of the newest generation that was ever active
        (``stale``; it may be superseded by one that is forming), the incarnation current and a member or holder in that
        life, and the new pointer later than the present one by (generation, order). A call with the present name again
        returns the job. No event, because no agent has to act on it. ``instead``: a present pointer that does not
        count, since no agent signed it, or it is older than one that was committed: it has no name and no order."""
        ...

    async def put_back(
        self,
        uid: str,
        token: Token,
        node: str,
        incarnation: Incarnation,
        checkpoint: Checkpoint,
        instead: Checkpoint | None,
    ) -> JobRecord:
        """Give the job the signed pointer again that this agent has seen in its record, where somebody has written
        another one over it (``instead``), or none. As a commit, by any node whose incarnation is current; ``token`` is
        that of the newest generation that was ever active, and the pointer is of no later one (``stale``)."""
        ...

    async def differs(self, job: JobRecord, era: str) -> bool:
        """Whether the job's record in the store is another one than this, of the same revision in this era: somebody
        wrote over it. False if it cannot be read now. Of a large gang this costs as much as reading all of it."""
        ...

    async def end(self, ending: Ending) -> JobRecord:
        """See Ending."""
        ...

    async def submit(
        self,
        jobs: Sequence[NewJob],
        owner: int,
        wall: float,
        by: str,
        request: str,
        did: str = "",
        *,
        era: str = "",
        quota: Quota | None = None,
        claims: QuotaClaims | None = None,
    ) -> tuple[str, int]:
        """New jobs, queued: all of them, or none if one is refused. Their names differ. A job does not start before
        its ``begin`` as seen at ``wall``. Refused if a live job has its name (``name_taken``), or if an ended one still
        has holders that have not lapsed or is lendable (``stopping``); both refusals name its uid and phase. An ended
        job of that name is removed. Refused if the owner's jobs with these, without those that they replace, exceed
        ``quota`` (``limit``), and if ``claims`` are old (``stale``). ``era``: of the caller's view; of another store
        than this it is refused (``stale``): that may have lost jobs. Returns the uid of the first job, and a revision
        at which they are written: of those that the same ``request``, or a job of that uid, made first. ``did`` is
        what ``request()`` later returns. Event JobSubmitted for each.

        Of every step that takes a ``request``: its ``did`` begins with a word that says which change it is, and the
        request of a change of another word is refused (``stale``: ``request()`` tells what it was used for)."""
        ...

    async def control(
        self,
        uid: str,
        expect_rev: int,
        control: Control | None,
        request: str,
        event: str,
        text: str,
        did: str = "",
        claims: QuotaClaims | None = None,
    ) -> JobRecord:
        """Replace the control (its rev becomes expect_rev + 1, or stays its own if that is higher). Refused: ended job
        (``ended``) unless only ``delete`` is being set, rev changed (``stale``). The same ``request`` again returns
        the job and changes nothing. ``event`` is the event's kind, ``text`` its sentence; ``did`` is what ``request()``
        later returns. ``control`` None: the control is so already, and only the request is remembered. Refused also if
        ``claims`` are old (``stale``)."""
        ...

    async def request(self, request: str) -> Answer | None:
        """What a request id was used for, among the newest 1024 of the owner of the job that it
        changed (or of the operators'), and as many that changed nothing; None if for nothing."""
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

    async def set_failsafe_members(
        self,
        uid: str,
        token: Token,
        node: str,
        incarnation: Incarnation,
        expect: Mapping[str, str],
        failsafe_members: Mapping[str, str],
    ) -> JobRecord:
        """Replace the failsafe members of the active generation. Only a failsafe member that does not lend may do this
        (the caller ensures it), or a member if there are no failsafe members. ``stale`` if the generation is not this
        one and active, or the failsafe members are not ``expect``. From then on that node lends nothing under the old
        failsafe members."""
        ...

    async def forget(self, node: str, by: str, request: str = "", did: str = "") -> Forgotten:
        """An operator confirms that a lapsed node is permanently down: its life is lost, and it is a failsafe member no
        more. A job that it was a failsafe member of has no failsafe members until its next generation. Event
        NodeForgotten. If the node had left, or was already lost, its record and its cordon are removed, and a node that
        joins under that name begins anew; event NodeRemoved. The same ``request`` again changes nothing: it
        returns the node as it is, or says that that request removed it. Refused: ``not_found``, ``not_live`` if its
        lease has not lapsed."""
        ...

    async def remove(self, uid: str, by: str = "") -> None:
        """Remove an ended job without holders that have not lapsed, and not lendable (``stale`` otherwise), or a job of
        the history. An unknown uid is no error. The name's highest number stays for ever. Event JobDeleted, which says
        by whom: the user who asked for it, or ``retention``."""
        ...

    async def shelve(self, uids: Collection[str], before: float, most: int) -> bool:
        """Move these ended jobs, unchanged, into the history, which no beat brings. A job that is lendable, or that has
        holders which have not lapsed, is left out. Also remove a few jobs from the history: those that ended before
        that Unix time (none if it has not come yet), and those of more than ``most`` of one owner: that never ran, and
        then the oldest. Of all owners ten times as many stay. Returns true if there may be more to remove. Event
        JobDeleted for each, by ``retention``. Only ``past``, ``history`` and ``remove`` find a job of the history: its
        name is free."""
        ...

    async def past(self, ref: str) -> PastJobs:
        """Finds a job of the history: the job with this uid, else the last to end of this name, else a few jobs whose
        uids begin with ``ref``."""
        ...

    async def history(self, after: str, limit: int) -> PastJobs:
        """A page of the history, by time of end, oldest first: jobs after this place (empty: from the beginning), with
        those that cannot be read ``limit`` at most, and fewer where the records are large."""
        ...

    async def history_bytes(self, owners: Collection[int]) -> dict[int, int]:
        """Of each of these owners (uids) what his jobs of the history count in ``Quota.bytes``."""
        ...

    async def cordon(
        self, node: str, cordon: Cordon | None, request: str, did: str = "", *, by: str = ""
    ) -> NodeRecord:
        """Set or clear a node's cordon (``not_found``). Kept over the node's restarts and lives. The same ``request``
        again returns the node and changes nothing. ``by``: who clears it. Event NodeCordoned / NodeUncordoned."""
        ...

    async def queues(self, expect_rev: int, tree: Queues, request: str, text: str, did: str = "") -> QueuesRecord:
        """Replace the tree of queues (its rev becomes ``expect_rev`` + 1, or stays its own if that is higher). Refused
        (``stale``) if the stored rev is another one (0: there is no tree). The same ``request`` again returns the
        record and changes nothing. Event QueueChanged."""
        ...

    async def windows(self, expect_rev: int, windows: Windows, request: str, text: str, did: str = "") -> WindowsRecord:
        """Replace the maintenance windows; checks and replies are those of ``queues``. Event WindowsChanged."""
        ...

    async def pods(self, wanted: Mapping[str, Collection[str]]) -> dict[str, tuple[PodState, ...]]:
        """The pods that these nodes publish, by job. ``wanted``: nodes to uids of jobs. Each of these jobs is a key,
        and no other."""
        ...

    async def events(self, after: str, limit: int, before: str = "") -> tuple[JobEvent, ...]:
        """Events after this id (``0-0`` from the beginning) and before the other (empty: to the end), oldest first;
        with a negative limit the newest -limit of them."""
        ...

    async def wait(self, after: str, timeout: float) -> str:
        """Return the newest event's id as soon as there is one after ``after``, or ``after`` when ``timeout`` seconds
        have passed. Uses its own connection."""
        ...

    async def wake(self, after: str, timeout: float, node: str, jobs: Collection[str]) -> Woken:
        """As ``wait``, of events that concern all nodes, this node, or the members, holders and failsafe members of
        these ``jobs`` (uids). What happens within a gang comes with the changes of its job, where this client has read
        the job up to the event before."""
        ...

    async def saved(self, after: str, timeout: float, nodes: Collection[str]) -> Saves:
        """What each of ``nodes`` has reported as saved on its disk. Returns as soon as some node has reported after
        ``after`` (empty: at once), or when ``timeout`` seconds have passed. Uses the connections of ``wait``."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...
