"""Starts a local cluster and ends it. Owns the supervisor process from the outside: starts it, waits until its nodes
have joined, and makes sure that nothing is left. Must never exceed its bounds."""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from nodeagent import hardware_missing
from nodeagent.local import control, power, registry
from nodeagent.local.layout import (
    DEFAULT,
    NAME,
    LocalError,
    LocalFolders,
    LocalTimedOutError,
    UsageError,
    make_folder,
    temporary_data,
)
from nodeagent.local.registry import SLOTS, choose_ports, node_names

JOIN_TIMEOUT = 60.0
"""Seconds for all nodes to join: many nodes that import at once on two cores take a while."""
END_TIMEOUT = 20.0
"""Seconds for the supervisor to remove everything: the bound of a power cut, that of Redis, and a margin."""
CRASHES = 3
"""After this many ends of an agent that never joined, waiting for it is pointless."""
TAIL = 15
"""Lines of a log shown when something did not start."""
LONGEST_LINE = 500
"""Characters of each of them."""


@contextmanager
def local_session(
    nodes: int, nproc: int | None = None, *, agent: Sequence[str] | None = None, timeout: float = JOIN_TIMEOUT
) -> Iterator[Path]:
    """A private cluster for the life of one command; yields the api socket of its first node.

    ``nproc``: workers to run on each node (None: one per GPU); it decides how GPUs are divided. The cluster ends with
    this process in every case, kill -9 included, and leaves nothing behind. Raises LocalError.
    """
    name = f"run-{secrets.token_hex(4)}"
    read_end, write_end = os.pipe()  # neither is inherited by other children
    try:
        try:
            cluster, supervisor = _launch(name, nodes, nproc, agent, temporary=True, stdin=read_end)
        finally:
            os.close(read_end)
        try:
            wait_joined(cluster, timeout, node_names(nodes), supervisor)
            yield cluster.layout.node("n1").api_socket
        finally:
            os.close(write_end)
            write_end = -1
            _end(cluster, supervisor, keep_data=False)
    finally:
        if write_end >= 0:
            os.close(write_end)


def up(
    nodes: int, name: str, *, agent: Sequence[str] | None = None, timeout: float = JOIN_TIMEOUT
) -> registry.LocalCluster:
    """Start a cluster that stays when this command ends. Raises LocalError; then nothing is left of it but its logs."""
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be a local cluster's name: use at most 16 of a-z, 0-9 and '-'")
    cluster, supervisor = _launch(name, nodes, None, agent, temporary=False, stdin=subprocess.DEVNULL)
    try:
        wait_joined(cluster, timeout, node_names(nodes), supervisor)
    except LocalError:
        try:
            control.ask(cluster.layout.control, {"do": "down", "keep_logs": True})
        except LocalError:  # it has ended, or does not answer: its children end with it
            supervisor.kill()
        _end(cluster, supervisor, keep_data=True)
        raise
    except BaseException:
        supervisor.terminate()
        _end(cluster, supervisor, keep_data=False)
        raise
    supervisor.returncode = 0  # it continues without us: this avoids a warning that it still runs
    return cluster


def down(cluster: registry.LocalCluster, *, keep_logs: bool) -> None:
    """End a cluster. When this returns, no process, socket or folder of it is left, except the logs if they are kept.
    Raises LocalError."""
    pid = control.ask(cluster.layout.control, {"do": "status"})["pid"]
    handle = os.pidfd_open(pid)
    try:
        control.ask(cluster.layout.control, {"do": "down", "keep_logs": keep_logs})
        over, _, _ = select.select([handle], [], [], END_TIMEOUT)
    finally:
        os.close(handle)
    if not over:
        raise LocalTimedOutError(
            f"the supervisor (pid {pid}) did not end within {END_TIMEOUT:g} s: "
            f"`kill -9 {pid}`, then `nodeagentctl local status` clears away what is left"
        )
    if left := power.processes(cluster.uid):
        raise LocalError(f"these processes could not be ended: {', '.join(map(str, sorted(left)))}")


