"""The API and the tool while the store is away (a real one, stopped under a real agent), and while a node is silent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from nodeagent.ctl import client
from nodeagent.ctl.client import Client
from nodeagent.ctl.main import cli
from nodeagent.ctl.terminal import CtlError
from nodeagent.local.privateredis import PrivateRedis
from nodeagent.local.registry import choose_ports
from nodeagent.osutil.tether import tethered
from nodeagent.trust.key import make
from tests.folders import short
from tests.unit.api.fakes import LiveAgent, live_agent, spec

BOUND = 60.0
AT_ONCE = 0.4
"""Seconds: less than one timeout of the store, so nobody asked it."""


def ctl(socket: Path | str, *words: str) -> Result:
    return CliRunner().invoke(cli, ["--agent", str(socket), *words], prog_name="nodeagentctl")


# --- a real agent whose store stops answering


class RealAgent:
    """One node's agent, as a process of its own, on a Redis of its own; ``program``: what is the daemon."""

    def __init__(
        self, folder: Path, redis: PrivateRedis, program: Sequence[str] = ("-m", "nodeagent.agent.main")
    ) -> None:
        self.folder, self.redis = folder, redis
        self.socket = folder / "run" / "api.sock"
        config = {
            "cluster": "away",
            "cluster_key": str(folder / "cluster.key"),
            "node": {"id": "n1", "address": "127.0.0.1", "cpu_slots": 2, "gpus": "none"},
            "redis": {"url": redis.url},
            "ports": {"api": 0, "rendezvous": "{}-{}".format(*choose_ports(()))},
            "dirs": {name: str(folder / name) for name in ("run", "state", "logs")},
            "jobs": {"allow_root": os.geteuid() == 0},
        }
        make(folder / "cluster.key")
        file = folder / "agent.yaml"
        file.write_text(yaml.safe_dump(config))
        with (folder / "agent.log").open("wb") as log:
            command = [sys.executable, *program, "run", "--config", str(file)]
            self.process = subprocess.Popen(tethered(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def client(self) -> Client:
        return Client([str(self.socket)], patience=BOUND)

    def job(self) -> dict[str, Any]:
        return self.client.get("/v1/jobs/sleeper")

    def until(self, so: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + BOUND
        while not so():
            assert time.monotonic() < end, f"{what}\n{(self.folder / 'agent.log').read_text()}"
            time.sleep(0.05)

    def stop_store(self) -> None:
        self._signal_store(signal.SIGSTOP)

    def resume_store(self) -> None:
        self._signal_store(signal.SIGCONT)

    def _signal_store(self, number: int) -> None:
        assert self.redis.pid is not None
        os.kill(self.redis.pid, number)

    def http(self, path: str) -> tuple[int, str]:
        url = self.client.get("/v1/nodes/n1")["http"]
        try:
            with urllib.request.urlopen(url + path, timeout=BOUND) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def end(self) -> None:
        """Workers first: it leaves the cluster."""
        self.resume_store()
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(BOUND)
        finally:
            self.process.kill()


@pytest.fixture
def real() -> Iterator[RealAgent]:
    with tempfile.TemporaryDirectory(prefix="na-away-", dir=short()) as folder, PrivateRedis() as redis:
        agent = RealAgent(Path(folder), redis)
        try:
            agent.client.get("/v1/nodes")
            words = ("run", "--name", "sleeper", "--nproc-per-node", "1", "--no-fork-server", "--detach", "--")
            done = ctl(agent.socket, *words, "sleep", "600")
            assert done.exit_code == 0, done.stderr
            agent.until(lambda: agent.job()["phase"] == "running" and bool(pids(agent.job())), "the job runs")
            yield agent
        finally:
            agent.end()


def pids(job: dict[str, Any]) -> list[int]:
    return [w["pid"] for p in job["pods"] for w in p["workers"] if w["state"] == "running"]


def at_once(*words: str, socket: Path) -> Result:
    """What came so soon, perhaps not on the first try: this machine is shared."""
    end = time.monotonic() + BOUND
    while True:
        began = time.monotonic()
        result = ctl(socket, *words)
        now = time.monotonic()
        if now - began < AT_ONCE:
            return result
        assert now < end, words


def test_a_stopped_store(real: RealAgent) -> None:
    real.until(lambda: real.job()["lent"] is real.job()["store_away_since"] is None, "the store answers")
    before = real.job()
    assert [k["node"] for k in before["failsafe_members"]] == ["n1"]
    real.stop_store()
    real.until(lambda: (real.job()["lent"] or {}).get("state") == "lent", "its time is lent")

    for words in (("get",), ("get", "sleeper"), ("describe", "sleeper"), ("nodes",), ("top",), ("describe", "n1")):
        shown = at_once(*words, socket=real.socket)
        assert shown.exit_code == 0, shown.stderr
        assert shown.stderr.startswith("nodeagentctl: the store has not answered the agent that was asked since "), (
            words
        )
        assert "sleeper" in shown.stdout
    output = ctl(real.socket, "describe", "sleeper").stdout
    assert "Runs on:     failsafe time from n1 (the store has not answered the agent of n1 since " in output
    assert json.loads(ctl(real.socket, "get", "-o", "json").stdout)["store_away_since"] is not None

    for change in (("scale", "sleeper", "1"), ("stop", "sleeper"), ("cordon", "n1", "--reason", "x"), ("forget", "n1")):
        began = time.monotonic()
        refused = ctl(real.socket, *change)
        assert time.monotonic() - began < 15.0, change
        assert refused.exit_code == 5, change
        assert "nothing was changed, and nothing can be until it answers" in refused.stderr

    alive, _ = real.http("/healthz")
    ready, why = real.http("/readyz")
    assert (alive, ready) == (200, 503)
    assert json.loads(why)["lent"].keys() == {before["uid"]}
    _, page = real.http("/metrics")
    metrics = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert float(metrics["nodeagent_store_away_seconds"]) > 0
    assert float(metrics["nodeagent_failsafe_jobs"]) == 1

    real.resume_store()
    real.until(lambda: real.job()["store_away_since"] is None, "the store answers")
    real.until(lambda: real.http("/readyz")[0] == 200, "it is ready")
    after = real.job()
    assert (pids(after), after["restarts"], after["phase"]) == (pids(before), 0, "running")
    assert after["control_rev"] == before["control_rev"], "what was refused did not happen later"
    real.until(lambda: real.client.get("/v1/nodes/n1")["state"] == "ready", "so is the node")
    live = ctl(real.socket, "forget", "n1")
    assert (live.exit_code, "n1 holds its lease" in live.stderr) == (6, True)


# --- a node that is silent


@pytest.fixture
def still(tmp_path: Path) -> Iterator[LiveAgent]:
    """An agent that does nothing of what is asked."""
    with live_agent(tmp_path, obeys=False, allow_root=True) as started:
        yield started


def silenced(agent: LiveAgent, node: str) -> None:
    agent.view.silent.add(node)
    agent.until(lambda: node in agent.view.cluster().lapsed)


def test_a_job_that_waits_for_a_silent_failsafe_member_says_so_until_it_is_forgotten(still: LiveAgent) -> None:
    still.view.failsafe_members = ("n3",)
    job = still.submit(spec())
    still.do(lambda: still.view.form(job, 2))
    silenced(still, "n3")
    text = "nothing has been received from n3, which may keep generation 1 running: nodeagentctl forget NODE"
    still.view.reasons = (text,)
    wide = ctl(still.socket, "get", "-o", "wide").stdout
    assert wide.rstrip().endswith(text)
    described = ctl(still.socket, "describe", "digits").stdout
    assert f"Why:         {text}" in described
    assert "Failsafe:    n3 (silent)" in described
    assert "nodeagentctl forget NODE" in described.splitlines()[-1]
    assert "nodeagentctl forget n3" in ctl(still.socket, "describe", "n3").stdout

    done = ctl(still.socket, "forget", "n3")
    assert (done.exit_code, done.stdout) == (0, "node/n3 forgotten\n")
    still.until(lambda: not still.view.job("digits").failsafe_members)
    events = list(Client([still.socket]).stream("/v1/events"))
    (output,) = [e for e in events if e["kind"] == "NodeForgotten"]
    assert output["node"] == "n3"
    assert ctl(still.socket, "get", "digits", "-o", "json").exit_code == 0
    again = ctl(still.socket, "forget", "n3", "-o", "json")
    assert (again.exit_code, json.loads(again.stdout)["removed"]) == (0, True)
    still.until(lambda: "n3" not in ctl(still.socket, "nodes", "-o", "name").stdout)
    gone = ctl(still.socket, "forget", "n3")
    assert (gone.exit_code, "n3" in gone.stderr) == (3, True)
    assert len([e for e in Client([still.socket]).stream("/v1/events") if e["kind"] == "NodeForgotten"]) == 1


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("forget", "n2"), 6, "node n2 holds its lease: drain it, or stop its agent, first"),
        (("forget", "n9"), 3, "there are: n1, n2, n3"),
        (("forget",), 2, "NODE"),
    ],
)
def test_what_forget_refuses(still: LiveAgent, words: tuple[str, ...], code: int, says: str) -> None:
    refused = ctl(still.socket, *words)
    assert (refused.exit_code, says in refused.stderr) == (code, True), refused.stderr


def test_a_write_whose_answer_is_lost_is_not_known(still: LiveAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store stops answering in the middle: nobody could know before."""
    monkeypatch.setattr(client, "ASK_AGAIN_FOR", 0.0)
    still.submit(spec())
    still.view.store.away = True
    with pytest.raises(CtlError) as raised:
        Client([still.socket]).change("POST", "/v1/jobs/digits/stop")
    assert (raised.value.code, raised.value.kind) == (5, "unknown_outcome")
    assert "it is not known whether the change was written" in raised.value.message


def test_a_store_that_answers_again_soon_is_no_error_of_a_change(still: LiveAgent) -> None:
    still.submit(spec())
    still.view.store.away = True
    back = threading.Timer(2 * client.ASK_AGAIN_EVERY, setattr, (still.view.store, "away", False))
    back.start()
    stopped = Client([still.socket]).change("POST", "/v1/jobs/digits/stop")
    back.join()
    assert stopped["name"] == "digits"
