"""``doctor`` against a live API, with a real Redis to look at."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nodeagent.ctl.client import Client
from nodeagent.ctl.main import cli
from nodeagent.local.privateredis import PrivateRedis
from nodeagent.model.node import HttpsAddress
from nodeagent.pods.base import PodStatus
from nodeagent.spec.sections import ApiTlsConfig
from nodeagent.spec.storeconfig import RedisConfig
from nodeagent.store.errors import waits_for
from nodeagent.trust.certificate import fingerprint
from tests.integration.redis_support import Authority
from tests.unit.api.fakes import BOOT, LiveAgent, live_agent, spec

pytestmark = pytest.mark.redis


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[LiveAgent]:
    """One of three nodes on this machine."""
    with PrivateRedis(tmp_path / "redis", persist=True) as server, live_agent(tmp_path, obeys=False) as started:
        started.view.config = started.view.config.model_copy(update={"redis": RedisConfig(url=server.url)})
        unlike(started, "127.0.0.1", "127.0.0.1", "127.0.0.1")
        yield started


def unlike(agent: LiveAgent, *addresses: str) -> None:
    """Have the nodes these addresses, all on one machine."""
    facts = [{"address": address, "boot_id": BOOT} for address in addresses]
    agent.view.unlike = dict(zip(agent.view.names, facts, strict=True))
    agent.do(agent.view.join)


def ctl(agent: LiveAgent, *words: str) -> Result:
    return CliRunner().invoke(cli, ["--agent", agent.socket, *words], prog_name="nodeagentctl")


def errors(agent: LiveAgent) -> dict[str, str]:
    """Where to what."""
    items: list[dict[str, Any]] = Client([agent.socket]).get("/v1/doctor")["items"]
    return {f["where"]: f["what"] for f in items if f["severity"] == "error"}


def test_what_is_wrong_with_nodes_and_jobs(agent: LiveAgent) -> None:
    assert errors(agent) == {}
    job = agent.submit(spec())
    agent.do(lambda: agent.view.form(job, 2))
    agent.view.reasons = ("needs 2 nodes, 1 fits",)
    agent.do(agent.view.refresh)
    agent.do(lambda: agent.view.end(agent.view.job("digits"), "holding", "too few"))
    agent.view.silent.add("n3")
    agent.until(lambda: "n3" in agent.view.cluster().lapsed)
    found = errors(agent)
    assert found["job/digits"] == "holds, nothing of it trains: needs 2 nodes, 1 fits"
    assert found["node/n3"].startswith("silent: ")
    result = ctl(agent, "doctor")
    assert result.exit_code == 1
    assert "error    job/digits" in result.stdout
    assert "fix: nodeagentctl describe digits" in result.stdout
    assert "node n1 was asked" in result.stderr


def test_a_certificate_that_was_replaced_under_its_agent(agent: LiveAgent, tmp_path: Path) -> None:
    """Whose had ended, and had been replaced: nothing was said, and nobody trusted the agent."""
    cert, _ = Authority(tmp_path).issue("n1", "IP:127.0.0.1")
    api = agent.view.config.api.model_copy(update={"listen": "127.0.0.1", "tls": ApiTlsConfig(cert=cert)})
    agent.view.config = agent.view.config.model_copy(update={"api": api})

    def reported(digest: str) -> bool:
        https = HttpsAddress(url="https://127.0.0.1:9470", certificate=digest, proof="")
        agent.view.unlike["n1"] = agent.view.unlike["n1"] | {"https": https}
        agent.do(agent.view.join)
        found = Client([agent.socket]).get("/v1/doctor")["items"]
        return any("another one than the agent serves" in f["what"] for f in found)

    assert (reported(fingerprint(cert.read_text())), reported("ab")) == (False, True)


def test_whom_a_store_that_has_lost_writes_waits_for(agent: LiveAgent) -> None:
    agent.view.store_waits = waits_for(("n2", "n3"), 2, 42.0)
    output = ctl(agent, "doctor")
    assert output.exit_code == 0, "it ends by itself, and what runs goes on"
    lines = output.stdout.splitlines()
    (at,) = [
        i for i, line in enumerate(lines) if "waits for nodes that may know it: n2, n3; nothing is decided" in line
    ]
    assert lines[at].split()[:2] == ["warning", "store"]
    assert "fix: start the agents of those nodes" in lines[at + 1]


def test_the_exit_code_and_the_formats(agent: LiveAgent) -> None:
    right = ctl(agent, "doctor", "-o", "json")
    assert (right.exit_code, json.loads(right.stdout)["ok"]) == (0, True), right.stdout
    unlike(agent, "192.0.2.7", "127.0.0.1", "127.0.0.1")
    wrong = ctl(agent, "doctor", "-o", "json")
    found = json.loads(wrong.stdout)
    assert (wrong.exit_code, found["ok"]) == (1, False)
    assert "192.0.2.7" in found["items"][0]["what"]
    assert set(found["items"][0]) == {"severity", "where", "what", "fix"}
    assert ctl(agent, "doctor", "-o", "name").stdout.splitlines()[0] == "node/n1"
    assert ctl(agent, "doctor", "-o", "wide").stdout.splitlines()[0].split() == ["SEVERITY", "WHERE", "WHAT", "FIX"]


def test_who_asks_meanwhile_gets_the_answer_of_the_same_look(agent: LiveAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 callers at once had the agent connect to each node 32 times."""
    looks, gate, client = list[int](), threading.Event(), Client([agent.socket])

    async def ask_peers(_addresses: object, port: int, bound: float) -> tuple[()]:
        looks.append(port)
        await asyncio.to_thread(gate.wait, 30)
        return ()

    monkeypatch.setattr("nodeagent.doctor.cluster.ask_peers", ask_peers)
    with ThreadPoolExecutor(8) as callers:
        asked = [callers.submit(client.get, "/v1/doctor?peers=1") for _ in range(8)]
        agent.until(lambda: bool(looks))
        time.sleep(0.3)
        gate.set()
        assert [one.result(30)["peers"] for one in asked] == [[]] * 8
    assert len(looks) < 3, "and whoever came after it had a look of their own"