def wait_joined(
    cluster: registry.LocalCluster,
    timeout: float,
    names: Collection[str],
    supervisor: subprocess.Popen[bytes] | None = None,
) -> None:
    """Return when the nodes with these names have joined and every agent that answers knows it. Raises LocalError with
    the last words of an agent that has not joined, or why there is none. ``supervisor``: the cluster's, if it is a
    child of this process; then the cluster ends if its nodes do not join."""
    stays = supervisor is None
    deadline = time.monotonic() + timeout
    unstarted: dict[str, int] = {}
    while True:
        status = _status(cluster, names, supervisor) or {"nodes": []}
        missing, answered = list(names), "the supervisor does not answer"
        for node in (n for n in status["nodes"] if n["name"] in names):
            ready, answer = control.agent_ready(Path(node["socket"]))
            if ready:
                missing.remove(node["name"])
                continue
            answered = node["last_end"] if node["agent_pid"] is None and node["last_end"] else answer
            earlier = unstarted.setdefault(node["name"], node["unstarted"])
            if node["unstarted"] - earlier >= CRASHES:
                raise _not_started(cluster, node, names, stays=stays)
            if node["failed"] or node["crashes"] >= CRASHES:
                raise _not_up(cluster, node, names, stays=stays)
        if not missing:
            seen = [control.live_nodes(Path(n["socket"])) for n in status["nodes"] if n["power"] == "on"]
            missing = sorted({name for known in seen if known is not None for name in names if name not in known})
            answered = "other nodes do not see it yet"
        if not missing:
            return
        if time.monotonic() > deadline:
            what = f"not joined within {timeout:g} s: {', '.join(missing)} ({answered}). {missing[0]}'s agent"
            found, words = _last_words(cluster, what, cluster.layout.node(missing[0]).agent_log)
            step = f"it may still join: {_status_of(cluster)}" if stays else f"try fewer nodes: {_up(cluster, names)}"
            raise LocalTimedOutError(found, words, step)
        time.sleep(0.03)


def _not_started(
    cluster: registry.LocalCluster, node: control.Reply, names: Collection[str], *, stays: bool
) -> LocalError:
    """Why there is no process of a node's agent. ``stays``: the cluster, which tries again."""
    what = f"{node['name']}'s agent is {node['last_end']}"
    where = "" if cluster.temporary else f"; each attempt is in {cluster.layout.supervisor_log}"
    then = f"it is tried again each second: {_status_of(cluster)}" if stays else f"then: {_up(cluster, names)}"
    return LocalError(f"{what}{where}", (), f"see what this machine lacks; {then}")


def _not_up(cluster: registry.LocalCluster, node: control.Reply, names: Collection[str], *, stays: bool) -> LocalError:
    """Why a node's agent ends each time. ``stays``: the cluster."""
    name = node["name"]
    found, words = _last_words(cluster, f"{name}'s agent does not stay up ({node['last_end']}). It", Path(node["log"]))
    if not stays:
        step = f"then: {_up(cluster, names)}"
    elif node["failed"]:  # a restart alone cannot repair what it says
        step = f"then: nodeagentctl local start {name}{_named(cluster)}"
    else:
        step = f"it is started again by itself: {_status_of(cluster)}"
    return LocalError(found, words, f"correct what it says; {step}")


def _last_words(cluster: registry.LocalCluster, process: str, log: Path) -> tuple[str, list[str]]:
    """A sentence about a process, with its log's name, and the last lines of the log."""
    words = _tail(log)
    if not words:
        return f"{process} wrote nothing", words
    whole = "" if cluster.temporary else f" (all of it: {log})"  # a temporary cluster's log goes with it
    return f"{process} wrote last{whole}:", words


def _named(cluster: registry.LocalCluster) -> str:
    return "" if cluster.name == DEFAULT else f" --name {cluster.name}"


def _status_of(cluster: registry.LocalCluster) -> str:
    return f"nodeagentctl local status{_named(cluster)}"


def _up(cluster: registry.LocalCluster, nodes: Collection[str]) -> str:
    """How to bring up such a cluster once more."""
    up = f"nodeagentctl local up --nodes {len(nodes)}"
    return f"run it again (or {up}, which keeps the logs)" if cluster.temporary else f"{up}{_named(cluster)}"


