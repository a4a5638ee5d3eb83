"""The shim: one small process per pod that owns its workers and outlives the agent.

``python -m nodeagent.shim FOLDER [FD]``: FOLDER holds pod.json (written by the host), FD is a connection to the
agent that started it; without one (systemd started it) the agent calls. Standard library only; runs as the job's user
in its own session. It stops everything by itself when the pod's granted time runs out, and everything dies with it.
Must never decide what should run.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nodeagent.lease.grants import GrantAnswer, answer_file
from nodeagent.osutil.linux import become_subreaper, boottime, write_atomic
from nodeagent.osutil.stderr import lossy_stderr
from nodeagent.osutil.suspend import Suspension, suspended
from nodeagent.shim.fence import ProcessGuard
from nodeagent.shim.gang import LocalGang
from nodeagent.shim.grace import Grace
from nodeagent.shim.hang.watch import HangWatch
from nodeagent.shim.hook import Supervision
from nodeagent.shim.link import OPS, FirstSteps, LeavingWorkers, PendingCommits, WorkerLink
from nodeagent.shim.loop import Delay, Loop
from nodeagent.shim.output import LogWriter, QueuedFile, RotatingFile, log_to, note
from nodeagent.shim.peers import VERSION, AgentCommand, Peer, ShimPeers
from nodeagent.shim.prepare import Preparation
from nodeagent.shim.processes import ShimChildren, open_more_files, users_below
from nodeagent.shim.promise import DamagedTokenError, PromisedToken, TokenWords, read_started
from nodeagent.shim.ready import PlaceReadiness
from nodeagent.shim.rendezvous import Holder, PlacePorts, PortSearch, taken
from nodeagent.shim.snapshots import KeptSnapshots, WriteOut, available_memory
from nodeagent.shim.worker import Parts

TICK = 0.25
"""Seconds between two looks at the pod's grant. The fence reads what was added when it is needed, but nobody says when
time is taken back, or that workers are to stop in order."""
IDLE_EXIT = 60.0
"""Seconds without an agent and without work until the shim ends."""
GENERATIONS_KEPT = 20
"""Folders of output, and records, of older generations are removed."""


class Shim:
    """The pod's state, and the commands on it."""

    def __init__(self, folder: Path, agent: int | None) -> None:
        self.folder = folder
        self.pod: dict[str, Any] = json.loads((folder / "pod.json").read_text())
        self.state, self.logs = Path(self.pod["state"]), Path(self.pod["logs"])
        if agent is None:
            log_to(self.logs / "shim.log")
        (self.state / "errors").mkdir(exist_ok=True)
        record = Path(self.pod["grant"])
        self.loop, self.guard, self.children = Loop(), ProcessGuard(record, Suspension(suspended)), ShimChildren()
        self._answer = GrantAnswer(answer_file(record))
        self.writer, self._trouble = LogWriter(), ""
        """What writes logs, and what was wrong with that when it was looked at last."""
        self.guard.watchdog.start(self.loop, self.children)
        self.preparation = Preparation(
            self.loop, self.children, self.pod, folder / "s", self.changed,
            lambda text: note(self._file(self.logs / "pod.log"), text),
        )  # fmt: skip
        ports = (int(self.pod["ports"][0]), int(self.pod["ports"][1]))
        self.holder = Holder(self.loop, self.pod["address"], ports, self.changed)
        self.place_ports = PlacePorts(PortSearch(self.loop, ports, self.changed))
        self.gang: LocalGang | None = None
        self._doubted: LocalGang | None = None
        """The last one whose workers found something wrong with what this node had checked."""
        self.readiness: PlaceReadiness | None = None
        self.hang: HangWatch | None = None
        self.link = WorkerLink(lambda: self.gang)
        self.commits = PendingCommits(self.link, self.changed)
        self.snapshots = KeptSnapshots(self.link, self.changed, available_memory)
        self.leaving = LeavingWorkers(self.link, self._grace)
        self.first_steps = FirstSteps(
            self.link, self.loop, lambda: self.gang.workers if self.gang is not None else (), self.changed
        )
        self.promised = PromisedToken(self.loop, self.state / "highest.json", write_atomic)
        self.started: TokenWords | None = read_started(self.state / "started.json", self.promised.token)
        self.retiring = False
        self._pushes = False
        """A push waits for the end of this round of the loop."""
        self._heeded = 0.0
        """``stop_before`` of the grant by which the gang was started, or is being stopped."""
        self._idle: Delay | None = None
        self.peers = ShimPeers(self.loop, folder, self.pod["agent_uid"], self._received, self._watch_idle)
        if agent is not None:
            os.set_inheritable(agent, False)  # no worker can speak for us
            self.peers.connect(socket.socket(fileno=agent))

    # -- life

    def run(self) -> None:
        self.loop.on_child(self._on_child)
        self.loop.watch(self.guard.wake, self._on_fence)
        self.preparation.check()
        self.changed()
        self._watch_idle()
        self._tick()
        self.loop.run()
        self.writer.flush()

    def _on_child(self) -> None:
        self.children.collect()
        if self.gang is not None:
            self.gang.settle()

    def _on_fence(self) -> None:
        os.eventfd_read(self.guard.wake)
        if self.gang is not None:
            self.gang.on_fence()
        self.changed()

    def _tick(self) -> None:
        self._obey()
        self._doubt()
        if self.gang is not None:
            self.gang.look()
        if self.writer.trouble != self._trouble:
            self._trouble = self.writer.trouble
            self.changed()
        self.loop.after(TICK, self._tick)

    def _obey(self) -> None:
        """Do what the grant says. The fence sees to its time."""
        grant, gang = self.guard.look(), self.gang
        if gang is None or gang.settled:
            with contextlib.suppress(OSError):  # the lease process waits no longer than the time lasts
                self._answer.obeyed(grant.stop_before)
        elif grant.stop_before > self._heeded:
            self._heeded = grant.stop_before
            if not gang.stopping:
                self._do_stop({"grace": self.pod["grace"], "sooner": self.pod["sooner"]})

    def _doubt(self) -> None:
        """Nothing runs here, and something is wrong with the job's folders: have all of it checked again."""
        gang = self.gang
        if gang is not None and not gang.settled:
            return
        if self.preparation.in_trouble or (gang is not None and gang.unentered and gang is not self._doubted):
            self._doubted = gang
            self.preparation.doubt()

    def _watch_idle(self) -> None:
        if self.peers.agent is not None or not self._quiet():
            if self._idle is not None:
                self._idle.cancel()
            self._idle = None
        elif self._idle is None:
            self._idle = self.loop.after(IDLE_EXIT, self._end)

    def _quiet(self) -> bool:
        return self.gang is None or self.gang.settled

    def _end(self) -> None:
        """Remove the runtime files and go; the fork server goes with us. How it ended is sent before."""
        self._push()
        self.holder.release()
        self.preparation.fork_server.kill()
        self.peers.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.loop.stop()

    # -- commands and records

    def _file(self, path: Path) -> RotatingFile:
        return QueuedFile(self.writer, path, self.pod["log_max_bytes"], self.pod["log_keep"])

    def _received(self, peer: Peer, command: AgentCommand) -> None:
        op = command.get("op")
        if op == "attach":
            if self.peers.attach(peer):
                self._watch_idle()
        elif isinstance(op, str) and op.startswith(OPS):
            self.link.receive(peer, command)
        elif peer is not self.peers.agent:
            peer.send(json.dumps({"v": VERSION, "error": "only the agent may give commands"}))
        else:
            self._carry_out(command)

    def _carry_out(self, command: AgentCommand) -> None:
        try:
            getattr(self, f"_do_{command['op']}", self._unknown)(command)
        except OSError as error:  # a full disk, say: refused, and what runs goes on
            self._refuse(command, str(error))
        self.changed()

    def _refuse(self, command: AgentCommand, why: str) -> None:
        self.peers.notify_agent(f"{command['op']} failed: {why}")
        if command["op"] == "promise":  # never, without a record of it: the next shim says why this node cannot
            self._do_retire(command)

    def _once_promised(self, command: AgentCommand) -> None:
        """Carry it out when its generation is on the disk as promised, unless that is being written for it already."""

        def written(trouble: str) -> None:
            if trouble:
                self._refuse(command, trouble)
                self.changed()
            else:
                self._carry_out(command)

        if command["token"] != self.promised.newest:
            self.promised.write(command["token"], written)

    def _unknown(self, command: AgentCommand) -> None:
        self.peers.notify_agent(f"unknown command {command['op']}")

    def _do_ping(self, command: AgentCommand) -> None:
        self._push()  # an echo answers all that came before it
        self.peers.echo(command["number"])

    def _do_promise(self, command: AgentCommand) -> None:
        token, newest = command["token"], self.promised.newest
        if self.gang is not None and not self.gang.doomed:
            self.peers.notify_agent(f"not promised: workers of generation {self.gang.token['number']} still live")
        elif newest is not None and token != newest and token["number"] <= newest["number"]:
            self.peers.notify_agent(f"not promised: generation {newest['number']} was promised before")
        elif token != self.promised.token:
            self._once_promised(command)
        else:
            local = self.preparation.local_address
            if self.place_ports.token != token or self.place_ports.problem:
                self.place_ports.hold(token, local, command["ports"])
            if self.holder.token != token or self.holder.failed:
                self.holder.release()
                if command["rendezvous"]:
                    self.holder.hold(token, local, self.preparation.fork_server, command["above"])

    def _do_relocate(self, command: AgentCommand) -> None:
        """What is held already stays where it is: the agents know it."""
        if command["address"] != self.pod["address"]:
            self.preparation.relocate(command["address"])
            self.place_ports.search.forget()
            self.holder.relocate(command["address"])

    def _do_start(self, command: AgentCommand) -> None:
        token, newest = command["token"], self.promised.newest
        number = token["number"]
        if (newest is not None and number < newest["number"]) or (
            self.started is not None and number <= self.started["number"]
        ):
            return
        if newest is not None and number == newest["number"] and token != newest:
            self.peers.notify_agent(f"not started: another generation {number} was promised")
            return
        if not self._quiet():
            self.peers.notify_agent("not started: an older generation still lives")
            return
        if token != self.promised.token:
            self._once_promised(command)
            return
        self._prune(number)
        fit = self.preparation.fit
        environments = [self.preparation.environment(env) for env in command["environments"]] if fit else []
        if self.hang is not None:
            self.hang.close()
        self.hang = None
        if self.pod["hang"] is not None:
            self.hang = HangWatch(
                self.loop, self.children, self.pod["hang"], self.folder, self.logs, self.changed
            )  # fmt: skip
            pages = map(self.hang.environment, command["ranks"])
            environments = [env | page for env, page in zip(environments, pages, strict=False)]
        if command["places"]:
            path = self.state / "roles.json"
            write_atomic(path, command["roles_file"], durable=False)
            environments = [env | {"NODEAGENT_ROLES_FILE": str(path)} for env in environments]
        local = self.preparation.local_address
        # The last that can fail: until then it is asked for again.
        write_atomic(self.state / "started.json", json.dumps(token), durable=False)
        self.started = token
        parts = Parts(
            self.loop, self.guard, self.children, self.preparation.fork_server,
            self.preparation.containers() if fit else None, self.pod, self.state, self.logs, self._gang_changed,
            self.link.launched, self._file, self._unready,
            partial(taken, local, self._ports_given(token), os.getuid(), lambda: users_below(os.getpid())), self._anew,
        )  # fmt: skip
        if self.readiness is not None:
            self.readiness.close()
        self.readiness = None
        self.gang = gang = LocalGang(parts, self._write_out, token, environments, command["ranks"], command["places"])
        grant = self.guard.look()
        self._heeded = grant.stop_before
        if boottime() > command["not_after"]:
            gang.refused, gang.fenced = "the order to start came too late", True
        elif boottime() >= grant.until:
            gang.refused, gang.fenced = "nobody has granted this pod time", True
        elif token["number"] <= grant.barred:
            gang.refused, gang.fenced = "the node has let go of this generation", True
        elif not fit:
            gang.refused = self.preparation.reason
        if gang.refused:
            gang.settle()
            return
        if self.holder.held is None or not self.holder.held["store_hosted"]:
            self.holder.starting()
        self.place_ports.starting()
        self.preparation.used(len(gang.ranks))
        if self.hang is not None:
            self.hang.watch(gang)
        gang.start()
        if self.pod["ordered"]:
            self.readiness = PlaceReadiness(parts, gang, self.changed)
            self.readiness.watch()

    def _ports_given(self, token: TokenWords) -> list[int]:
        """Those that were kept for the workers of this generation to bind themselves."""
        held = self.holder.held
        ports = self.place_ports.held if self.place_ports.token == token else []
        if held is not None and held["token"] == token and not held["store_hosted"]:
            ports = [int(held["address"].rpartition(":")[2]), *ports]
        return ports

    def _unready(self, place: str) -> None:
        if self.readiness is not None:
            self.readiness.again(place)

    def _anew(self, rank: int) -> None:
        if self.hang is not None:
            self.hang.forget(rank)

    def _do_release(self, command: AgentCommand) -> None:
        if self.gang is not None and self.gang.token == command["token"] and boottime() < self.guard.look().until:
            self.gang.release(command["roles"])

    def _do_stop_role(self, command: AgentCommand) -> None:
        if self.gang is not None and self.gang.token == command["token"]:
            self.gang.stop_role(command["role"], command["number"])

    def _do_start_role(self, command: AgentCommand) -> None:
        if self.gang is not None and self.gang.token == command["token"] and boottime() < self.guard.look().until:
            self.gang.restarts.rounds.start(command["role"], command["number"], command["wait"])
            self.changed()

    def _do_stop(self, command: AgentCommand) -> None:
        if self.readiness is not None:
            self.readiness.close()
        if self.hang is not None:
            self.hang.stop_reading()
        if self.gang is not None:
            given_up, broken = command.get("given_up"), command.get("broken", False)
            self.gang.stop(command["grace"], given_up, broken, command.get("sooner", {}), command.get("later", ()))

    def _do_committed(self, command: AgentCommand) -> None:
        self.commits.answered(command["request"], command["refused"])

    def _do_look(self, command: AgentCommand) -> None:
        limit, gang = command.get("limit"), self.gang
        if limit is None:
            if self.hang is not None:
                self.hang.ask()
        elif self.hang is None and gang is not None and gang.phase == "running":
            rule = {"progress": limit, "phases": limit}
            self.hang = HangWatch(self.loop, self.children, rule, self.folder, self.logs, self.changed)
            self.hang.watch(gang)
            self.changed()

    def _grace(self) -> Grace | None:
        return self.gang.grace if self.gang is not None else None

    def _write_out(self, changed: Callable[[], None]) -> WriteOut:
        log = self._file(self.logs / "pod.log")
        supervision = Supervision(self.loop, self.guard, self.children)
        return WriteOut(supervision, self.snapshots, self.commits, log, changed)

    def _do_retire(self, command: AgentCommand) -> None:
        self.retiring = True
        if self.gang is not None:
            self.gang.stop(None)
        self._gang_changed()

    def _gang_changed(self) -> None:
        self.changed()
        if self._quiet():
            self._obey()
            self._watch_idle()
            gang = self.gang
            self._doubt()
            if gang is not None and (gang.stopping or gang.fenced) and self.holder.token == gang.token:
                self.holder.release()
                self.changed()
            if self.retiring:
                self._end()

    # -- records

    def _prune(self, number: int) -> None:
        """Remove output and error files of generations long past."""
        self.writer.put(lambda: self._prune_logs(number), 0)
        for error in self.state.glob("errors/g*-r*.json"):
            if _is_past(error.name[1:].partition("-")[0], number):
                with contextlib.suppress(OSError):  # a worker made a folder of that name, say: it stays
                    error.unlink()

    def _prune_logs(self, number: int) -> None:
        for folder in self.logs.glob("g*"):
            if _is_past(folder.name[1:], number):
                shutil.rmtree(folder, ignore_errors=True)

    # -- status

    def changed(self) -> None:
        """Push the status to every peer, once for all that this round of the loop has changed: workers die together."""
        if not self._pushes:
            self._pushes = True
            self.loop.after(0.0, self._push)

    def _push(self) -> None:
        """What was printed before is in the logs by then, unless their folder hangs."""
        if not self._pushes:
            return
        self._pushes = False
        self.writer.flush()
        self.peers.push(self.status())

    def status(self) -> dict[str, Any]:
        """As base.PodStatus."""
        gang, fork_server = self.gang, self.preparation.fork_server
        phase, reason, code, passing = self.preparation.phase()
        if gang is not None and (self.preparation.fit or gang.phase != "exited"):
            phase, code, passing = gang.phase, 0, False
            unready = self.readiness.notes if self.readiness is not None else ""
            reason = gang.refused or "; ".join(filter(None, (unready, self.preparation.notes, self._trouble)))
            if phase == "stuck":
                reason = f"processes {', '.join(map(str, gang.stuck))} do not end, even with SIGKILL"
        return {
            "uid": self.pod["uid"],
            "phase": phase,
            "reason": reason or self.holder.problem or self.place_ports.problem,
            "code": code,
            "passing": passing,
            "folder": self.preparation.folder,
            "shim_pid": os.getpid(),
            "fork_server_pid": fork_server.pid,
            "preforked": {child.pid: child.private for child in fork_server.pool.waiting},
            "warming": gang is None and fork_server.warm and fork_server.pool.filling,
            "highest": self.promised.token,
            "generation": gang.token if gang else None,
            "lost": None if gang else self.started,
            "workers": gang.states() if gang else [],
            "exits": gang.exits() if gang else [],
            "restarted": gang.restarts.reported if gang else [],
            "fenced": gang.fenced if gang else False,
            "suspended": self.guard.suspended if gang and gang.fenced else 0.0,
            "refused": gang.refused if gang else "",
            "runtime_failed": gang.runtime_failed if gang else False,
            "taken": gang.taken if gang else "",
            "rendezvous": self.holder.held,
            "ports": self.place_ports.held,
            "portless": self.holder.search.lack or self.place_ports.search.lack,
            "waiting": gang.waiting if gang else [],
            "ready": list(self.readiness.ready) if self.readiness is not None else [],
            "rounds": dict(gang.restarts.rounds.reached) if gang else {},
            "down": sorted(gang.restarts.rounds.down) if gang else [],
            "commit": self.commits.request(),
            "snapshot_bytes": self.snapshots.bytes,
            "written": gang.written if gang else "",
            "stepped": self.first_steps.at,
            "watched": self.hang is not None,
            "stall": self.hang.stall if self.hang is not None else None,
        }


def _is_past(generation: str, number: int) -> bool:
    """Workers may write where these names are: they may be anything."""
    return generation.isdecimal() and int(generation) <= number - GENERATIONS_KEPT


def main() -> None:
    # forks are safe here: the other threads hold no lock that a child takes, and all children exec or look at files
    warnings.simplefilter("ignore", DeprecationWarning)
    sys.stderr = lossy_stderr()
    become_subreaper()
    open_more_files()
    agent = int(sys.argv[2]) if len(sys.argv) > 2 else None
    if agent is None or _has_spoken(agent):
        try:
            shim = Shim(Path(sys.argv[1]), agent)
        except DamagedTokenError as error:  # the last line of its log is why the pod cannot start
            sys.exit(str(error))
        shim.run()


def _has_spoken(agent: int) -> bool:
    """Wait for the first words of the agent whose child this is: it has put this process into the pod's cgroup by then.
    A process that was started before would be outside of it, and so would all below it."""
    readable, _, _ = select.select([agent], [], [], IDLE_EXIT)
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(agent)) as link:
        return bool(readable) and bool(link.recv(1, socket.MSG_PEEK))
    return False