def test_peers(agent: LiveAgent) -> None:
    unlike(agent, "127.0.0.1", "127.0.0.1", "no-such-host.invalid")
    result = ctl(agent, "doctor", "--peers")
    assert result.exit_code == 1
    assert "n1 cannot resolve no-such-host.invalid of n3" in result.stdout
    assert "1 of its 2 peers can be reached" in result.stderr
    peers = json.loads(ctl(agent, "doctor", "--peers", "-o", "json").stdout)["peers"]
    assert [(p["node"], p["outcome"]) for p in peers] == [("n2", "refused"), ("n3", "unresolved")]


def test_a_store_that_is_away(agent: LiveAgent) -> None:
    agent.view.config = agent.view.config.model_copy(update={"redis": RedisConfig(url="unix:///nowhere/redis.sock")})
    agent.view.away_since = time.time() - 5
    found = errors(agent)
    assert "cannot be reached" in found["store"]
    assert found["node/n1"].startswith("its agent has had no answer from the store for ")


def test_an_agent_that_has_not_joined_answers_too(agent: LiveAgent) -> None:
    agent.view.joined = False
    agent.view.me = lambda: None  # type: ignore[method-assign]
    assert errors(agent)["node/n1"] == "has not joined its cluster: the id n1 is taken by 10.0.0.9"


def test_without_an_agent(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["--agent", str(tmp_path / "none.sock"), "doctor", "--peers", "-o", "json"])
    found = json.loads(result.stdout)
    assert (result.exit_code, found["node"], found["ok"]) == (1, None, False)
    assert found["items"][0]["where"] == "agent"
    assert "no agent listens on" in found["items"][0]["what"]
    assert "nodeagent" in found["items"][0]["fix"]


def test_members_of_a_gang_that_cannot_reach_each_other(agent: LiveAgent) -> None:
    job = agent.submit(spec())
    agent.do(lambda: agent.view.form(job, 2))
    agent.view.unlike["n2"] |= {"peer": "10.0.0.2:7402"}
    agent.do(agent.view.join)
    assert "cannot reach" not in ctl(agent, "doctor").stdout
    pods = agent.view.gangs[job.uid]
    pods["n1"] = pods["n1"].model_copy(update={"unreachable": {"n2": time.time() - 40}})
    agent.do(agent.view.refresh)
    words = "n1 cannot reach n2 at 10.0.0.2:7402 (no answer over UDP for 4"
    found = [line for line in ctl(agent, "doctor").stdout.splitlines() if words in line]
    assert [line.split()[:2] for line in found] == [["warning", "job/digits"]]
    for name in ("digits", "n1", "n2"):
        shown = " ".join(ctl(agent, "describe", name).stdout.split())
        assert words in shown
        assert "Next: look at the network between these nodes" in shown
    assert "cannot reach" not in ctl(agent, "describe", "n3").stdout
    agent.view.away_since, agent.view.unreachable = time.time(), {job.uid: {"n2": time.time() - 40}}
    assert "cannot reach" not in ctl(agent, "describe", "digits").stdout, "it has no pod of the job"
    agent.view.own_pods[job.uid] = PodStatus(uid=job.uid, phase="running")
    assert words in " ".join(ctl(agent, "describe", "digits").stdout.split()), "what this agent knows by itself"


def test_the_limits_of_users_and_what_is_used_of_them(agent: LiveAgent) -> None:
    agent.submit(spec(), owner=54321)
    asked = ctl(agent, "doctor")
    assert "limits of a user (config of node n1): 100 live jobs, 16MiB of job specs" in asked.stderr
    assert json.loads(ctl(agent, "doctor", "-o", "json").stdout)["limits"]["followers"] == 16
    shown = " ".join(ctl(agent, "describe", "digits").stdout.split())
    assert "Limits: 54321 has 1 of 100 live jobs" in shown
    assert "at n1 0 of 32 requests under way, 0 of 16 followers" in shown