def _status(
    cluster: registry.LocalCluster, names: Collection[str], supervisor: subprocess.Popen[bytes] | None
) -> control.Reply | None:
    """None while the supervisor is still starting. Raises LocalError if it ended."""
    ended = supervisor.poll() is not None if supervisor else not registry.alive(cluster)
    if ended:
        what = "the local cluster's supervisor ended. It"
        found, words = _last_words(cluster, what, cluster.layout.supervisor_log)
        nodes = names if supervisor else cluster.nodes()
        raise LocalError(found, words, f"correct what it says; then: {_up(cluster, nodes)}")
    try:
        return control.ask(cluster.layout.control, {"do": "status"})
    except control.NoSupervisorError:
        return None


def shares(uuids: Sequence[str], nodes: int, workers: int | None) -> list[tuple[str, ...]]:
    """Each node's GPUs, neighbours together. If every node is to run ``workers`` workers and there is not one GPU for
    each worker, no node gets a GPU: the nodes of one gang should be alike."""
    if workers is not None and len(uuids) < nodes * workers:
        return [()] * nodes
    each, more = divmod(len(uuids), nodes)
    ends = [node * each + min(node, more) for node in range(nodes + 1)]
    return [tuple(uuids[low:high]) for low, high in pairwise(ends)]


def visible(uuids: Sequence[str], named: str | None) -> list[str]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to this shell: numbers or beginnings of UUIDs, up to the first that
    names none, as CUDA reads it. None: the shell does not set it."""
    if named is None:
        return list(uuids)
    chosen: list[str] = []
    for word in filter(None, (part.strip() for part in named.split(","))):
        number = int(word) if word.isdecimal() and len(word) < 5 else len(uuids)
        found = uuids[number : number + 1] or [one for one in uuids if one.startswith(word)]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return chosen


def _gpus() -> tuple[list[str], str]:
    """The UUIDs of this machine's GPUs that are this shell's, and a sentence if they are not known."""
    if missing := hardware_missing():
        return [], f"{missing}: the local nodes have no GPUs"
    from nodeagent.hardware.discovery import installed_gpus

    uuids, problem = installed_gpus()
    return visible(uuids, os.environ.get("CUDA_VISIBLE_DEVICES")), problem


def _launch(
    name: str, nodes: int, nproc: int | None, agent: Sequence[str] | None, *, temporary: bool, stdin: int
) -> tuple[registry.LocalCluster, subprocess.Popen[bytes]]:
    folders = LocalFolders.of_user()
    running = registry.clusters(folders)
    uuids, problem = _gpus()
    if problem:
        print(problem, file=sys.stderr)
    data = temporary_data() if temporary else folders.data / name
    ports = choose_ports([c.ports for c in running])
    cluster, lock = registry.create(folders, name, data, ports, temporary=temporary)
    try:
        if not temporary:
            shutil.rmtree(data, ignore_errors=True)  # of an earlier cluster of this name
            make_folder(data)
        command = [
            *(sys.executable, "-P", "-m", "nodeagent.local.supervisor"),  # no module of the folder that it is in
            *("--run", str(cluster.run)),
            *("--shares", json.dumps(shares(uuids, nodes, nproc))),
            *("--slots", str(max(SLOTS, nproc or 0))),
            *(("--agent", json.dumps(list(agent))) if agent else ()),
            *(("--until-eof",) if temporary else ()),
        ]
        with cluster.layout.supervisor_log.open("ab") as log:
            cluster.layout.supervisor_log.chmod(0o600)  # its owner's alone, as all that the supervisor writes
            supervisor = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=log,
                stderr=log,
                env=power.unmarked(os.environ),
                pass_fds=(lock,),
                start_new_session=True,
            )
    except OSError as error:
        registry.remove(cluster, keep_data=False)
        raise LocalError(f"cannot start a local cluster: {error}") from error
    finally:
        os.close(lock)
    return cluster, supervisor


def _end(cluster: registry.LocalCluster, supervisor: subprocess.Popen[bytes], *, keep_data: bool) -> None:
    """The supervisor was asked to end: wait for it, and remove what it could not."""
    try:
        supervisor.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()
    registry.remove(cluster, keep_data=keep_data)


def _tail(log: Path) -> list[str]:
    """The last lines of a log, none if there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL * LONGEST_LINE))
            lines = file.read(TAIL * LONGEST_LINE).decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..." for line in lines[-TAIL:]]
