"""The lease process: hears the agent's words, asks the store, writes the grants; what to do next, ``core`` says. Asks
other nodes and answers them; what, ``failsafe`` says.

One turn after the other, and each is short: nothing is waited for but in ``_pause``, there for everything at once.
Standard library only. Must never wait for anybody without a bound, nor look up a name.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from pathlib import Path
from typing import Any

from nodeagent import __version__
from nodeagent.lease.core import Core, LeaseCall
from nodeagent.lease.failsafe import Failsafe
from nodeagent.lease.grants import (
    OBEYED_FORM,
    Grant,
    answer_file,
    grant_keys,
    grants_folder,
    read_grant_of,
    read_twice,
    write_grant,
)
from nodeagent.lease.lending import Ask, LoanAnswer, Promises
from nodeagent.lease.links import LeaseLinks, StoreAnswer
from nodeagent.lease.order import order_file, read_order, script_of
from nodeagent.lease.peers import PeerPort
from nodeagent.lease.statefiles import (
    NOBODY,
    NOT_BRIDGED,
    Bridged,
    LeaseStatus,
    Pulse,
    PulseWriter,
    address_reader,
    lease_folder,
    promises_reader,
    pulse_file,
    read_departure,
    read_pulse,
    read_withdrawn,
    table_file,
    table_reader,
    take_lock,
    unannounced,
    wake_socket,
    write_address,
    write_bridged,
    write_departure,
    write_promises,
    write_status,
    write_unannounced,
    write_withdrawn,
)
from nodeagent.lease.whichstore import LeaseAnswer, LeaseAsk, lease_answer
from nodeagent.lease.withdrawals import jobs_and_numbers
from nodeagent.osutil.linux import bind_private, boot_id, boottime, hold_folder
from nodeagent.osutil.stderr import lossy_stderr
from nodeagent.osutil.suspend import Suspension, suspended
from nodeagent.osutil.untrusted import UntrustedError, UntrustedFolder

IDLE_EXIT = 5.0
"""Seconds without an order and without a word of an agent until the process ends."""
TURN = 0.5
"""Seconds between two looks while there is no order."""
SLICE = 0.25
"""Seconds between two beats of the pulse while the store is waited for."""
LONGEST_WORD = 2048
MOST_TROUBLES = 100
"""Kinds of trouble that are reported, each once."""


def main() -> None:
    """``RUN_FOLDER``: the agent's. ``FD``: a pidfd, inherited; this process ends with that one. Exit code 0: there is
    nothing to do here any more."""
    sys.stderr = lossy_stderr()
    run = Path(sys.argv[1])
    folder = lease_folder(run)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = take_lock(folder, __version__)
    if lock is None:
        note(f"another lease process runs with {run}: this one ends")
        return
    Process(run, lock, int(sys.argv[2]) if len(sys.argv) > 2 else None, Suspension(suspended)).run()


def note(text: str) -> None:
    print(f"nodeagent lease: {text}", file=sys.stderr)


class Process:
    """One life of it. ``lock``: its lock's file; ``ends_with``: a pidfd; ``suspension``: of this machine."""

    def __init__(self, run: Path, lock: int, ends_with: int | None, suspension: Suspension) -> None:
        self._folder, self._grants = lease_folder(run), grants_folder(run)
        self._lock, self._ends_with = lock, ends_with
        self._run_folder = hold_folder(run)
        """Held: it may be in /tmp, and there may be no agent that holds it."""
        self._boot = boot_id()
        self._troubles: set[str] = set()
        before = read_pulse(pulse_file(self._folder))
        self._pulse = PulseWriter(self._folder)
        self._wake = _listen(wake_socket(self._folder))
        now = boottime()
        self._saved = read_departure(self._folder, now)
        self._withdrawn = read_withdrawn(self._folder, now)
        """As it was written."""
        self._pods = grant_keys(self._grants)
        granted = {key: read_grant_of(self._grants, key).until for key in self._pods}
        last = before.last if before is not None else None
        self._core = Core(now, self._saved, granted, last, self._withdrawn)
        self._failsafe = Failsafe(self._core, self._promised(now), lambda: os.urandom(16).hex())
        self._table = table_reader(self._folder, self._boot)
        self._peers: PeerPort | None = None
        self._asked = False
        """Something has arrived at ``_peers``, as the last pause has seen."""
        self._address: str | None = None
        """As it was written for ``_peers``."""
        self._bridged: Bridged | None = None
        """As it was written; None: an earlier process's, if any."""
        self._noted_bridged = NOT_BRIDGED
        """As the log has it."""
        self._links = LeaseLinks()
        self._order_file = str(order_file(self._folder))
        self._stamp: tuple[int, ...] | None = ()
        """Of the order that was read last; None: there was none; empty: it was not looked for yet."""
        self._ended = False
        self._agent_seen = now
        self._suspension = suspension
        self._written: dict[str, Grant] = {}
        self._look_for_pods = True
        """There may be others than in ``_pods``: at a start, after a word, and at each renewal, if a word was lost."""
        self._unannounced = 0
        """As it was written."""
        self._status = self._noted = LeaseStatus("idle", "", NOBODY)
        """As it was written, and as the log has it."""

    def run(self) -> None:
        """Until there is nothing to do any more."""
        while True:
            self._wake_up()
            self._take_order()
            self._bridge()
            self._read_answers()
            call = self._core.look(boottime(), self._obeyed)
            self._show()
            if call is not None:
                self._ask(call)
            if self._is_over():
                return
            self._pause()

    # --- what comes in

    def _wake_up(self) -> None:
        if slept := self._suspension.since():
            self._suspension.note()
            note(f"the machine was suspended for {slept:.0f} s")
            self._core.woke(boottime(), slept)

    def _take_order(self) -> None:
        try:
            stat = os.stat(self._order_file)  # noqa: PTH116 (each turn: pathlib takes longer than the call)
            stamp: tuple[int, ...] | None = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        except FileNotFoundError:
            stamp = None
        if stamp == self._stamp:
            return
        try:
            order = read_order(self._folder, self._boot)
        except OSError as error:  # it is read again in the next turn
            self._complain(f"{self._order_file} cannot be read", error)
            return
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._stamp = stamp
            note(f"{self._order_file} is no order that this version ({__version__}) can read: {error!r}")
            return
        self._stamp = stamp
        before = self._core.order
        if before is not None:  # what an earlier order asked for grants a later one nothing
            if order is None or (order.server, order.timeout) != (before.server, before.timeout):
                self._links.close()
            elif order.incarnation != before.incarnation:
                self._links.forget()
        self._ended = before is not None and order is None
        self._core.take(boottime(), order)

    def _take_port(self) -> None:
        """That of the order, written down. Tried once a turn until it can be had, and until it is written."""
        order = self._core.order
        if order is None:
            return
        if self._peers is None or self._peers.door != order.door:
            if self._peers is not None:
                self._peers.close()
                self._peers = None
            try:
                self._peers = PeerPort(order.door, address_reader(self._folder).once(), self._note_once)
            except OSError as error:
                self._complain("no port can be opened on which others ask this node", error)
                return
            self._address = None
        if self._address == self._peers.address:
            return
        try:
            write_address(self._folder, self._peers.address)
        except OSError as error:
            self._complain("where others ask it cannot be written down, and is tried again each turn", error)
            return
        self._address = self._peers.address

    def _take_table(self) -> None:
        """What the agent knows of the jobs. None that this process can read: it lends nothing."""
        try:
            self._failsafe.table = self._table.check()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._failsafe.table = None
            self._note_once(f"{table_file(self._folder)} is no table that this version can read: {error!r}")

    def _promised(self, now: float) -> Promises:
        """What earlier processes promised. Where it cannot be kept, the agent takes it that there may be anything."""
        promises = promises_reader(self._folder, self._boot).once()
        if promises is None:
            promises = Promises(self._boot, now, not self._had_order(), {})
            try:
                write_promises(self._folder, promises)
            except OSError as error:
                self._complain("promises cannot be written down", error)
        return promises

    def _had_order(self) -> bool:
        """Of an agent since the boot, in any version."""
        try:
            return read_order(self._folder, self._boot) is not None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return True

    def _obeyed(self) -> dict[str, float]:
        return {key: read_obeyed(self._grants, key) for key in self._keys()}

    def _keys(self) -> list[str]:
        """As seen last where there is no looking: others were granted nothing, and these may run still."""
        try:
            return grant_keys(self._grants)
        except OSError as error:
            self._complain("the grants cannot be looked at", error)
            return self._pods

    def _receive(self) -> bool:
        """A word of the agent's, where there is one. Whether there is something to do at once."""
        try:
            data = self._wake.recv(LONGEST_WORD + 1)
        except BlockingIOError:
            return False
        now, urgent = boottime(), False
        match _word(data):
            case {"alive": True, "cut_off": True, "standing": str(text)}:
                self._core.agent_seen(now, cut_off=True, standing=jobs_and_numbers(text))
            case {"alive": True}:
                self._core.agent_seen(now)
            case {**rest} if not rest:
                self._written.clear()  # perhaps a pod's file is there in place of one that had the same name
                self._look_for_pods = urgent = True
                self._core.urge(now)
            case _:
                return False
        self._agent_seen = now
        return urgent

    # --- failsafe time

    def _bridge(self) -> None:
        """Ask whom there is to ask, hear what has arrived."""
        self._take_table()
        self._take_port()
        failsafe, peers = self._failsafe, self._peers
        for question in failsafe.questions(boottime()):
            if not question.address:
                failsafe.answered(question.nonce, self._answer(question.ask))
            elif peers is not None:
                peers.ask(*question)
        if peers is None:
            return
        for sender, nonce, message in peers.receive() if self._asked else ():
            if isinstance(message, LoanAnswer):
                failsafe.answered(nonce, message)
            elif isinstance(message, LeaseAsk):
                peers.send(sender, nonce, lease_answer(self._core, boottime()))
            elif not isinstance(message, LeaseAnswer):  # which no lease process asks for
                peers.send(sender, nonce, self._answer(message))

    def _answer(self, ask: Ask) -> LoanAnswer:
        """Before this node agrees, it writes the promise down and reads again what the agent knows."""
        steps = self._failsafe.answer(ask, boottime())
        try:
            promises = next(steps)
            if promises is not None:
                write_promises(self._folder, promises)
            self._take_table()
            steps.send(self._failsafe.table)
        except StopIteration as end:
            answer: LoanAnswer = end.value
            return answer
        except OSError as error:
            self._complain("a promise cannot be written down", error)
        return LoanAnswer(False, "it cannot write down what it promises")

    # --- what goes out

    def _ask(self, call: LeaseCall) -> None:
        """The store, or for a link to it, unless that is under way."""
        core, order, links, now = self._core, self._core.order, self._links, boottime()
        assert order is not None
        if links.can_add():
            links.add(order.server, order.timeout, now, now + order.fence)
        if links.can_ask():
            self._look_for_pods = True
            arguments: dict[str, Any] = {"node": order.node, "life": order.life, "era": order.era}
            if call == "renew":
                step, asks = order.renew, core.asks(now)
                arguments |= {"length": round(order.lease * 1000), "asks": asks}
                arguments |= {"standing": core.standing} if asks else {}
                arguments["late"] = core.asks_for_lateness(now)
            elif call == "let go":
                free = core.free_of(now, self._obeyed)
                if free is None or core.withdrawn != self._withdrawn:
                    return
                step = order.let_go
                arguments |= {"uid": free[0], "number": free[1]}
            else:
                assert core.departure is not None
                step = order.leave
                arguments |= {"start": order.start, "why": core.departure.why}
            now = boottime()
            words = (order.prefix, order.record_version, json.dumps(arguments))
            links.ask(call, now, now + order.fence, script_of(self._folder, step), *words)

    def _read_answers(self) -> None:
        """Of the store."""
        for outcome in self._links.outcomes():
            if isinstance(outcome, StoreAnswer):
                self._answered(outcome)
            else:
                self._core.unanswered(outcome.sent, boottime(), outcome.why)

    def _answered(self, answer: StoreAnswer) -> None:
        core, now, sent = self._core, boottime(), answer.sent
        match answer.reply:
            case [1, str(clocks), str(waits)] if answer.call == "renew":
                core.unannounced = unannounced(clocks)
                core.answered(sent, now, jobs_and_numbers(waits))
            case [1, str(text)] if answer.call == "let go":
                core.let_go(jobs_and_numbers(text))
            case [1] if answer.call == "leave":
                core.gave_back()
            case [0, "lost", str(text)]:
                core.refused(text)
            case [0, str(code), str(text)]:
                if code == "link":
                    self._links.close()
                core.unanswered(sent, now, text, code)
            case reply:
                self._links.close()
                core.unanswered(sent, now, f"the store answered what is no answer: {str(reply)[:200]}")

    def _show(self) -> None:
        """Writes what others read. The end of a life is written down before it is reported."""
        core = self._core
        if core.departure != self._saved:
            try:
                write_departure(self._folder, core.departure)
                self._saved = core.departure
            except OSError as error:
                self._complain("that this life goes cannot be written down", error)
        if core.withdrawn != self._withdrawn:
            try:
                write_withdrawn(self._folder, core.withdrawn)
                self._note_withdrawals()
            except OSError as error:
                self._complain("that this node lets go of a job cannot be written down", error)
        self._show_grants()
        try:
            self._pulse.beat(Pulse(boottime(), core.renewed, core.until, core.last))
            self._write_status()
            self._publish_unannounced()
            self._publish_bridged()
        except OSError as error:
            self._complain("its state cannot be written", error)

    def _note_withdrawals(self) -> None:
        before, self._withdrawn = self._withdrawn, self._core.withdrawn
        for uid, one in self._withdrawn.jobs.items():
            if before.jobs.get(uid) != one:
                decided = "its agent is silent or cut off from the store, and the job waits"
                what = "nothing runs, and the store knows" if one.over else decided
                note(f"lets go of generation {one.number} of job {uid}: {what}")

    def _show_grants(self) -> None:
        if self._look_for_pods:
            self._look_for_pods, self._pods = False, self._keys()
            self._written = {key: self._written[key] for key in self._pods if key in self._written}
        for key in self._pods:
            grant = self._core.grant(key)
            if self._written.get(key) != grant:
                try:
                    write_grant(self._grants, key, grant)
                    self._written[key] = grant
                except OSError as error:
                    self._complain(f"the grant {key} cannot be written", error)

    def _write_status(self) -> None:
        core = self._core
        gone = core.departure if core.state in ("stopping", "giving up", "left") else None
        order = core.order
        of = (order.life, order.start, order.era) if order is not None else NOBODY
        status = LeaseStatus(core.state, gone.why if gone is not None else core.away, of)
        if status == self._status:
            return
        if status.state != self._noted.state or bool(status.why) != bool(self._noted.why):
            note(f"{status.state} (life {of[0] or 'none'})" + (f": {status.why}" if status.why else ""))
        self._noted = status
        write_status(self._folder, status)
        self._status = status

    def _publish_unannounced(self) -> None:
        """Until a renewal brings it, what an earlier process wrote stands."""
        newest = self._core.unannounced
        if newest != self._unannounced:
            write_unannounced(self._folder, newest)
            self._unannounced = newest

    def _publish_bridged(self) -> None:
        failsafe = self._failsafe
        bridged = Bridged(dict(failsafe.lent), dict(failsafe.refusals))
        if bridged == self._bridged:
            return
        before = self._noted_bridged
        for uid in bridged.lent.keys() - before.lent.keys():
            note(f"job {uid} runs on without the store, on failsafe time from its failsafe members")
        for uid, why in bridged.refusals.items() - before.refusals.items():
            note(f"job {uid} gets no failsafe time: {why}")
        self._noted_bridged = bridged
        write_bridged(self._folder, bridged)
        self._bridged = bridged

    def _complain(self, what: str, error: OSError) -> None:
        """Once."""
        if what not in self._troubles:
            self._troubles.add(what)
            note(f"{what}: {error}")

    def _note_once(self, text: str) -> None:
        if text not in self._troubles and len(self._troubles) < MOST_TROUBLES:
            self._troubles.add(text)
            note(text)

    # --- the turns

    def _pause(self) -> None:
        """Until something is due or somebody speaks."""
        order, now, links = self._core.order, boottime(), self._links
        left = self._core.due() - now
        turn = min(TURN, order.heartbeat) if order is not None else TURN
        if self._core.awaits_shims:
            left = turn / 4
        elif left <= 0:  # what is waited for is the store, or another order
            left = turn
        left = min(left, max(0.0, self._failsafe.due() - now))
        files = {self._wake.fileno(): select.POLLIN}
        if self._peers is not None and self._peers.fileno() >= 0:
            files[self._peers.fileno()] = select.POLLIN
        if self._ends_with is not None:
            files[self._ends_with] = select.POLLIN
        until = now + min(left, turn, SLICE if links.files() else TURN)
        wake, self._asked = self._wake.fileno(), False
        while True:  # that the agent is there is no reason for a turn, nor is a part of what the store says
            ready = _ready(files | links.files(), min(until, links.due()) - boottime())
            self._asked |= self._peers is not None and self._peers.fileno() in ready
            urgent = wake in ready and self._receive()
            if links.turn(ready, boottime()) or urgent:
                return
            if (ready & files.keys()) - {wake} or boottime() >= until:
                return

    def _is_over(self) -> bool:
        if self._core.state == "left" or self._ended:
            return True
        if self._core.order is None and boottime() - self._agent_seen > IDLE_EXIT:
            return True
        if self._ends_with is not None and _ready({self._ends_with: select.POLLIN}, 0):
            return True
        return os.fstat(self._lock).st_nlink == 0  # its folder was removed: the node is no more


def _listen(path: Path) -> socket.socket:
    """Where the agent's words arrive. The lock is held: what lies there is a dead one's."""
    ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ear.setblocking(False)
    bind_private(ear, path)
    return ear


def _word(data: bytes) -> object:
    """None for what is none."""
    try:
        word: object = json.loads(data) if len(data) <= LONGEST_WORD else None
    except (ValueError, RecursionError):
        return None
    return word


def _ready(files: dict[int, int], seconds: float) -> set[int]:
    """Those of which one of their ``poll`` events comes."""
    poll = select.poll()
    for fd, events in files.items():
        poll.register(fd, events)
    return {fd for fd, _ in poll.poll(max(0.0, seconds) * 1000)}


def read_obeyed(folder: Path, key: str) -> float:
    """``folder``: that of the grants. No workers run in this pod that were started before this time; 0 if its shim has
    not reported. The record is the job's user's, in a folder that is not: what lies in it may be any number, and
    concerns that user's pod only."""
    place = answer_file(folder / key)
    try:
        with UntrustedFolder(place.parent) as answers, answers.open(place.name, anyones=True) as file:
            found = read_twice(file.fileno(), OBEYED_FORM)
    except UntrustedError:
        return 0.0
    return found[0] if found is not None else 0.0
