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
from nodeagent.local.layout import NAME, LocalError, LocalFolders, LocalTimedOutError, folder_mode, temporary_data
from nodeagent.local.registry import SLOTS, choose_ports, node_names

JOIN_TIMEOUT = 60.0
"""Seconds for all nodes to join: many nodes that import at once on two cores take a while."""
END_TIMEOUT = 20.0
"""Seconds for the supervisor to remove everything: the bound of a power cut, that of Redis, and a margin."""
CRASHES = 3
"""After this many ends of an agent that never joined, waiting for it is pointless."""
TAIL = 15
"""Lines of a log shown when something did not start."""


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
            _end(cluster, supervisor)
    finally:
        if write_end >= 0:
            os.close(write_end)


def up(
    nodes: int, name: str, *, agent: Sequence[str] | None = None, timeout: float = JOIN_TIMEOUT
) -> registry.LocalCluster:
    """Start a cluster that stays when this command ends. Raises LocalError; then nothing is left of it."""
    if not NAME.fullmatch(name):
        raise LocalError(f"{name!r} cannot be a local cluster's name: use at most 16 of a-z, 0-9 and '-'")
    cluster, supervisor = _launch(name, nodes, None, agent, temporary=False, stdin=subprocess.DEVNULL)
    try:
        wait_joined(cluster, timeout, node_names(nodes), supervisor)
    except BaseException:
        supervisor.terminate()
        _end(cluster, supervisor)
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
    the end of the log of a node that has not joined. ``supervisor``: the cluster's, if it is a child of this
    process."""
    deadline = time.monotonic() + timeout
    while True:
        status = _status(cluster, supervisor) or {"nodes": []}
        missing, answered = list(names), "the supervisor does not answer"
        for node in (n for n in status["nodes"] if n["name"] in names):
            ready, answer = control.agent_ready(Path(node["socket"]))
            if ready:
                missing.remove(node["name"])
                continue
            answered = answer
            if node["failed"] or node["crashes"] >= CRASHES:
                raise LocalError(
                    f"{node['name']}'s agent does not stay up ({node['last_end']}). The end of its log:\n"
                    + _tail(Path(node["log"]))
                )
        if not missing:
            seen = [control.live_nodes(Path(n["socket"])) for n in status["nodes"] if n["power"] == "on"]
            missing = sorted({name for known in seen if known is not None for name in names if name not in known})
            answered = "other nodes do not see it yet"
        if not missing:
            return
        if time.monotonic() > deadline:
            raise LocalTimedOutError(
                f"not joined within {timeout:g} s: {', '.join(missing)} ({answered}). The end of {missing[0]}'s log:\n"
                + _tail(cluster.layout.node(missing[0]).agent_log)
            )
        time.sleep(0.03)


def _status(cluster: registry.LocalCluster, supervisor: subprocess.Popen[bytes] | None) -> control.Reply | None:
    """None while the supervisor is still starting. Raises LocalError if it ended."""
    ended = supervisor.poll() is not None if supervisor else not registry.alive(cluster)
    if ended:
        raise LocalError(
            f"the local cluster's supervisor ended. The end of its log:\n{_tail(cluster.layout.supervisor_log)}"
        )
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
            data.mkdir(mode=folder_mode(), parents=True)
        command = [
            *(sys.executable, "-m", "nodeagent.local.supervisor"),
            *("--run", str(cluster.run)),
            *("--shares", json.dumps(shares(uuids, nodes, nproc))),
            *("--slots", str(max(SLOTS, nproc or 0))),
            *(("--agent", json.dumps(list(agent))) if agent else ()),
            *(("--until-eof",) if temporary else ()),
        ]
        with cluster.layout.supervisor_log.open("ab") as log:
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


def _end(cluster: registry.LocalCluster, supervisor: subprocess.Popen[bytes]) -> None:
    """The supervisor was asked to end: wait for it, and remove what it could not."""
    try:
        supervisor.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()
    registry.remove(cluster, keep_data=False)


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()[-TAIL:]
    except OSError as error:
        return f"({log}: {error.strerror})"
    return "\n".join(lines) or "(empty)"
